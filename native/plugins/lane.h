// SPDX-License-Identifier: Apache-2.0
//
// What kernels share. They are written against `Lane`, one thread's view of its machine: `card_lane.h` is the card, by
// its instructions, and `tests/warp/host_lane.h` a model of it on the processor, on which their logic is tested.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define IFAB_CARD __device__ __forceinline__
#define IFAB_UNROLL _Pragma("unroll")
#else
#define IFAB_CARD inline
#define IFAB_UNROLL
#endif

namespace ifab::plugins {

// 16 bytes, what one thread moves at once.
struct alignas(16) Chunk {
  uint32_t word[4];
};

IFAB_CARD float low_half(uint32_t pair) {
  return __builtin_bit_cast(float, pair << 16);
}
IFAB_CARD float high_half(uint32_t pair) {
  return __builtin_bit_cast(float, pair & 0xffff0000U);
}
IFAB_CARD int32_t at_most(int32_t value, int32_t limit) {
  return value < limit ? value : limit;
}
IFAB_CARD float larger(float a, float b) {
  return a > b ? a : b;
}

}  // namespace ifab::plugins
