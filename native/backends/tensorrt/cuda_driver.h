// SPDX-License-Identifier: Apache-2.0
//
// The few calls of the CUDA driver that this backend makes, found at run time: a library that is built with this
// backend still loads, and serves other engines, on a machine without a card.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "status.h"

namespace ifab::tensorrt {

using CudaPointer = uint64_t;
struct CudaStreamTag;
struct CudaEventTag;
using CudaStream = CudaStreamTag*;
using CudaEvent = CudaEventTag*;

// What a card says of itself.
struct Card {
  std::string name;
  int32_t major = 0, minor = 0;  // compute capability
  uint64_t memory_bytes = 0;
};

// The driver with one card's primary context, current on the thread that opened it. Every method returns the driver's
// error in words; a card that is lost is IFAB_UNAVAILABLE, memory that is not there IFAB_RESOURCE_EXHAUSTED.
class CudaDriver {
 public:
  CudaDriver() = default;
  CudaDriver(const CudaDriver&) = delete;
  CudaDriver& operator=(const CudaDriver&) = delete;
  ~CudaDriver();

  // Starts the driver and looks for the card of that number, counted from 0 as the driver does; takes nothing of it.
  // IFAB_UNAVAILABLE: no driver, no card, not so many cards, or a driver that does not start.
  Status find(int32_t number);
  // Finds that card and makes it current. IFAB_UNAVAILABLE as find(), and where it cannot be opened.
  Status open(int32_t number);
  const Card& card() const { return card_; }

  Status allocate(uint64_t bytes, CudaPointer& out);
  void release(CudaPointer pointer);
  Status allocate_pinned(uint64_t bytes, void*& out);
  void release_pinned(void* pointer);
  Status make_stream(CudaStream& out);
  void end_stream(CudaStream stream);
  Status make_event(CudaEvent& out);
  void end_event(CudaEvent event);

  Status copy_in(CudaPointer to, const void* from, uint64_t bytes, CudaStream stream);
  Status copy_out(void* to, CudaPointer from, uint64_t bytes, CudaStream stream);
  Status record(CudaEvent event, CudaStream stream);
  Status wait_on_stream(CudaStream stream, CudaEvent event);
  // Blocks without spinning.
  Status wait(CudaEvent event);

 private:
  struct Calls;
  Status check(int code, const char* what) const;

  Calls* calls_ = nullptr;
  void* library_ = nullptr;
  int device_ = 0;
  bool retained_ = false;
  Card card_;
};

}  // namespace ifab::tensorrt
