// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <utility>

namespace ifab {

using Clock = std::chrono::steady_clock;

// Wakes one thread that waits for any of several things. A ring is never lost: the next wait returns at once.
class Doorbell {
 public:
  void ring() {
    {
      const std::lock_guard lock(mutex_);
      rung_ = true;
    }
    rings_.notify_one();
  }

  // Waits until rung, or until the deadline. Returns whether it was rung.
  bool wait_until(Clock::time_point deadline) {
    std::unique_lock lock(mutex_);
    rings_.wait_until(lock, deadline, [this] { return rung_; });
    return std::exchange(rung_, false);
  }

 private:
  std::mutex mutex_;
  std::condition_variable rings_;
  bool rung_ = false;
};

}  // namespace ifab
