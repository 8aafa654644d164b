// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "ifab/engine.h"
#include "simulated_directory.h"

namespace ifab::test {

inline constexpr std::chrono::seconds kDeadline{60};

// One request in words; request() is its form at the C interface and points into it.
struct Ask {
  uint64_t id = 0;
  std::vector<int32_t> prompt{};
  uint32_t max_tokens = 8;
  uint32_t samples = 1;
  uint32_t flags = 0;
  int32_t priority = 0;
  uint64_t salt = 0;
  uint64_t seed = 0;
  std::vector<int32_t> stop_ids{};
  std::vector<uint32_t> head_ends{};

  ifab_request_t request() const;
};

// A prompt of so many ids below 256, another for each salt.
std::vector<int32_t> prompt_of(size_t size, uint64_t salt);

// What became of a request.
struct Outcome {
  struct Sample {
    std::vector<int32_t> tokens;
    std::vector<float> logprobs;
    uint32_t ends = 0;
    int32_t reason = 0;
    int32_t stop_id = 0;
    uint32_t generated = 0;
  };
  std::vector<Sample> samples;
  uint32_t contexts_done = 0;
  uint32_t failures = 0;
  ifab_status_t status = IFAB_OK;
  std::string text;
  uint32_t prompt_tokens = 0;
  uint32_t cached_tokens = 0;
  uint32_t computed_tokens = 0;
  std::vector<float> prompt_logprobs;
  std::vector<uint8_t> payload;
  uint32_t payloads = 0;
  uint32_t payloads_missing = 0;

  bool ended() const;
};

// What submit said of one request.
struct Verdict {
  ifab_status_t status = IFAB_OK;
  std::string text;
};

// An engine and what has come of its requests. Every event is checked against the order that the header promises; what
// breaks it is in violations(). One thread.
class Client {
 public:
  // Writes the directory of a simulated engine and loads it; throws std::runtime_error where that fails.
  explicit Client(const SimulatedEngine& simulated);
  ~Client();
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  ifab_engine_t* engine() { return engine_; }
  void destroy() { ifab_engine_destroy(&engine_); }
  std::vector<Verdict> submit(const std::vector<Ask>& asks);
  Verdict submit(const Ask& ask) { return submit(std::vector<Ask>{ask}).front(); }
  uint32_t cancel(std::vector<uint64_t> ids);
  ifab_stats_t stats();
  std::string describe();

  // One poll; returns the number of events.
  uint32_t poll(int32_t timeout_ms);
  // Polls until every accepted request has ended. False where that takes longer than kDeadline.
  bool drain();
  // Reads stats until `holds` says so; false where that takes longer than kDeadline.
  template <class Condition>
  bool wait_for(Condition holds) {
    const auto deadline = std::chrono::steady_clock::now() + kDeadline;
    while (!holds(stats())) {
      if (std::chrono::steady_clock::now() > deadline) return false;
      pause();
    }
    return true;
  }

  const Outcome& outcome(uint64_t id) const { return outcomes_.at(id); }
  const std::vector<std::string>& violations() const { return violations_; }
  // Ids in the order in which their contexts were done.
  const std::vector<uint64_t>& context_order() const { return context_order_; }

 private:
  static void pause();
  void take(const ifab_event_t& event);
  void broken(const ifab_event_t& event, const char* what);

  TemporaryDirectory directory_;
  ifab_engine_t* engine_ = nullptr;
  std::map<uint64_t, Outcome> outcomes_;
  uint64_t left_ = 0;
  std::vector<std::string> violations_;
  std::vector<uint64_t> context_order_;
  std::vector<ifab_event_t> events_;
  std::vector<int32_t> tokens_;
  std::vector<float> logprobs_;
  std::vector<uint8_t> payload_;
  std::vector<char> text_;
  size_t payload_start_ = 0;
};

}  // namespace ifab::test
