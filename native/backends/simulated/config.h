// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "contract.h"
#include "document.h"

namespace ifab::simulated {

inline constexpr const char* kConfigurationFile = "simulated.json";

// What a fault does. Faults of a step begin with a step of that number, counted from 1 over all steps of the engine;
// faults of a request when its prompt is about to be computed, unless said otherwise, and once for each request.
enum class FaultKind {
  kStall,         // steps do nothing, for `count` of them; count 0: until a progress-only step
  kThrow,         // the step throws
  kSlowStep,      // the step takes `count` ms more
  kKillProcess,   // the process gets SIGKILL
  kNoRoom,        // admissions of the request find no room, `count` times; count 0: until a progress-only step
  kFailRequest,   // the request fails when its prompt is computed
  kWrongOrder,    // its tokens are told before its context is done
  kPayloadFails,  // its payload cannot be extracted
};

struct StepFault {
  FaultKind kind;
  uint64_t step;
  uint32_t count;
};

struct RequestFault {
  enum class Trigger {
    kPromptToken,  // the prompt contains the id `value`
    kOneIn,        // the prompt's hash says so, for one prompt in `value`: see formula.h
  };
  FaultKind kind;
  Trigger trigger;
  uint32_t value;
  uint32_t count;
};

// How long steps take: step + prompt_token for each prompt token computed + generated_token for each token generated +
// context_token for each token before a generated one.
struct StepTime {
  double scale = 0;  // real time: seconds a second of the model; 0: virtual time, steps only say how long they took
  uint64_t step_ns = 0;
  uint64_t prompt_token_ns = 0;
  uint64_t generated_token_ns = 0;
  uint64_t context_token_ns = 0;
};

// The configuration of a simulated engine, simulated.json, whose rules are in engines/schema/simulated.schema.json.
struct Config {
  uint64_t seed = 0;
  uint32_t vocab_size = 0;
  uint32_t hidden_size = 0;
  uint32_t layers = 0;
  uint32_t slots = 0;
  uint32_t sequence_tokens = 0;
  uint32_t step_token_budget = 0;
  bool splits_prompts = false;   // prompts are computed over several steps where a step has no budget for the rest
  uint32_t kv_block_tokens = 0;  // 0: no cache
  uint32_t kv_pool_blocks = 0;   // 0: no cache
  uint32_t samples_max = 0;
  bool scoring = false;
  uint32_t payload_values = 0;  // 0: no payload
  int32_t payload_dtype = 0;
  uint32_t end_one_in = 0;  // one token in so many is an end token; 0: none is
  uint32_t load_ms = 0;     // that load takes, of the clock on the wall
  StepTime time;
  std::vector<StepFault> step_faults;
  std::vector<RequestFault> request_faults;
  // From the contract.
  std::vector<int32_t> end_ids;  // ascending
  uint32_t max_input_tokens = 0;
};

// The values of a document that its schema has passed.
Config read_config(const Value& document, const ContractValues& contract);

}  // namespace ifab::simulated
