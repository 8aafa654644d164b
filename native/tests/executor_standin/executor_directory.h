// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <filesystem>
#include <string>

#include "simulated_directory.h"

namespace ifab::standin {

// What a directory is to say otherwise: JSON merge patches (RFC 7386; null takes a field out), empty for none.
struct Patches {
  std::string contract{};
  std::string config{};    // config.json, the builder's
  std::string executor{};  // executor.json
  std::string plan{};      // rank0.engine, the stand-in's: see engine_file.h
};

// Makes, of the directory of a simulated engine, that of the same engine for the Executor's stand-in.
void convert_directory(const std::filesystem::path& simulated, const std::filesystem::path& out,
                       const Patches& patches = {});

// The same from the values of a simulated engine, whose own directory is not kept.
void write_executor_directory(const std::filesystem::path& out, test::SimulatedEngine engine,
                              const Patches& patches = {});

}  // namespace ifab::standin
