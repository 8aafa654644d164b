// SPDX-License-Identifier: Apache-2.0
#include "agreement.h"

#include <algorithm>

namespace ifab {
namespace {

class Comparison {
 public:
  void equal(const char* path, uint64_t engine, uint64_t contract) {
    if (engine != contract) add(path, engine, "contract says " + std::to_string(contract));
  }
  void at_least(const char* path, uint64_t engine, uint64_t contract) {
    if (engine < contract) add(path, engine, "contract says " + std::to_string(contract) + ", engine has less");
  }
  void can(const char* path, bool engine, bool contract) {
    if (contract && !engine) findings_.push_back({path, "engine cannot", "contract says it can"});
  }
  std::vector<Finding> take() { return std::move(findings_); }

 private:
  void add(const char* path, uint64_t engine, std::string expected) {
    findings_.push_back({path, "engine has " + std::to_string(engine), std::move(expected)});
  }

  std::vector<Finding> findings_;
};

}  // namespace

std::vector<Finding> disagreements(const EngineFacts& facts, const ContractValues& contract) {
  const ContractValues::Limits& limits = contract.limits;
  const ContractValues::Capabilities& capabilities = contract.capabilities;
  Comparison compare;
  compare.equal("model.vocab_size", facts.vocab_size, contract.model.vocab_size);
  compare.equal("model.hidden_size", facts.hidden_size, contract.model.hidden_size);
  compare.equal("model.layers", facts.layers, contract.model.layers);
  compare.equal("limits.slots", facts.slots, limits.slots);
  compare.equal("limits.step_token_budget", facts.step_token_budget, limits.step_token_budget);
  compare.at_least("limits.max_sequence_tokens", facts.max_sequence_tokens, limits.max_sequence_tokens);
  compare.equal("limits.kv_block_tokens", facts.kv_block_tokens, limits.kv_block_tokens.value_or(0));
  compare.at_least("capabilities.samples_max", facts.samples_max, capabilities.samples_max);
  compare.can("capabilities.scoring", facts.scoring, capabilities.scoring);
  for (const int32_t kind : capabilities.guide_kinds) {
    const bool can = std::find(facts.guide_kinds.begin(), facts.guide_kinds.end(), kind) != facts.guide_kinds.end();
    compare.can("capabilities.guided_decoding", can, true);
  }
  compare.equal("capabilities.payload", facts.payload_bytes,
                capabilities.payload ? capabilities.payload->size_bytes() : 0);
  if (capabilities.payload && facts.payload_bytes > 0) {
    compare.equal("capabilities.payload.dtype", static_cast<uint64_t>(facts.payload_dtype),
                  static_cast<uint64_t>(capabilities.payload->dtype));
  }
  return compare.take();
}

}  // namespace ifab
