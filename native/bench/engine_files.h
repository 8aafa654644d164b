// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "config.h"
#include "directory.h"

namespace ifab::bench {

// What a benchmark needs of an engine directory. Ends the program where it is none of the llama backend.
struct EngineFiles {
  llama::Config config;
  std::string gguf_path;
  uint32_t vocab_size = 0;

  static EngineFiles read(const std::string& directory) {
    std::unique_ptr<const EngineDirectory> opened;
    Status status = EngineDirectory::open(directory, opened);
    std::string text;
    if (status.ok()) status = opened->read_text(llama::kConfigurationFile, text);
    std::vector<Finding> findings;
    const auto config = status.ok() ? llama::read_config(text, findings) : std::nullopt;
    if (!config || opened->contract() == nullptr) {
      std::fprintf(stderr, "%s is no engine directory of the llama backend: %s\n", directory.c_str(),
                   status.message().c_str());
      std::exit(1);
    }
    return {*config, opened->file_path(config->gguf), opened->contract()->model.vocab_size};
  }
};

}  // namespace ifab::bench
