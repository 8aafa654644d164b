// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "backend.h"
#include "engine_file.h"
#include "simulated.h"
#include "tensorrt_llm/executor/executor.h"

namespace ifab::standin {

namespace trt = tensorrt_llm::executor;

// A request as it lies in the queue.
struct Queued {
  trt::IdType id = 0;
  std::vector<trt::IdType> children;  // ids of the samples behind the first, which nobody is told
  trt::Request request;
  size_t sequences() const { return 1 + children.size(); }
};

// The active requests of the stand-in, on a simulated engine: scheduling, passes, answers. One thread.
class Batch final : private Sink {
 public:
  Batch(const EngineFile& engine, const trt::ExecutorConfig& config);

  size_t active() const { return active_.size(); }
  // Whether it is more than that of an active request.
  bool is_urgent(trt::PriorityType priority) const;
  // Throws std::runtime_error where the runtime would not take it.
  void validate(const trt::Request& request) const;
  // A validated request becomes active.
  void take(const Queued& queued);
  // Ends those of `ids` that are active, and takes them out of `ids`.
  void cancel(std::set<trt::IdType>& ids, std::vector<trt::Response>& responses);
  // One iteration. Throws std::runtime_error where a pass fails and the loop is not to go on.
  trt::IterationStats pass(std::vector<trt::Response>& responses);

 private:
  // One sequence.
  struct Active {
    trt::IdType id = 0;
    trt::IdType parent = 0;
    trt::SizeType32 index = 0;
    const trt::Request* vendor = nullptr;
    ifab::Request simulated;
    bool inside = false;  // of the simulated engine
    uint32_t cached = 0;
    trt::VecTokens fresh;  // tokens for the next answer
    trt::VecLogProbs log_probs;
    bool answered = false;
    bool finished = false;
    trt::FinishReason reason = trt::FinishReason::kNOT_FINISHED;
    size_t guided = 0;  // bytes of the guide that were told
  };
  // What the sequences of a request share.
  struct Shared {
    trt::Request request;
    std::vector<bool> over;
  };

  void schedule();
  bool fits(const Active& active) const;
  void run(trt::IterationStats& stats);
  void fail(const std::string& why, std::vector<trt::Response>& responses);
  void answer(std::vector<trt::Response>& responses);
  trt::Result result_of(Active& active);
  bool is_configured(const std::string& output) const;
  void add_outputs(const Active& active, trt::Result& result);
  void remove(std::list<Active>::iterator at);
  Active* find(uint64_t id);
  // Throws std::runtime_error.
  void check_outputs() const;

  void prompt_computed(uint64_t, uint32_t) override {}
  void tokens(uint64_t id, uint32_t sample, std::span<const int32_t> tokens, std::span<const float> log_probs) override;
  void context_done(uint64_t id, uint32_t cached, uint32_t computed, std::span<const float>) override;
  uint8_t* payload(uint64_t) override { return nullptr; }
  void finished(uint64_t id, uint32_t sample, int32_t reason, int32_t stop_id, std::string_view) override;
  void failed(uint64_t id, const Status& status) override;

  const EngineFile engine_;
  const trt::ExecutorConfig config_;
  bool reuse_;
  std::unique_ptr<simulated::SimulatedBackend> card_;
  std::list<Active> active_;
  std::map<trt::IdType, Shared> shared_;                     // by parent
  std::vector<std::pair<trt::IdType, std::string>> broken_;  // by the simulated engine, in this pass
  uint64_t iteration_ = 0;
};

}  // namespace ifab::standin
