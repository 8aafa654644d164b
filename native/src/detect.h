// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "backend.h"
#include "directory.h"
#include "status.h"

namespace ifab {

// What is known of an engine directory without loading it.
struct Inspection {
  const BackendEntry* backend = nullptr;  // null unless exactly one backend knows the directory as its own
  std::vector<Finding> findings;          // of the contract, the listing, the detection and the configuration
};

// Finds the backend from the engine's own configuration and gathers everything that is wrong.
Inspection inspect(const EngineDirectory& directory);

}  // namespace ifab
