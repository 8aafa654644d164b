// SPDX-License-Identifier: Apache-2.0
#include "admission.h"

namespace ifab {

template class BasicAdmission<AdmissionRules>;

Status never_fits(const EngineFacts& facts, const Request& request) {
  const uint64_t prompt = request.prompt.size();
  if (request.samples > facts.slots) {
    return {IFAB_INVALID_ARGUMENT, "samples: " + std::to_string(request.samples) +
                                       " need a slot each, and the engine has " + std::to_string(facts.slots)};
  }
  if (!facts.splits_prompts && prompt > facts.step_token_budget) {
    return {IFAB_INVALID_ARGUMENT, "token_ids: " + std::to_string(prompt) + " tokens, at most " +
                                       std::to_string(facts.step_token_budget) +
                                       ": the engine computes a prompt in one step of at most so many"};
  }
  if (facts.kv_block_tokens == 0) return {};
  // Samples share the full blocks of their prompt; the last, part-filled one each of them has for itself.
  const uint64_t block = facts.kv_block_tokens;
  const uint64_t shared = prompt / block;
  const uint64_t each = (prompt + request.max_tokens + block - 1) / block - shared;
  const uint64_t blocks = shared + each * request.samples;
  if (blocks <= facts.kv_pool_blocks) return {};
  return {IFAB_INVALID_ARGUMENT,
          "max_tokens: " + std::to_string(prompt) + " prompt tokens and " + std::to_string(request.samples) +
              " samples of " + std::to_string(request.max_tokens) + " tokens need " + std::to_string(blocks) +
              " KV blocks of " + std::to_string(block) + ", and the pool has " + std::to_string(facts.kv_pool_blocks)};
}

}  // namespace ifab
