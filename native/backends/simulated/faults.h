// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "backend.h"
#include "config.h"

namespace ifab::simulated {

// The faults of a simulated engine: which of them are in force now, and which hit a request.
class Faults {
 public:
  explicit Faults(const Config& config) : config_(config) {}

  // The faults that hit a request, a bit for each of Config::request_faults.
  using Mask = uint64_t;
  Mask hits(const Request& request) const;
  // The first fault of that kind among them; null where there is none.
  const RequestFault* find(Mask hits, FaultKind kind) const;

  // A step begins. True where it is to do nothing. May throw or end the process, as configured.
  bool stalls(StepMode mode);
  // A request that is hit by these faults is about to be computed. Throws and ends processes as stalls() does.
  void computing(Mask hits);
  // Time that the step takes beyond its own, in ms; asking takes it away.
  uint32_t take_extra_ms();

  // Whether this admission finds no room.
  bool refuses_room(uint64_t request_id, Mask hits);

 private:
  // `from` is the first step that it may affect.
  void begin(FaultKind kind, uint32_t count, uint64_t from);

  const Config& config_;
  uint64_t step_ = 0;
  uint64_t stalled_until_ = 0;  // the first step that does something again
  bool stalled_until_progress_only_ = false;
  uint32_t extra_ms_ = 0;
  // The request that found no room last, how often, and whether a progress-only step came since it first did.
  uint64_t refused_id_ = 0;
  uint32_t refusals_ = 0;
  bool progress_only_since_ = false;
};

}  // namespace ifab::simulated
