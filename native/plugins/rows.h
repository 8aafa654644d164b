// SPDX-License-Identifier: Apache-2.0
//
// What the kernels of single rows are given, norm and gated unit: one block a token, each value of which is read once
// and written once. Read by the kernels, by whoever launches them and by the plugins.
#pragma once

#include <cstdint>

namespace ifab::plugins {

inline constexpr int32_t kRowChunks = 4;  // chunks of 16 bytes that a thread holds of its row, all on their way at once
inline constexpr int32_t kRowThreads = 1024;
inline constexpr int32_t kWidestRow = kRowThreads * kRowChunks * 8;

// Threads of a block whose row has so many values, a multiple of 8.
constexpr int32_t row_threads(int32_t width) {
  return ((width / 8 + kRowChunks - 1) / kRowChunks + 31) / 32 * 32;
}

// Root-mean-square norm and its weight: what a plan says of one.
struct Norm {
  float epsilon = 0.0F;
  int32_t added = 0;          // 1: of the sum of two inputs, which is a second result
  float output_scale = 0.0F;  // 0: bfloat16; more: FP8 e4m3 of the value over this
};

// SiLU of a row's first half, times its second half: what a plan says of one.
struct GatedUnit {
  float output_scale = 0.0F;
};

// One launch's arguments as the kernels see them. Addresses are the card's; values are bfloat16 but for outputs in FP8.
struct NormArguments {
  const uint16_t* x = nullptr;       // [tokens, width]
  const uint16_t* addend = nullptr;  // likewise; unused where nothing is added
  const uint16_t* weight = nullptr;  // [width]
  uint16_t* sum = nullptr;           // [tokens, width], x + addend rounded to bfloat16; unused where nothing is added
  uint8_t* output = nullptr;         // [tokens, width]
  int32_t width = 0;
  int32_t threads = 0;  // row_threads(width)
  float epsilon = 0.0F;
  float output_factor = 0.0F;  // 1 over the output's scale; 1 in bfloat16
};

struct GatedUnitArguments {
  const uint16_t* x = nullptr;  // [tokens, 2 * width]
  uint8_t* output = nullptr;    // [tokens, width]
  int32_t width = 0;
  int32_t threads = 0;  // row_threads(width)
  float output_factor = 0.0F;
};

// Bytes of shared memory of a norm's block: a partial sum of each warp.
inline constexpr int32_t kNormSharedBytes = kRowThreads / 32 * 4;

}  // namespace ifab::plugins
