// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "backend.h"
#include "contract.h"
#include "guides.h"
#include "live_blocks.h"
#include "live_request.h"
#include "pulse.h"
#include "runtime.h"
#include "settings.h"

namespace ifab::executor {

// Generation and payloads on TensorRT-LLM's Executor.
//
// The Executor batches by itself, on a thread of its own; admitting a request is handing it over, and a step is
// listening: it waits for answers, passes them on, and looks at what the iterations did meanwhile. Several iterations
// may lie behind one step, so a sample may get several tokens in it; what does not fit the step's limits waits here.
class ExecutorBackend final : public Backend {
 public:
  // `runtime` is up; the contract outlives the backend. Facts are complete once prove() has returned ok.
  ExecutorBackend(const ContractValues& contract, Settings settings, std::unique_ptr<Runtime> runtime);
  ~ExecutorBackend() override;

  // Runs a prompt of two tokens to its end, takes the size of the pool from what the runtime then says of it, and looks
  // at the payload. IFAB_INTERNAL: the prompt fails, or its payload is missing. IFAB_FAILED_PRECONDITION: the runtime
  // made no pool, or one of other blocks than the contract's. IFAB_DEADLINE_EXCEEDED: nothing came back.
  Status prove();

  const EngineFacts& facts() const override { return facts_; }
  Room room() const override;
  Need need(const Request& request) const override;
  AdmitResult admit(const Request& request) override;
  StepReport step(StepMode mode, Sink& sink) override;
  void cancel(uint64_t request_id) override;
  uint64_t kv_blocks_used() const override { return pulse_.used_blocks(); }
  Status compile_guide(int32_t kind, std::string_view text, std::shared_ptr<const CompiledGuide>& out) const override;

  // What the iterations behind the last step did: tells a leader's wait from a stall.
  Activity activity() const { return activity_; }

 private:
  using VendorId = tensorrt_llm::executor::IdType;

  std::chrono::milliseconds patience() const;
  // Takes in what has come back, after at most `patience`. Throws what the runtime throws.
  void listen(std::chrono::milliseconds patience);
  void receive(const tensorrt_llm::executor::Response& response);
  void tell(StepReport& report, Sink& sink);
  void look(StepReport& report);
  // Whether a prompt of our own comes back, within the longest step. Throws what the runtime throws.
  bool still_computes();
  Request proving_request() const;
  void leave(LiveRequest& live);

  const ContractValues& contract_;
  const Settings settings_;
  AnswerForm form_;
  mutable GuideCheck guides_;  // has a lock of its own
  std::unique_ptr<Runtime> runtime_;
  EngineFacts facts_;
  LiveBlocks blocks_;
  Pulse pulse_;
  Activity activity_ = Activity::kQuiet;
  bool warned_ = false;  // that the runtime stands still

  std::unordered_map<uint64_t, std::unique_ptr<LiveRequest>> lives_;  // by request id
  std::unordered_map<VendorId, LiveRequest*> by_vendor_id_;           // null: cancelled here, not yet over there
  std::vector<LiveRequest*> ready_;                                   // have something to tell
  uint32_t slots_left_;
  bool forward_failed_ = false;    // in this step
  uint32_t forward_failures_ = 0;  // steps in a row in which a forward pass failed and nothing came back
};

}  // namespace ifab::executor
