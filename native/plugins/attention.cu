// SPDX-License-Identifier: Apache-2.0
//
// The kernels by name: ifab_attention_<head size>_<packed | own>_<bf16 | fp8>. Two blocks of 256 threads share one
// multiprocessor, so that one computes while the other's memory is on its way: that leaves a thread 128 registers.
#include "card_lane.h"

namespace ifab::attention {
namespace {

template <int32_t kHeadSize, bool kPacked, bool kFp8>
__device__ __forceinline__ void attend(const Arguments& arguments) {
  extern __shared__ uint4 shared[];
  const CardLane lane{static_cast<uint32_t>(__cvta_generic_to_shared(shared))};
  Attention<CardLane, kHeadSize, kPacked, kFp8>(lane, arguments).run();
}

}  // namespace
}  // namespace ifab::attention

#define IFAB_KERNEL(head_size, layout, packed, format, fp8)                                                    \
  extern "C" __global__ void __launch_bounds__(256, 2)                                                         \
      ifab_attention_##head_size##_##layout##_##format(const __grid_constant__ ifab::attention::Arguments a) { \
    ifab::attention::attend<head_size, packed, fp8>(a);                                                        \
  }

IFAB_KERNEL(64, packed, true, bf16, false)
IFAB_KERNEL(64, packed, true, fp8, true)
IFAB_KERNEL(64, own, false, bf16, false)
IFAB_KERNEL(64, own, false, fp8, true)
IFAB_KERNEL(128, packed, true, bf16, false)
IFAB_KERNEL(128, packed, true, fp8, true)
IFAB_KERNEL(128, own, false, bf16, false)
IFAB_KERNEL(128, own, false, fp8, true)
