// SPDX-License-Identifier: Apache-2.0
//
// One thread of the card, by the instructions of the PTX ISA (sm_80 and later). Addresses of shared memory are bytes
// from the beginning of the block's dynamic shared memory.
#pragma once

#include <cstdint>

#include "fp8.h"
#include "lane.h"

namespace ifab::plugins {

struct CardLane {
  uint32_t base;  // of dynamic shared memory, in its own address space

  __device__ __forceinline__ int32_t thread() const { return static_cast<int32_t>(threadIdx.x); }
  __device__ __forceinline__ int32_t block() const { return static_cast<int32_t>(blockIdx.x); }
  __device__ __forceinline__ void sync_block() const { __syncthreads(); }
  __device__ __forceinline__ void sync_warp() const { __syncwarp(); }

  // Global memory.
  __device__ __forceinline__ int32_t read(const int32_t* from) const { return __ldg(from); }
  __device__ __forceinline__ Chunk read_chunk(const void* from) const {
    return __builtin_bit_cast(Chunk, __ldg(static_cast<const uint4*>(from)));
  }
  // The same of what nobody reads again.
  __device__ __forceinline__ Chunk read_chunk_once(const void* from) const {
    Chunk c;
    asm("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(c.word[0]), "=r"(c.word[1]), "=r"(c.word[2]), "=r"(c.word[3])
        : "l"(from));
    return c;
  }
  __device__ __forceinline__ void write_chunk(uint8_t* to, const Chunk& chunk) const {
    *reinterpret_cast<uint4*>(to) = __builtin_bit_cast(uint4, chunk);
  }
  __device__ __forceinline__ void write_half_chunk(uint8_t* to, uint32_t low, uint32_t high) const {
    *reinterpret_cast<uint2*>(to) = uint2{low, high};
  }

  // Shared memory.
  __device__ __forceinline__ Chunk load_chunk(uint32_t from) const {
    Chunk c;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(c.word[0]), "=r"(c.word[1]), "=r"(c.word[2]), "=r"(c.word[3])
                 : "r"(base + from)
                 : "memory");
    return c;
  }
  __device__ __forceinline__ void store_chunk(uint32_t to, const Chunk& c) const {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(base + to), "r"(c.word[0]), "r"(c.word[1]),
                 "r"(c.word[2]), "r"(c.word[3])
                 : "memory");
  }
  __device__ __forceinline__ uint32_t load_word(uint32_t from) const {
    uint32_t word;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(base + from) : "memory");
    return word;
  }
  __device__ __forceinline__ void store_word(uint32_t to, uint32_t word) const {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(base + to), "r"(word) : "memory");
  }
  __device__ __forceinline__ void store_half_word(uint32_t to, uint16_t word) const {
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(base + to), "h"(word) : "memory");
  }

  // 16 bytes from global to shared memory, without waiting; a group ends at commit(), and wait<N>() waits until all but
  // the last N groups of this thread have come.
  __device__ __forceinline__ void copy(uint32_t to, const uint16_t* from) const {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(base + to), "l"(from) : "memory");
  }
  __device__ __forceinline__ void commit() const { asm volatile("cp.async.commit_group;" ::: "memory"); }
  template <int32_t kGroups>
  __device__ __forceinline__ void wait() const {
    asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
  }

  // Four matrices of 8 by 8 values of 16 bits; lane 8 * m + r names line r of matrix m.
  __device__ __forceinline__ void load_matrices(uint32_t line, uint32_t (&out)[4]) const {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(base + line)
                 : "memory");
  }
  __device__ __forceinline__ void load_matrices_turned(uint32_t line, uint32_t (&out)[4]) const {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(base + line)
                 : "memory");
  }
  __device__ __forceinline__ void multiply(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) const {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
  // The value of the lane whose number differs by `bits`.
  __device__ __forceinline__ float exchange(float value, int32_t bits) const {
    return __shfl_xor_sync(0xffffffffU, value, bits);
  }

  __device__ __forceinline__ float power_of_two(float value) const {
    float out;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(value));
    return out;
  }
  __device__ __forceinline__ float reciprocal(float value) const {
    float out;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(value));
    return out;
  }
  __device__ __forceinline__ float reciprocal_root(float value) const { return __frsqrt_rn(value); }
  __device__ __forceinline__ uint32_t bfloat16_pair(float low, float high) const {
    uint32_t out;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
    return out;
  }
  // Two e4m3, rounded to nearest, ties to even, held at the largest finite value.
  __device__ __forceinline__ uint16_t fp8_pair(float low, float high) const {
#if __CUDA_ARCH__ >= 890
    uint16_t out;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(out) : "f"(high), "f"(low));
    return out;
#else
    return static_cast<uint16_t>(fp8_by_hand(low) | fp8_by_hand(high) << 8);
#endif
  }
};

}  // namespace ifab::plugins
