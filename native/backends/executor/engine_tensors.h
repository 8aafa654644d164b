// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "contract.h"
#include "enumeration.h"
#include "status.h"

namespace ifab::executor {

// The tensors of an engine, as the engine enumerates them: the one answer to what its outputs are called. The runtime
// itself does not say when a name is wrong; it answers as if such a tensor were there, and fails every request that is
// active when it is first asked for. The engine is opened on the card of that number, which is the one that will run
// it, and let go of again. The plugins must be registered.
//
// IFAB_UNAVAILABLE: no card or no library. IFAB_FAILED_PRECONDITION: the engine does not load here.
Status list_tensors(const std::string& engine_path, const ContractValues& contract, int32_t card,
                    std::vector<tensorrt::TensorInfo>& out);

// Appends a finding for each payload output that the engine does not have, or has in another form than one row of the
// contract's hidden size and number format for each sequence.
void check_outputs(const std::vector<std::string>& names, const std::vector<tensorrt::TensorInfo>& tensors,
                   const ContractValues& contract, std::vector<Finding>& findings);

}  // namespace ifab::executor
