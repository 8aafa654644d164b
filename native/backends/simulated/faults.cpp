// SPDX-License-Identifier: Apache-2.0
#include "faults.h"

#include <algorithm>
#include <csignal>
#include <stdexcept>

#include "formula.h"

namespace ifab::simulated {

Faults::Mask Faults::hits(const Request& request) const {
  Mask mask = 0;
  for (const RequestFault& fault : config_.request_faults) {
    bool hit = false;
    if (fault.trigger == RequestFault::Trigger::kOneIn) {
      uint64_t chain = chain_start(config_.seed);
      for (const int32_t id : request.prompt) chain = chain_next(chain, id);
      hit = hit_by(chain, fault.value);
    } else {
      const auto id = static_cast<int32_t>(fault.value);
      hit = std::find(request.prompt.begin(), request.prompt.end(), id) != request.prompt.end();
    }
    if (hit) mask |= bit(fault.kind);
  }
  return mask;
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
    if ((hits & bit(kind)) != 0) begin(kind, count_of(kind), step_ + 1);
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

uint32_t Faults::count_of(FaultKind kind) const {
  const auto fault = std::find_if(config_.request_faults.begin(), config_.request_faults.end(),
                                  [&](const RequestFault& it) { return it.kind == kind; });
  return fault->count;
}

uint32_t Faults::take_extra_ms() {
  const uint32_t extra = extra_ms_;
  extra_ms_ = 0;
  return extra;
}

bool Faults::refuses_room(uint64_t request_id, Mask hits) {
  if ((hits & bit(FaultKind::kNoRoom)) == 0) return false;
  if (request_id != refused_id_ || refusals_ == 0) {
    refused_id_ = request_id;
    refusals_ = 0;
    progress_only_since_ = false;
  }
  const uint32_t count = count_of(FaultKind::kNoRoom);
  const bool refuses = count == 0 ? !progress_only_since_ : refusals_ < count;
  ++refusals_;
  return refuses;
}

}  // namespace ifab::simulated
