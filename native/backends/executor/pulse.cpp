// SPDX-License-Identifier: Apache-2.0
#include "pulse.h"

#include <algorithm>

namespace ifab::executor {
namespace {

constexpr double kNewest = 0.25;  // weight of the newest iteration in the smoothed time

uint32_t count(int32_t value) {
  return static_cast<uint32_t>(std::max(value, 0));
}

}  // namespace

Pulse::Beat Pulse::take(const std::deque<tensorrt_llm::executor::IterationStats>& iterations) {
  Beat beat;
  for (const auto& iteration : iterations) {
    if (iteration.kvCacheStats) {
      pool_blocks_ = count(iteration.kvCacheStats->maxNumBlocks);
      used_blocks_ = count(iteration.kvCacheStats->usedNumBlocks);
      block_tokens_ = count(iteration.kvCacheStats->tokensPerBlock);
    }
    if (!iteration.inflightBatchingStats) continue;
    const auto& batch = *iteration.inflightBatchingStats;
    const uint32_t waiting = count(iteration.numActiveRequests) + count(iteration.numQueuedRequests);
    beat.prompt_tokens += count(batch.numCtxTokens);
    if (batch.numScheduledRequests > 0) {
      iteration_time_ +=
          kNewest * (std::chrono::duration<double, std::milli>(iteration.iterLatencyMS) - iteration_time_);
      // Some of a request's last iteration are gone from the active ones by the time they are counted, so only an
      // excess says that somebody waits.
      const bool excess = waiting > count(batch.numScheduledRequests);
      if (beat.activity != Activity::kHoldingBack) beat.activity = excess ? Activity::kHoldingBack : Activity::kMoving;
    } else if (waiting > 0 && beat.activity == Activity::kQuiet) {
      // The idle iteration that ends a busy time has nobody waiting, and says nothing.
      beat.activity = Activity::kStandingStill;
    }
  }
  return beat;
}

}  // namespace ifab::executor
