// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "backend.h"
#include "batch.h"
#include "contract.h"
#include "launcher.h"

namespace ifab::tensorrt {

// An engine without a cache: every prompt is one forward pass, and its last token's states come back.
//
// A step launches the next batch, then collects the one before, so that a launch is under way whenever there is work.
class MiningBackend final : public Backend {
 public:
  MiningBackend(const ContractValues& contract, BindingPlan plan, std::unique_ptr<Launcher> launcher);

  const EngineFacts& facts() const override { return facts_; }
  Room room() const override;
  Need need(const Request& request) const override;
  AdmitResult admit(const Request& request) override;
  StepReport step(StepMode mode, Sink& sink) override;
  void cancel(uint64_t request_id) override;
  uint64_t kv_blocks_used() const override { return 0; }

  // Runs one prompt of two tokens and looks at what comes back.
  Status prove();

 private:
  struct Launch {
    Batch batch;
    bool under_way = false;
  };

  void compose(Batch& batch);
  void collect(Launch& launch, uint32_t buffer, Sink& sink, StepReport& report);
  // Tells the end of every item that is not dropped; with a status that is not ok they carry no payload.
  void finish(Launch& launch, uint32_t buffer, const Status& status, Sink& sink);

  EngineFacts facts_;
  BindingPlan plan_;
  std::unique_ptr<Launcher> launcher_;
  std::vector<const Request*> pending_;  // admitted, not launched, longest first
  std::array<Launch, Launcher::kBuffers> launches_;
  uint32_t next_ = 0;  // buffer of the next launch
  uint32_t pending_tokens_ = 0;
  uint32_t live_ = 0;
  uint64_t state_bytes_;  // of one layer's state
};

}  // namespace ifab::tensorrt
