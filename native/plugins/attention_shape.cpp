// SPDX-License-Identifier: Apache-2.0
#include "attention_shape.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "scale.h"

namespace ifab::plugins {
namespace {

constexpr int32_t kMostHeads = 1024;

std::string sentence(const char* field, const std::string& value, const std::string& expected) {
  return std::string("ifab_packed_attention: ") + field + " is " + value + ", and must be " + expected;
}

}  // namespace

std::string refuse(const AttentionShape& shape) {
  if (shape.heads < 1 || shape.heads > kMostHeads) {
    return sentence("heads", std::to_string(shape.heads), "1 to " + std::to_string(kMostHeads));
  }
  if (shape.kv_heads < 1 || shape.heads % shape.kv_heads != 0) {
    return sentence("kv_heads", std::to_string(shape.kv_heads), "a divisor of heads, " + std::to_string(shape.heads));
  }
  if (shape.head_size != 64 && shape.head_size != 128) {
    return sentence("head_size", std::to_string(shape.head_size), "64 or 128");
  }
  if (shape.row_tokens < kWarpRows || shape.row_tokens > kLongestRow || shape.row_tokens % kWarpRows != 0) {
    return sentence("row_tokens", std::to_string(shape.row_tokens), "a multiple of 16, at most 8192");
  }
  if (shape.packed != 0 && shape.packed != 1) return sentence("packed", std::to_string(shape.packed), "0 or 1");
  return refuse_scale("ifab_packed_attention", shape.output_scale);
}

std::string refuse_tokens(const AttentionShape& shape, int64_t tokens) {
  const int64_t tiles = (shape.row_tokens + kTileRows - 1) / kTileRows;
  const int64_t most = std::numeric_limits<int32_t>::max() / (tiles * shape.heads) * shape.row_tokens;
  if (tokens >= 1 && tokens % shape.row_tokens == 0 && tokens <= most) return {};
  return sentence(
      "qkv's number of tokens", std::to_string(tokens),
      "a multiple of row_tokens, " + std::to_string(shape.row_tokens) + ", at most " + std::to_string(most));
}

std::string kernel_name(const AttentionShape& shape) {
  return "ifab_attention_" + std::to_string(shape.head_size) + (shape.packed != 0 ? "_packed" : "_own") +
         (shape.output_scale > 0.0F ? "_fp8" : "_bf16");
}

Geometry geometry(const AttentionShape& shape, int64_t rows, int32_t multiprocessor_bytes, int32_t reserved) {
  Geometry out;
  out.query_tile = std::min(kTileRows, shape.row_tokens);
  out.key_tile = out.query_tile;
  const auto fits = [&] {
    return 2 * (shared_bytes(shape.head_size, out.query_tile, out.key_tile) + reserved) <= multiprocessor_bytes;
  };
  for (const int32_t smaller : {64, 32}) {
    if (!fits()) out.key_tile = std::min(out.key_tile, smaller);
  }
  const int32_t tiles = (shape.row_tokens + out.query_tile - 1) / out.query_tile;
  out.blocks = rows * tiles * shape.heads;
  out.threads = out.query_tile / kWarpRows * 32;
  out.shared_bytes = shared_bytes(shape.head_size, out.query_tile, out.key_tile);
  return out;
}

AttentionArguments arguments_of(const AttentionShape& shape, const Geometry& geometry) {
  constexpr double kLog2OfE = 1.4426950408889634;
  AttentionArguments out;
  out.heads = shape.heads;
  out.kv_heads = shape.kv_heads;
  out.row_tokens = shape.row_tokens;
  out.query_tile = geometry.query_tile;
  out.key_tile = geometry.key_tile;
  out.score_scale = static_cast<float>(kLog2OfE / std::sqrt(static_cast<double>(shape.head_size)));
  out.output_factor = factor_of(shape.output_scale);
  return out;
}

}  // namespace ifab::plugins
