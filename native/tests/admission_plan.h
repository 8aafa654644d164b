// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "config.h"
#include "request.h"

namespace ifab::test {

// A small generator of its own, so that a seed means the same schedule everywhere.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t next();
  // From low to high, both included.
  uint32_t between(uint32_t low, uint32_t high) {
    return low + static_cast<uint32_t>(next() % (uint64_t{high} - low + 1));
  }
  bool one_in(uint32_t n) { return next() % n == 0; }

 private:
  uint64_t state_;
};

// One random schedule, before anything runs: an engine with its faults, requests that share heads, and how fast they
// come, how often one is cancelled, how fast the reader reads.
struct Plan {
  simulated::Config config;
  std::vector<Request> requests;  // in order of arrival; none that can never fit
  uint32_t arrivals_most = 1;     // that come before one step
  uint32_t cancel_one_in = 0;     // steps; 0: nobody is cancelled
  uint32_t payload_slots = 0;     // 0: the engine has no payload
  uint32_t never_fitted = 0;      // requests that were left out, since never_fits() refuses them
  bool counted_stalls = false;    // some stalls last for a number of steps, whatever the mode

  // What marks a request in its prompt, for faults that hit it.
  static constexpr int32_t kStalls = 60;         // when its prompt is computed, until a progress-only step
  static constexpr int32_t kNoRoomForLong = 61;  // more often than Admission asks an empty batcher
  static constexpr int32_t kNoRoomTwice = 62;
  static constexpr int32_t kNoRoomUntilProgressOnly = 63;

  static Plan of(uint64_t seed);
};

}  // namespace ifab::test
