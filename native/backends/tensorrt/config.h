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
  std::string plan;  // file of the directory
  // Libraries with the plugins that the plan uses, in order of loading: by path where the directory has a file of that
  // name, by soname where it has not.
  std::vector<std::string> plugins;
};

// Reads the configuration and compares it with the directory. Appends everything that is wrong.
std::optional<Config> read_config(const EngineDirectory& directory, std::vector<Finding>& findings);

}  // namespace ifab::tensorrt
