// SPDX-License-Identifier: Apache-2.0
#include "admission_plan.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "admission.h"
#include "formula.h"
#include "simulated.h"

namespace ifab::test {
namespace {

constexpr uint32_t kVocabulary = 64;
constexpr int32_t kOrdinaryIds = 60;
constexpr uint32_t kLeastRequests = 64;
constexpr uint32_t kMostRequests = 80;

using simulated::FaultKind;
using simulated::RequestFault;

// With a long leader, a prompt takes more steps than anybody waits for it, and all others are its followers.
simulated::Config engine_of(Random& random, bool long_leader) {
  simulated::Config config;
  config.seed = random.next();
  config.vocab_size = kVocabulary;
  config.hidden_size = 4;
  config.layers = 1;
  config.slots = random.between(1, long_leader ? 2 : 16);
  config.samples_max = 4;
  config.kv_block_tokens = random.one_in(16) ? 0 : random.between(1, 8);
  config.splits_prompts = long_leader || !random.one_in(4);
  config.step_token_budget = config.slots + (long_leader ? 0 : random.between(0, 48));
  config.sequence_tokens = long_leader ? 1200 : 96;
  config.max_input_tokens = config.sequence_tokens;
  config.scoring = random.one_in(8) && !long_leader;
  config.end_ids = {0};
  config.end_one_in = random.one_in(2) ? 12 : 0;
  // From a pool that holds one or two requests to one that holds all of them.
  if (config.kv_block_tokens > 0) {
    const uint32_t sequence_blocks = (long_leader ? 1200 : 48) / config.kv_block_tokens + 2;
    config.kv_pool_blocks = sequence_blocks * random.between(1, random.one_in(2) ? 2 : 12);
  }
  if (random.one_in(4)) {
    config.payload_values = 4;
    config.payload_dtype = IFAB_DTYPE_FLOAT32;
  }
  return config;
}

void add_faults(Random& random, Plan& plan) {
  simulated::Config& config = plan.config;
  const auto marked = [&](FaultKind kind, int32_t mark, uint32_t count) {
    config.request_faults.push_back({kind, RequestFault::Trigger::kPromptToken, static_cast<uint32_t>(mark), count});
  };
  switch (random.between(0, 5)) {
    case 0:
      marked(FaultKind::kNoRoom, Plan::kNoRoomForLong, 1'000'000);
      break;
    case 1:
      marked(FaultKind::kNoRoom, Plan::kNoRoomTwice, 2);
      break;
    case 2:
      marked(FaultKind::kNoRoom, Plan::kNoRoomUntilProgressOnly, 0);
      break;
    default:
      break;
  }
  if (random.one_in(3)) marked(FaultKind::kStall, Plan::kStalls, 0);
  plan.counted_stalls = random.one_in(4);
  for (uint32_t i = random.between(0, 3); i > 0; --i) {
    config.step_faults.push_back(
        {FaultKind::kStall, random.between(1, 60), plan.counted_stalls ? random.between(1, 12) : 0});
  }
}

// A prompt: the head of its group, which others share, then a tail of its own.
std::vector<int32_t> prompt_of_group(Random& random, uint64_t group_seed, uint32_t head, uint32_t tail) {
  std::vector<int32_t> prompt;
  Random group(group_seed);
  for (uint32_t i = 0; i < head; ++i) prompt.push_back(static_cast<int32_t>(group.between(0, kOrdinaryIds - 1)));
  for (uint32_t i = 0; i < tail; ++i) prompt.push_back(static_cast<int32_t>(random.between(0, kOrdinaryIds - 1)));
  return prompt;
}

// Nothing where the engine is so small that hardly any request fits.
std::optional<Plan> drawn(uint64_t seed) {
  Random random(simulated::mix(seed));
  Plan plan;
  const bool long_leader = random.one_in(256);
  plan.config = engine_of(random, long_leader);
  add_faults(random, plan);
  plan.arrivals_most = random.one_in(3) ? kMostRequests : random.between(1, 8);
  plan.cancel_one_in = random.one_in(2) ? random.between(1, 12) : 0;
  plan.payload_slots = plan.config.payload_values > 0 ? random.between(1, 2 * plan.config.slots) : 0;

  const EngineFacts facts = simulated::facts_of(plan.config);
  const uint32_t groups = long_leader ? 1 : random.between(1, 6);
  const uint64_t group_seed = random.next();
  const uint32_t marks_one_in = random.between(4, 40);
  const uint32_t high_one_in = random.between(1, 4);
  const uint32_t requests = random.between(kLeastRequests, kMostRequests);
  plan.requests.reserve(requests);
  while (plan.requests.size() < requests) {
    const uint32_t group = random.between(0, groups - 1);
    const uint32_t head = long_leader ? 1100 : (group * 7) % 25;
    Request request;
    request.id = plan.requests.size() + 1;
    request.prompt = prompt_of_group(random, group_seed + group, head, random.between(1, 12));
    if (random.one_in(marks_one_in)) request.prompt.back() = static_cast<int32_t>(random.between(Plan::kStalls, 63));
    request.samples = random.one_in(6) ? random.between(1, 4) : 1;
    request.max_tokens = random.between(1, 10);
    request.priority = random.one_in(high_one_in) ? 1 : static_cast<int32_t>(random.between(0, 1)) - 1;
    request.salt = random.one_in(10) && !long_leader ? 1 : 0;
    request.stop_ids = {0};
    request.sampling.seed = random.next();
    request.prompt_logprobs = plan.config.scoring && random.one_in(10);
    request.want_payload = plan.payload_slots > 0 && !random.one_in(5);
    if (never_fits(facts, request).ok()) {
      plan.requests.push_back(std::move(request));
    } else if (++plan.never_fitted == 10 * kMostRequests) {
      return std::nullopt;
    }
  }
  return plan;
}

}  // namespace

uint64_t Random::next() {
  return simulated::mix(state_++);
}

Plan Plan::of(uint64_t seed) {
  // Seeds that give no plan are followed along one permutation of all seeds. Where the next one was chosen by adding
  // half of the range, two such seeds led to each other for ever.
  for (;; seed = simulated::mix(seed)) {
    if (std::optional<Plan> plan = drawn(seed)) return *std::move(plan);
  }
}

}  // namespace ifab::test
