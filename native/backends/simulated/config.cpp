// SPDX-License-Identifier: Apache-2.0
#include "config.h"

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>

#include "ifab/engine.h"

namespace ifab::simulated {
namespace {

constexpr std::array<std::pair<std::string_view, FaultKind>, 8> kKinds = {{
    {"stall", FaultKind::kStall},
    {"throw", FaultKind::kThrow},
    {"slow_step", FaultKind::kSlowStep},
    {"kill_process", FaultKind::kKillProcess},
    {"no_room", FaultKind::kNoRoom},
    {"fail_request", FaultKind::kFailRequest},
    {"wrong_order", FaultKind::kWrongOrder},
    {"payload_fails", FaultKind::kPayloadFails},
}};

FaultKind kind_of(const Value& value) {
  return std::find_if(kKinds.begin(), kKinds.end(), [&](const auto& kind) { return kind.first == value.text(); })
      ->second;
}

uint32_t number(const Value& value) {
  return static_cast<uint32_t>(value.integer());
}

// "not_applicable" has the integer 0, which is how this struct says it too.
uint32_t number_or_none(const Value& value) {
  return number(value);
}

int32_t dtype_of(const Value& value) {
  return value.text() == "float32"   ? IFAB_DTYPE_FLOAT32
         : value.text() == "float16" ? IFAB_DTYPE_FLOAT16
                                     : IFAB_DTYPE_BFLOAT16;
}

}  // namespace

Config read_config(const Value& document, const ContractValues& contract) {
  Config config;
  config.seed = static_cast<uint64_t>(document.at("seed").integer());
  config.vocab_size = number(document.at("vocab_size"));
  config.hidden_size = number(document.at("hidden_size"));
  config.layers = number(document.at("layers"));
  config.slots = number(document.at("slots"));
  config.sequence_tokens = number(document.at("sequence_tokens"));
  config.step_token_budget = number(document.at("step_token_budget"));
  config.splits_prompts = document.at("splits_prompts").boolean();
  config.kv_block_tokens = number_or_none(document.at("kv_block_tokens"));
  config.kv_pool_blocks = number_or_none(document.at("kv_pool_blocks"));
  config.samples_max = number(document.at("samples_max"));
  config.scoring = document.at("scoring").boolean();
  if (const Value& payload = document.at("payload"); !payload.not_applicable()) {
    config.payload_values = number(payload.at("values"));
    config.payload_dtype = dtype_of(payload.at("dtype"));
  }
  config.end_one_in = number(document.at("end_one_in"));
  const Value& time = document.at("time");
  config.load_ms = number(time.at("load_ms"));
  config.time.scale = time.at("scale").real();
  config.time.step_ns = uint64_t{number(time.at("step_us"))} * 1000;
  config.time.prompt_token_ns = number(time.at("prompt_token_ns"));
  config.time.generated_token_ns = number(time.at("generated_token_ns"));
  config.time.context_token_ns = number(time.at("context_token_ns"));
  for (const Value& fault : document.at("step_faults").items()) {
    config.step_faults.push_back(
        {kind_of(fault.at("kind")), static_cast<uint64_t>(fault.at("step").integer()), number(fault.at("count"))});
  }
  for (const Value& fault : document.at("request_faults").items()) {
    const bool one_in = fault.at("trigger").text() == "one_in";
    config.request_faults.push_back({kind_of(fault.at("kind")),
                                     one_in ? RequestFault::Trigger::kOneIn : RequestFault::Trigger::kPromptToken,
                                     number(fault.at("value")), number(fault.at("count"))});
  }
  config.end_ids = contract.tokenizer.end_token_ids;
  std::sort(config.end_ids.begin(), config.end_ids.end());
  config.max_input_tokens = contract.limits.max_input_tokens;
  return config;
}

}  // namespace ifab::simulated
