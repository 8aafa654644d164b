// SPDX-License-Identifier: Apache-2.0
//
// What the attention kernel is given, and the extents that it takes. Read by the kernel, by whoever launches it and by
// the plugin; the first two compile it with nvcc and with g++.
#pragma once

#include <cstdint>

namespace ifab::plugins {

inline constexpr int32_t kWarpRows = 16;   // queries of one warp, the rows of one matrix instruction
inline constexpr int32_t kTileRows = 128;  // most queries, and most keys, of one tile
inline constexpr int32_t kLongestRow = 8192;

// What a plan says of one attention, once and for all launches.
struct AttentionShape {
  int32_t heads = 0;
  int32_t kv_heads = 0;
  int32_t head_size = 0;
  int32_t row_tokens = 0;
  int32_t packed = 0;         // 1: prompts share rows, positions and segments are inputs
  float output_scale = 0.0F;  // 0: bfloat16; more: FP8 e4m3 of the value over this
};

// One launch's arguments as the kernel sees them. Addresses are the card's.
struct AttentionArguments {
  const uint16_t* qkv = nullptr;       // bfloat16 [rows * row_tokens, (heads + 2 * kv_heads) * head_size]
  const int32_t* positions = nullptr;  // [rows, row_tokens]; unused where rows are not packed
  const int32_t* segments = nullptr;   // likewise
  const float* cosine = nullptr;       // [row_tokens, head_size / 2]
  const float* sine = nullptr;
  uint8_t* output = nullptr;  // [rows * row_tokens, heads * head_size], bfloat16 or FP8
  int32_t heads = 0;
  int32_t kv_heads = 0;
  int32_t row_tokens = 0;
  int32_t query_tile = 0;      // queries of a block: 16 for each of its warps
  int32_t key_tile = 0;        // keys in shared memory at once
  float score_scale = 0.0F;    // head_size ** -0.5 * log2(e): weights are powers of two
  float output_factor = 0.0F;  // 1 over the output's scale; 1 in bfloat16
};

// Bytes of shared memory of one block: its queries, a tile of keys, one of values, the keys' segments.
constexpr int32_t shared_bytes(int32_t head_size, int32_t query_tile, int32_t key_tile) {
  return (query_tile + 2 * key_tile) * head_size * 2 + key_tile * 4;
}

}  // namespace ifab::plugins
