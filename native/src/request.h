// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ifab/engine.h"

namespace ifab {

// A guide in the form in which a backend enforces it: see Backend::compile_guide().
class CompiledGuide {
 public:
  virtual ~CompiledGuide() = default;
};

// A request that has passed validation against the contract: no layer below checks it again.
struct Request {
  uint64_t id = 0;
  std::vector<int32_t> prompt;      // at least one id, each in [0, vocab_size)
  std::vector<int32_t> stop_ids;    // sorted; the engine's end tokens included unless ignored
  std::vector<uint32_t> head_ends;  // ascending, each in (0, prompt.size())
  std::string guide;
  int32_t guide_kind = IFAB_GUIDE_NONE;
  std::shared_ptr<const CompiledGuide> compiled_guide;  // where guide_kind is not IFAB_GUIDE_NONE
  ifab_sampling_t sampling{};
  uint64_t salt = 0;
  uint32_t max_tokens = 0;  // for each sample
  uint32_t samples = 1;
  int32_t priority = 0;
  bool logprobs = false;
  bool prompt_logprobs = false;
  bool want_payload = false;
};

}  // namespace ifab
