// SPDX-License-Identifier: Apache-2.0
//
// The kernels by name: ifab_attention_<head size>_<packed | own>_<bf16 | fp8>, ifab_norm_<added | plain>_<bf16 | fp8>,
// ifab_gated_unit_<bf16 | fp8>. Two blocks of attention, 256 threads each, share one multiprocessor, so that one computes
// while the other's memory is on its way: that leaves a thread 128 registers.
#include "attention_kernel.h"
#include "card_lane.h"
#include "rows_kernel.h"

namespace ifab::plugins {
namespace {

__device__ __forceinline__ CardLane lane() {
  extern __shared__ uint4 shared[];
  return {static_cast<uint32_t>(__cvta_generic_to_shared(shared))};
}

}  // namespace
}  // namespace ifab::plugins

#define IFAB_ATTENTION(head_size, layout, packed, format, fp8)                                                   \
  extern "C" __global__ void __launch_bounds__(256, 2) ifab_attention_##head_size##_##layout##_##format(         \
      const __grid_constant__ ifab::plugins::AttentionArguments a) {                                             \
    ifab::plugins::Attention<ifab::plugins::CardLane, head_size, packed, fp8>(ifab::plugins::lane(), a).run();   \
  }
#define IFAB_NORM(layout, added, format, fp8)                                                                    \
  extern "C" __global__ void __launch_bounds__(1024)                                                             \
      ifab_norm_##layout##_##format(const __grid_constant__ ifab::plugins::NormArguments a) {                    \
    ifab::plugins::NormRow<ifab::plugins::CardLane, added, fp8>{ifab::plugins::lane(), a}.run();                 \
  }
#define IFAB_GATED_UNIT(format, fp8)                                                                             \
  extern "C" __global__ void __launch_bounds__(1024)                                                             \
      ifab_gated_unit_##format(const __grid_constant__ ifab::plugins::GatedUnitArguments a) {                    \
    ifab::plugins::GatedUnitRow<ifab::plugins::CardLane, fp8>{ifab::plugins::lane(), a}.run();                   \
  }

IFAB_ATTENTION(64, packed, true, bf16, false)
IFAB_ATTENTION(64, packed, true, fp8, true)
IFAB_ATTENTION(64, own, false, bf16, false)
IFAB_ATTENTION(64, own, false, fp8, true)
IFAB_ATTENTION(128, packed, true, bf16, false)
IFAB_ATTENTION(128, packed, true, fp8, true)
IFAB_ATTENTION(128, own, false, bf16, false)
IFAB_ATTENTION(128, own, false, fp8, true)

IFAB_NORM(plain, false, bf16, false)
IFAB_NORM(plain, false, fp8, true)
IFAB_NORM(added, true, bf16, false)
IFAB_NORM(added, true, fp8, true)

IFAB_GATED_UNIT(bf16, false)
IFAB_GATED_UNIT(fp8, true)
