// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "backend.h"
#include "contract.h"
#include "directory.h"
#include "events.h"
#include "status.h"

namespace ifab {

// Where the loaded engine is not what its contract says: each field with what the engine has and what was promised.
std::vector<Finding> disagreements(const EngineFacts& facts, const ContractValues& contract);

}  // namespace ifab
