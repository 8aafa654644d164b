// SPDX-License-Identifier: Apache-2.0
#include "faults.h"

#include <algorithm>
#include <bit>
#include <csignal>
#include <stdexcept>

#include "formula.h"

namespace ifab::simulated {

Faults::Mask Faults::hits(const Request& request) const {
  Mask mask = 0;
  for (size_t i = 0; i < config_.request_faults.size(); ++i) {
    const RequestFault& fault = config_.request_faults[i];
    bool hit = false;
    if (fault.trigger == RequestFault::Trigger::kOneIn) {
      uint64_t chain = chain_start(config_.seed);
      for (const int32_t id : request.prompt) chain = chain_next(chain, id);
      hit = hit_by(chain, fault.value);
    } else {
      const auto id = static_cast<int32_t>(fault.value);
      hit = std::find(request.prompt.begin(), request.prompt.end(), id) != request.prompt.end();
    }
    if (hit) mask |= Mask{1} << i;
  }
  return mask;
}

const RequestFault* Faults::find(Mask hits, FaultKind kind) const {
  for (; hits != 0; hits &= hits - 1) {
    const RequestFault& fault = config_.request_faults[static_cast<size_t>(std::countr_zero(hits))];
    if (fault.kind == kind) return &fault;
  }
  return nullptr;
}

bool Faults::stalls(StepMode mode) {
  ++step_;
  for (const StepFault& fault : config_.step_faults) {
    if (fault.step == step_) begin(fault.kind, fault.count, step_);
  }
  if (mode == StepMode::kProgressOnly) {
    stalled_until_progress_only_ = false;
    progress_only_since_ = true;
  }
  return stalled_until_progress_only_ || step_ < stalled_until_;
}

void Faults::computing(Mask hits) {
  for (const FaultKind kind : {FaultKind::kStall, FaultKind::kThrow, FaultKind::kSlowStep, FaultKind::kKillProcess}) {
    if (const RequestFault* fault = find(hits, kind)) begin(kind, fault->count, step_ + 1);
  }
}

void Faults::begin(FaultKind kind, uint32_t count, uint64_t from) {
  switch (kind) {
    case FaultKind::kThrow:
      throw std::runtime_error("simulated exception in a step");
    case FaultKind::kKillProcess:
      std::raise(SIGKILL);
      break;
    case FaultKind::kSlowStep:
      extra_ms_ += count;
      break;
    case FaultKind::kStall:
      stalled_until_ = std::max(stalled_until_, from + count);
      stalled_until_progress_only_ = stalled_until_progress_only_ || count == 0;
      break;
    default:
      break;
  }
}

uint32_t Faults::take_extra_ms() {
  const uint32_t extra = extra_ms_;
  extra_ms_ = 0;
  return extra;
}

bool Faults::refuses_room(uint64_t request_id, Mask hits) {
  const RequestFault* fault = find(hits, FaultKind::kNoRoom);
  if (fault == nullptr) return false;
  if (request_id != refused_id_ || refusals_ == 0) {
    refused_id_ = request_id;
    refusals_ = 0;
    progress_only_since_ = false;
  }
  const bool refuses = fault->count == 0 ? !progress_only_since_ : refusals_ < fault->count;
  ++refusals_;
  return refuses;
}

}  // namespace ifab::simulated
