// SPDX-License-Identifier: Apache-2.0
//
// The JSON documents that the library answers with.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "backend.h"
#include "contract.h"
#include "events.h"
#include "status.h"

namespace ifab {

// {"findings": [...]}, for ifab_contract_check().
std::string findings_report(const std::vector<Finding>& findings);

// The document of ifab_engine_inspect(). configuration_file is empty where no backend, or several, know the directory.
std::string inspection_report(std::string_view contract_sha256, std::string_view configuration_file,
                              const std::vector<Finding>& findings);

// The document of ifab_engine_describe().
std::string engine_report(std::string_view contract_sha256, const ContractValues& contract, const EngineFacts& facts,
                          const EventLimits& events, int64_t load_ms);

}  // namespace ifab
