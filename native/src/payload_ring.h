// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

namespace ifab {

// The memory of all payloads: a fixed number of slots, allocated once at load and used again and again.
//
// A request that wants its payload gets a slot when it is admitted and keeps it until its payload has been polled, so
// that a backend never waits for room and a reader that is slow holds back admissions of its own engine and nothing
// else. take(), give_back() and available() belong to the owner thread, release() to the polling one.
class PayloadRing {
 public:
  static constexpr uint32_t kNone = UINT32_MAX;

  // payload_bytes 0: an engine without payload, which needs no slots.
  PayloadRing(uint32_t slots, uint32_t payload_bytes);

  uint32_t payload_bytes() const { return payload_bytes_; }
  uint32_t slots() const { return slots_; }
  // Slots taken and not yet back. Any thread.
  uint32_t used() const { return used_.load(std::memory_order_relaxed); }

  // Slots that could be taken now; collects what the reader has released.
  uint32_t available();
  // One slot; there must be one available.
  uint32_t take();
  // A slot whose payload will not be published.
  void give_back(uint32_t slot);

  // The bytes of a slot, 64-byte aligned.
  uint8_t* data(uint32_t slot) { return memory_.get() + size_t{slot} * stride_; }

  // The payload has been copied out.
  void release(uint32_t slot);

 private:
  struct Free {
    void operator()(uint8_t* memory) const;
  };

  uint32_t slots_;
  uint32_t payload_bytes_;
  size_t stride_;
  std::unique_ptr<uint8_t, Free> memory_;
  std::vector<uint32_t> free_;
  std::atomic<uint32_t> used_{0};
  std::mutex released_mutex_;
  std::vector<uint32_t> released_;
};

}  // namespace ifab
