// SPDX-License-Identifier: Apache-2.0
//
// Norm and gated unit of one row, with the roundings that the recorded operations state: a sum and a normed value are
// rounded to bfloat16, everything else is float32 until it leaves. Both are bound by memory: every thread asks for all
// its chunks before it looks at the first, and neighbours read and write neighbouring chunks.
#pragma once

#include <cstdint>

#include "lane.h"
#include "rows.h"

namespace ifab::plugins {

// Writes eight neighbouring values, `at` values from the beginning of `output`.
template <bool kFp8, class Lane>
IFAB_CARD void write_eight(const Lane& lane, uint8_t* output, int64_t at, const float (&value)[8]) {
  if constexpr (kFp8) {
    uint32_t word[2];
    IFAB_UNROLL
    for (int32_t i = 0; i < 2; ++i) {
      word[i] = lane.fp8_pair(value[4 * i], value[4 * i + 1]) |
                static_cast<uint32_t>(lane.fp8_pair(value[4 * i + 2], value[4 * i + 3])) << 16;
    }
    lane.write_half_chunk(output + at, word[0], word[1]);
  } else {
    Chunk chunk;
    IFAB_UNROLL
    for (int32_t i = 0; i < 4; ++i) chunk.word[i] = lane.bfloat16_pair(value[2 * i], value[2 * i + 1]);
    lane.write_chunk(output + at * 2, chunk);
  }
}

template <class Lane, bool kAdded, bool kFp8>
struct NormRow {
  Lane lane;
  const NormArguments& in;

  // Everything that one thread does for its block.
  IFAB_CARD void run() {
    const int32_t threads = in.threads, chunks = in.width / 8;
    const int64_t row = static_cast<int64_t>(lane.block()) * in.width;
    Chunk x[kRowChunks], weight[kRowChunks];
    if constexpr (kAdded) {
      Chunk addend[kRowChunks];
      IFAB_UNROLL
      for (int32_t j = 0; j < kRowChunks; ++j) {
        const int32_t chunk = lane.thread() + j * threads;
        x[j] = addend[j] = Chunk{};
        if (chunk < chunks) {
          x[j] = lane.read_chunk_once(in.x + row + chunk * 8);
          addend[j] = lane.read_chunk_once(in.addend + row + chunk * 8);
        }
      }
      IFAB_UNROLL
      for (int32_t j = 0; j < kRowChunks; ++j) {
        const int32_t chunk = lane.thread() + j * threads;
        IFAB_UNROLL
        for (int32_t i = 0; i < 4; ++i) {
          x[j].word[i] = lane.bfloat16_pair(low_half(x[j].word[i]) + low_half(addend[j].word[i]),
                                            high_half(x[j].word[i]) + high_half(addend[j].word[i]));
        }
        if (chunk < chunks) lane.write_chunk(reinterpret_cast<uint8_t*>(in.sum + row + chunk * 8), x[j]);
      }
    } else {
      IFAB_UNROLL
      for (int32_t j = 0; j < kRowChunks; ++j) {
        const int32_t chunk = lane.thread() + j * threads;
        x[j] = chunk < chunks ? lane.read_chunk_once(in.x + row + chunk * 8) : Chunk{};
      }
    }
    IFAB_UNROLL
    for (int32_t j = 0; j < kRowChunks; ++j) {
      const int32_t chunk = lane.thread() + j * threads;
      weight[j] = chunk < chunks ? lane.read_chunk(in.weight + chunk * 8) : Chunk{};
    }
    const float factor = lane.reciprocal_root(sum_of_squares(x, threads) / static_cast<float>(in.width) + in.epsilon);
    IFAB_UNROLL
    for (int32_t j = 0; j < kRowChunks; ++j) {
      const int32_t chunk = lane.thread() + j * threads;
      float value[8];
      IFAB_UNROLL
      for (int32_t i = 0; i < 4; ++i) {
        const uint32_t normed = lane.bfloat16_pair(low_half(x[j].word[i]) * factor, high_half(x[j].word[i]) * factor);
        value[2 * i] = low_half(normed) * low_half(weight[j].word[i]) * in.output_factor;
        value[2 * i + 1] = high_half(normed) * high_half(weight[j].word[i]) * in.output_factor;
      }
      if (chunk < chunks) write_eight<kFp8>(lane, in.output, row + chunk * 8, value);
    }
  }

 private:
  // Of the block's row, the same to the bit in every thread.
  IFAB_CARD float sum_of_squares(const Chunk (&x)[kRowChunks], int32_t threads) const {
    float total = 0.0F;
    IFAB_UNROLL
    for (int32_t j = 0; j < kRowChunks; ++j) {
      IFAB_UNROLL
      for (int32_t i = 0; i < 4; ++i) {
        const float low = low_half(x[j].word[i]), high = high_half(x[j].word[i]);
        total += low * low + high * high;
      }
    }
    IFAB_UNROLL
    for (int32_t bits = 16; bits > 0; bits /= 2) total += lane.exchange(total, bits);
    if (threads == 32) return total;
    if (lane.thread() % 32 == 0) {
      lane.store_word(static_cast<uint32_t>(lane.thread() / 32 * 4), __builtin_bit_cast(uint32_t, total));
    }
    lane.sync_block();
    total = 0.0F;
    for (int32_t warp = 0; warp < threads / 32; ++warp) {
      total += __builtin_bit_cast(float, lane.load_word(static_cast<uint32_t>(warp * 4)));
    }
    return total;
  }
};

template <class Lane, bool kFp8>
struct GatedUnitRow {
  Lane lane;
  const GatedUnitArguments& in;

  // Everything that one thread does for its block.
  IFAB_CARD void run() {
    const int32_t threads = in.threads, chunks = in.width / 8;
    const int64_t row = static_cast<int64_t>(lane.block()) * in.width;
    Chunk gate[kRowChunks], up[kRowChunks];
    IFAB_UNROLL
    for (int32_t j = 0; j < kRowChunks; ++j) {
      const int32_t chunk = lane.thread() + j * threads;
      gate[j] = up[j] = Chunk{};
      if (chunk < chunks) {
        gate[j] = lane.read_chunk_once(in.x + 2 * row + chunk * 8);
        up[j] = lane.read_chunk_once(in.x + 2 * row + in.width + chunk * 8);
      }
    }
    IFAB_UNROLL
    for (int32_t j = 0; j < kRowChunks; ++j) {
      const int32_t chunk = lane.thread() + j * threads;
      float value[8];
      IFAB_UNROLL
      for (int32_t i = 0; i < 4; ++i) {
        value[2 * i] = gated(low_half(gate[j].word[i]), low_half(up[j].word[i]));
        value[2 * i + 1] = gated(high_half(gate[j].word[i]), high_half(up[j].word[i]));
      }
      if (chunk < chunks) write_eight<kFp8>(lane, in.output, row + chunk * 8, value);
    }
  }

 private:
  // gate / (1 + exp(-gate)) * up, over the output's scale.
  IFAB_CARD float gated(float gate, float up) const {
    constexpr float kLog2OfE = 1.44269504F;
    return gate * lane.reciprocal(1.0F + lane.power_of_two(-gate * kLog2OfE)) * up * in.output_factor;
  }
};

}  // namespace ifab::plugins
