// SPDX-License-Identifier: Apache-2.0
//
// Any bytes as a contract document: a contract without findings or findings, and nothing else.
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "contract.h"
#include "properties.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace ifab;
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  std::vector<Finding> findings;
  const std::optional<ContractValues> contract = read_contract(text, findings);
  fuzz::check_findings(findings);
  fuzz::require(contract.has_value() == findings.empty(), "a contract comes out exactly where nothing is wrong");

  std::vector<Finding> again;
  (void)read_contract(text, again);
  fuzz::require(again.size() == findings.size(), "the same document has the same findings");
  if (!contract) return 0;

  // What everything above relies on without asking again.
  const ContractValues::Limits& limits = contract->limits;
  fuzz::require(limits.step_token_budget >= 1 && limits.step_token_budget <= limits.built_step_token_budget, "budget");
  fuzz::require(limits.slots >= 1 && limits.slots <= limits.step_token_budget, "slots");
  fuzz::require(limits.max_input_tokens >= 1 && limits.max_input_tokens <= limits.max_sequence_tokens, "input");
  fuzz::require((limits.max_output_tokens > 0) == !contract->tokenizer.end_token_ids.empty(), "end tokens");
  fuzz::require(limits.max_output_tokens > 0 || contract->capabilities.payload.has_value(), "something comes back");
  for (const int32_t id : contract->tokenizer.end_token_ids) {
    fuzz::require(id >= 0 && static_cast<uint32_t>(id) < contract->model.vocab_size,
                  "end tokens are in the vocabulary");
  }
  for (const ContractValues::File& file : contract->files) {
    fuzz::require(file.path.find("..") != 0 && file.path.front() != '/' && file.sha256.size() == 64, "files");
  }
  if (const auto& payload = contract->capabilities.payload) {
    uint64_t bytes = payload->dtype == IFAB_DTYPE_FLOAT32 ? 4 : 2;
    for (const uint32_t extent : payload->shape) bytes *= extent;
    fuzz::require(bytes == payload->size_bytes() && bytes <= uint64_t{1} << 28,
                  "the payload's size is right and bounded");
  }
  return 0;
}
