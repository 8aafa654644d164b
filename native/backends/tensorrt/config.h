// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "directory.h"
#include "status.h"

namespace ifab::tensorrt {

// The engine's own configuration, by which the library knows its directory.
inline constexpr const char* kConfigurationFile = "tensorrt.json";

// The values of a tensorrt.json: which plan, and what it needs beside itself. Everything else about the engine, the
// plan says.
struct Config {
  std::string plan;                  // file of the directory
  std::vector<std::string> plugins;  // libraries with the plugins that the plan uses, by soname; in order of loading
};

// Reads the configuration and compares it with the directory. Appends everything that is wrong.
std::optional<Config> read_config(const EngineDirectory& directory, std::vector<Finding>& findings);

}  // namespace ifab::tensorrt
