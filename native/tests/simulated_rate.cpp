// SPDX-License-Identifier: Apache-2.0
// simulated_rate   how many tokens the simulated engine makes in virtual time for each second of a core: its batcher
// alone, and through the whole library with its two threads. The last line is JSON.
#include <algorithm>
#include <cstdio>
#include <ctime>
#include <vector>

#include "client.h"
#include "config.h"
#include "simulated.h"

namespace {

using namespace ifab;
using test::Ask;
using test::SimulatedEngine;

constexpr uint32_t kSlots = 64;
constexpr uint32_t kPrompt = 256;
constexpr uint32_t kOutput = 128;
constexpr uint64_t kRequests = 20'000;
constexpr int kRuns = 3;

// Time that all threads of this process spent on a core.
double core_seconds() {
  timespec time{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

class Ends final : public Sink {
 public:
  uint64_t ends = 0;
  uint64_t generated = 0;

 private:
  void prompt_computed(uint64_t, uint32_t) override {}
  void tokens(uint64_t, uint32_t, std::span<const int32_t> tokens, std::span<const float>) override {
    generated += tokens.size();
  }
  void context_done(uint64_t, uint32_t, uint32_t, std::span<const float>) override {}
  uint8_t* payload(uint64_t) override { return nullptr; }
  void finished(uint64_t, uint32_t, int32_t, int32_t, std::string_view) override { ++ends; }
  void failed(uint64_t, const Status&) override {}
};

double batcher_alone() {
  simulated::Config config;
  config.vocab_size = 512;
  config.slots = kSlots;
  config.sequence_tokens = kPrompt + kOutput;
  config.step_token_budget = 1024;
  config.splits_prompts = true;
  config.kv_block_tokens = 32;
  config.kv_pool_blocks = 4096;
  config.samples_max = 1;
  config.max_input_tokens = kPrompt;
  simulated::SimulatedBackend backend(config);
  std::vector<Request> requests(kSlots * 2);
  for (size_t i = 0; i < requests.size(); ++i) {
    requests[i].prompt = test::prompt_of(kPrompt, i);
    requests[i].max_tokens = kOutput;
  }
  Ends sink;
  uint64_t next = 0;
  const double start = core_seconds();
  while (sink.ends < kRequests) {
    while (next < kRequests && backend.room().slots > 0) {
      // Twice as many places as slots, so that none is used before its request has ended.
      Request& request = requests[next % requests.size()];
      request.id = next;
      if (backend.admit(request).outcome != AdmitOutcome::kAdmitted) break;
      ++next;
    }
    backend.step(StepMode::kNormal, sink);
  }
  return static_cast<double>(sink.generated) / (core_seconds() - start);
}

double whole_library() {
  SimulatedEngine engine;
  engine.slots = kSlots;
  engine.step_token_budget = 1024;
  engine.kv_block_tokens = 32;
  engine.kv_pool_blocks = 4096;
  engine.scoring = false;
  test::Client client(engine);
  std::vector<Ask> asks;
  for (uint64_t id = 0; id < kRequests; ++id) {
    asks.push_back({.id = id, .prompt = test::prompt_of(kPrompt, id), .max_tokens = kOutput});
  }
  const double start = core_seconds();
  client.submit(asks);
  if (!client.drain()) return 0;
  return static_cast<double>(client.stats().generated_tokens) / (core_seconds() - start);
}

double median(double (*measure)()) {
  std::vector<double> runs;
  for (int i = 0; i < kRuns; ++i) runs.push_back(measure());
  std::sort(runs.begin(), runs.end());
  return runs[kRuns / 2];
}

}  // namespace

int main() {
  const double alone = median(batcher_alone);
  const double whole = median(whole_library);
  std::printf("simulated tokens for each second of a core, prompts of %u and outputs of %u tokens, median of %d:\n",
              kPrompt, kOutput, kRuns);
  std::printf("  batcher alone   %6.1f M\n  whole library   %6.1f M\n", alone / 1e6, whole / 1e6);
  std::printf("{\"simulated_tokens_per_core_s\": %.0f, \"library_tokens_per_core_s\": %.0f}\n", alone, whole);
  return 0;
}
