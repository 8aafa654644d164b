// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "backend.h"
#include "directory.h"
#include "executor_backend.h"
#include "executor_directory.h"
#include "request.h"
#include "simulated_directory.h"

namespace ifab::standin {

// What became of a request, as the backend told it.
struct Told {
  struct Sample {
    std::vector<int32_t> tokens;
    std::vector<float> log_probs;
    int32_t reason = 0;  // 0: has not ended
    int32_t stop_id = -1;
    std::string payload_failure;
  };
  std::vector<Sample> samples;
  uint32_t contexts_done = 0;
  uint32_t cached = 0;
  uint32_t computed = 0;
  uint32_t most_tokens_at_once = 0;
  std::vector<uint8_t> payload;
  bool failed = false;
  Status status;
  bool ended() const;
};

// Loads the executor backend from a directory, or says why not.
Status load(const std::filesystem::path& directory, std::unique_ptr<const EngineDirectory>& opened,
            std::unique_ptr<Backend>& out);
// Everything that inspection finds in a directory.
std::vector<Finding> inspect(const std::filesystem::path& directory);

// A loaded executor backend on the stand-in, stepped by hand. One thread.
class Driver final : public Sink {
 public:
  // Throws std::runtime_error where the engine does not load.
  explicit Driver(const test::SimulatedEngine& engine, const Patches& patches = {});

  executor::ExecutorBackend& backend() { return static_cast<executor::ExecutorBackend&>(*backend_); }
  const ContractValues& contract() const { return *opened_->contract(); }

  // A request with the engine's end tokens for stops, admitted at once; it has to be taken.
  uint64_t ask(std::vector<int32_t> prompt, uint32_t max_tokens);
  uint64_t ask(Request request);
  Request request_of(std::vector<int32_t> prompt, uint32_t max_tokens) const;
  AdmitOutcome try_to_ask(Request request);
  void cancel(uint64_t id);

  StepReport step();
  // Steps until all have ended. False where that takes longer than a minute, or the engine fails.
  bool run();
  // Steps until `holds`; false as above.
  template <class Condition>
  bool run_until(Condition holds) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::minutes(1);
    while (!holds()) {
      if (!step().engine_failure.ok() || std::chrono::steady_clock::now() > deadline) return false;
    }
    return true;
  }

  const Told& told(uint64_t id) const { return told_.at(id); }
  uint64_t prompt_tokens = 0;  // of all steps
  Status failure;              // of the engine
  const std::vector<std::string>& violations() const { return violations_; }

 private:
  void prompt_computed(uint64_t request_id, uint32_t tokens) override;
  void tokens(uint64_t request_id, uint32_t sample, std::span<const int32_t> tokens,
              std::span<const float> log_probs) override;
  void context_done(uint64_t request_id, uint32_t cached, uint32_t computed, std::span<const float> scores) override;
  uint8_t* payload(uint64_t request_id) override;
  void finished(uint64_t request_id, uint32_t sample, int32_t reason, int32_t stop_id,
                std::string_view payload_failure) override;
  void failed(uint64_t request_id, const Status& status) override;

  test::TemporaryDirectory directory_;
  std::unique_ptr<const EngineDirectory> opened_;
  std::unique_ptr<Backend> backend_;
  std::map<uint64_t, std::unique_ptr<Request>> requests_;
  std::map<uint64_t, Told> told_;
  std::vector<std::string> violations_;
};

}  // namespace ifab::standin
