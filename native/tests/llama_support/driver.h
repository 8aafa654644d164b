// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <deque>
#include <filesystem>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "backend.h"
#include "directory.h"
#include "request.h"
#include "simulated_directory.h"
#include "tiny_engine.h"

namespace ifab::test {

// What became of a request, as the backend told it.
struct Told {
  struct Sample {
    std::vector<int32_t> tokens;
    std::vector<float> logprobs;
    int32_t reason = 0;  // 0: has not ended
    int32_t stop_id = -1;
    std::string payload_failure;
    bool operator==(const Sample& other) const {
      return tokens == other.tokens && reason == other.reason && stop_id == other.stop_id;
    }
  };
  std::vector<Sample> samples;
  bool context_done = false;
  uint32_t cached = 0;
  uint32_t computed = 0;
  uint32_t computed_step_by_step = 0;
  std::vector<float> scores;
  std::vector<uint8_t> payload;
  bool failed = false;
  Status status;

  bool ended() const;
};

// A loaded llama backend, stepped by hand: requests enter in order as soon as its answers about room allow, one thread.
class Driver final : public Sink {
 public:
  // Writes the directory and loads it. Throws std::runtime_error where that fails.
  explicit Driver(const TinyEngine& engine);
  // Loads a directory that is there.
  explicit Driver(const std::filesystem::path& directory);

  Backend& backend() { return *backend_; }
  const ContractValues& contract() const { return *directory_->contract(); }

  // A request that waits from now on. Its id is the number of requests before it. The stop ids are the engine's own.
  uint64_t ask(std::vector<int32_t> prompt, uint32_t max_tokens);
  uint64_t ask(Request request);
  void cancel(uint64_t id);

  // Admits what fits, and steps. Returns what the step reported.
  StepReport step(StepMode mode = StepMode::kNormal);
  // Until everything has ended, or `most` steps were taken. Returns whether everything has ended.
  bool run(uint32_t most = 100'000);
  bool idle() const { return waiting_.empty() && inside_ == 0; }
  uint32_t inside() const { return inside_; }

  const Told& told(uint64_t id) const { return told_[id]; }
  const Request& request(uint64_t id) const { return *requests_[id]; }
  // What the backend told that it may not have: order broken, unknown ids, more than the budget.
  const std::vector<std::string>& violations() const { return violations_; }

  // Do not ask for room before admitting: as if admission did not exist.
  bool admission = true;
  uint64_t prompt_tokens = 0;  // computed, over all steps
  uint64_t steps = 0;

  // ---- Sink ----
  void prompt_computed(uint64_t request_id, uint32_t tokens) override;
  void tokens(uint64_t request_id, uint32_t sample, std::span<const int32_t> tokens,
              std::span<const float> logprobs) override;
  void context_done(uint64_t request_id, uint32_t cached_tokens, uint32_t computed_tokens,
                    std::span<const float> prompt_logprobs) override;
  uint8_t* payload(uint64_t request_id) override;
  void finished(uint64_t request_id, uint32_t sample, int32_t reason, int32_t stop_id,
                std::string_view payload_failure) override;
  void failed(uint64_t request_id, const Status& status) override;

 private:
  void load(const std::filesystem::path& directory);
  void admit();
  Told* alive(uint64_t request_id, const char* what);
  void check_end(uint64_t request_id);

  std::unique_ptr<TemporaryDirectory> temporary_;
  std::unique_ptr<const EngineDirectory> directory_;
  std::unique_ptr<Backend> backend_;
  std::vector<std::unique_ptr<Request>> requests_;
  std::deque<Told> told_;
  std::deque<uint64_t> waiting_;
  uint32_t inside_ = 0;
  std::vector<std::string> violations_;
};

// The engine directory that IFAB_TEST_LLAMA_ENGINE names; empty where there is none.
std::filesystem::path real_engine();
// Whether IFAB_TEST_LONG asks for the long form of tests.
bool long_tests();

// So many pseudo-random tokens of the vocabulary, the special ones left out.
std::vector<int32_t> random_prompt(uint64_t seed, size_t size, uint32_t vocab_size);

// A request as validation would make it, greedy.
Request plain_request(std::vector<int32_t> prompt, uint32_t max_tokens);

}  // namespace ifab::test
