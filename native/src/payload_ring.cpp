// SPDX-License-Identifier: Apache-2.0
#include "payload_ring.h"

#include <new>

namespace ifab {
namespace {
constexpr size_t kAlignment = 64;
}  // namespace

void PayloadRing::Free::operator()(uint8_t* memory) const {
  ::operator delete(memory, std::align_val_t{kAlignment});
}

PayloadRing::PayloadRing(uint32_t slots, uint32_t payload_bytes)
    : slots_(payload_bytes == 0 ? 0 : slots),
      payload_bytes_(payload_bytes),
      stride_((size_t{payload_bytes} + kAlignment - 1) / kAlignment * kAlignment) {
  if (slots_ == 0) return;
  memory_.reset(static_cast<uint8_t*>(::operator new(slots_ * stride_, std::align_val_t{kAlignment})));
  free_.reserve(slots_);
  released_.reserve(slots_);
  for (uint32_t slot = slots_; slot > 0; --slot) free_.push_back(slot - 1);
}

uint32_t PayloadRing::available() {
  const std::lock_guard lock(released_mutex_);
  free_.insert(free_.end(), released_.begin(), released_.end());
  released_.clear();
  return static_cast<uint32_t>(free_.size());
}

uint32_t PayloadRing::take() {
  const uint32_t slot = free_.back();
  free_.pop_back();
  used_.fetch_add(1, std::memory_order_relaxed);
  return slot;
}

void PayloadRing::give_back(uint32_t slot) {
  free_.push_back(slot);
  used_.fetch_sub(1, std::memory_order_relaxed);
}

void PayloadRing::release(uint32_t slot) {
  const std::lock_guard lock(released_mutex_);
  released_.push_back(slot);
  used_.fetch_sub(1, std::memory_order_relaxed);
}

}  // namespace ifab
