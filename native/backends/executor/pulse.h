// SPDX-License-Identifier: Apache-2.0
//
// Whether the runtime moves, told from the statistics of its iterations.
//
// Responses alone do not say: while a long prompt is computed, and while followers wait for the block that a leader
// computes, nothing comes back for a long time and all is well. What counts is whether iterations schedule anything.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>

#include "tensorrt_llm/executor/executor.h"

namespace ifab::executor {

enum class Activity {
  kQuiet,          // no iteration since the last look
  kMoving,         // iterations that scheduled everybody inside
  kHoldingBack,    // iterations that scheduled some and let others wait: for a leader's block, or for room
  kStandingStill,  // iterations that scheduled nobody although somebody waits: a stall
};

class Pulse {
 public:
  struct Beat {
    Activity activity = Activity::kQuiet;
    uint32_t prompt_tokens = 0;  // computed in these iterations
    bool moved() const { return activity == Activity::kMoving || activity == Activity::kHoldingBack; }
  };

  // Takes in what the runtime kept since the last call, oldest first.
  Beat take(const std::deque<tensorrt_llm::executor::IterationStats>& iterations);

  // How long an iteration takes, smoothed; 0 before the first.
  std::chrono::duration<double, std::milli> iteration_time() const { return iteration_time_; }
  // Of the KV pool, in blocks, as of the last iteration; 0 without a cache.
  uint64_t pool_blocks() const { return pool_blocks_; }
  uint64_t used_blocks() const { return used_blocks_; }
  uint32_t block_tokens() const { return block_tokens_; }

 private:
  std::chrono::duration<double, std::milli> iteration_time_{0};
  uint64_t pool_blocks_ = 0;
  uint64_t used_blocks_ = 0;
  uint32_t block_tokens_ = 0;
};

}  // namespace ifab::executor
