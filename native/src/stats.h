// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <mutex>

#include "doorbell.h"
#include "ifab/engine.h"

namespace ifab {

// The bucket of ifab_stats_t.step_us for a duration, and of step_fill for `used` of `budget` tokens.
uint32_t duration_bucket(uint64_t microseconds);
uint32_t fill_bucket(uint64_t used, uint64_t budget);

// What the owner thread knows, in one piece.
struct Snapshot {
  ifab_stats_t stats{};
  uint64_t requests_inside = 0;  // the batcher
  bool idle = false;             // with nothing to do since idle_since
  Clock::time_point idle_since{};
};

// The newest snapshot. The owner thread writes one after every step, readers copy it: the lock is held for a copy of
// some hundred bytes, which is all that a reader can cost a step.
class StatsBoard {
 public:
  void publish(const Snapshot& snapshot) {
    const std::lock_guard lock(mutex_);
    snapshot_ = snapshot;
  }
  Snapshot read() const {
    const std::lock_guard lock(mutex_);
    return snapshot_;
  }

 private:
  mutable std::mutex mutex_;
  Snapshot snapshot_;
};

}  // namespace ifab
