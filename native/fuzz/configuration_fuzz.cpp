// SPDX-License-Identifier: Apache-2.0
//
// Any bytes as the configuration of an engine. The first byte chooses whose.
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "config.h"
#include "contract.h"
#include "embedded_schemas.h"
#include "properties.h"
#include "schema.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace ifab;
  if (size == 0) return 0;
  const auto schemas = embedded_schemas();
  const std::string_view name = schemas[data[0] % schemas.size()].name;
  const std::string_view text(reinterpret_cast<const char*>(data) + 1, size - 1);
  std::vector<Finding> findings;
  const std::optional<Value> document = read_checked(text, name, findings);
  fuzz::check_findings(findings);
  fuzz::require(document.has_value() || findings.size() == 1, "a document that cannot be read is one finding");
  if (!document || !findings.empty() || name != "simulated") return 0;

  const simulated::Config config = simulated::read_config(*document, ContractValues{});
  fuzz::require(config.slots >= 1 && config.slots <= config.step_token_budget, "slots");
  fuzz::require((config.kv_block_tokens == 0) == (config.kv_pool_blocks == 0), "cache");
  return 0;
}
