// SPDX-License-Identifier: Apache-2.0
//
// Rotary positions, masked attention and, where asked for, the FP8 of its result, in one pass: q, k and v are read once
// and the result is written once. The scheme is that of Dao, "FlashAttention-2", 2023: a block holds the queries of one
// head, walks over tiles of keys, and keeps for each query the largest score so far, the sum of weights below it and
// the weighted sum of values in registers.
//
// Layout in shared memory: a token's vector is one line of head_size bfloat16, cut into chunks of 16 bytes; chunk c of
// line r lies at place c ^ (r & 7) of its line, so that eight lines' chunks c lie in different banks.
#pragma once

#include <cstdint>

#include "attention.h"
#include "lane.h"

namespace ifab::plugins {

template <class Lane, int32_t kHeadSize, bool kPacked, bool kFp8>
struct Attention {
  static constexpr int32_t kLineBytes = kHeadSize * 2;
  static constexpr int32_t kChunks = kHeadSize / 8;  // of a line
  static constexpr int32_t kStep = 32;               // keys that a warp scores before it weighs them
  static constexpr int32_t kTurns = kHeadSize / 32;  // chunks of the queries' first halves, for each thread
  // Below every score: finite, so that the difference of two is a number even before a key was seen.
  static constexpr float kNothingSeen = -1e30F;

  // Cosines and sines of eight neighbouring pairs of one token.
  struct Angles {
    Chunk cosine[2], sine[2];
  };
  struct Fragment {
    uint32_t word[4];
  };

  Lane lane;
  const AttentionArguments& in;
  // Of the block: its row's first token, its head, its queries, and where its shared memory is cut.
  int64_t row_start = 0;
  int32_t head = 0, first_query = 0, queries = 0, keys = 0;
  uint32_t q_at = 0, k_at = 0, v_at = 0, segments_at = 0;
  int32_t warp_row = 0, inside = 0;  // first line of the warp's queries; the thread's place in its warp

  float sum[kChunks][4];  // weighted values: accumulators of 8 columns each
  float most[2], weight[2];
  int32_t own_segment[2] = {0, 0};

  IFAB_CARD Attention(Lane lane_of_thread, const AttentionArguments& arguments) : lane(lane_of_thread), in(arguments) {}

  // Everything that one thread does for its block.
  IFAB_CARD void run() {
    place();
    load(q_at, head, first_query, queries);
    int32_t count = at_most(in.key_tile, keys);
    load(k_at, in.heads + kv_head(), 0, count);
    lane.commit();
    load(v_at, in.heads + in.kv_heads + kv_head(), 0, count);
    lane.commit();
    keep_segments(0, count);
    turn_queries(first_query == 0 && count == queries);
    if (first_query != 0 || count != queries) turn_keys(0, count);
    begin();
    for (int32_t first_key = 0;;) {
      lane.template wait<0>();
      lane.sync_block();
      for (int32_t key = 0; key < count; key += kStep) step(first_key, key, count);
      first_key += in.key_tile;
      if (first_key >= keys) break;
      count = at_most(in.key_tile, keys - first_key);
      lane.sync_block();
      load(k_at, in.heads + kv_head(), first_key, count);
      lane.commit();
      load(v_at, in.heads + in.kv_heads + kv_head(), first_key, count);
      lane.commit();
      keep_segments(first_key, count);
      lane.template wait<1>();
      lane.sync_block();
      turn_keys(first_key, count);
    }
    if (active()) write();
  }

 private:
  // Blocks are numbered head by head within a tile of queries, so that those which read the same keys run at once; the
  // last tile of a row, which sees most keys, comes first.
  IFAB_CARD void place() {
    const int32_t tiles = (in.row_tokens + in.query_tile - 1) / in.query_tile;
    const int32_t number = lane.block();
    head = number % in.heads;
    const int32_t tile = number / in.heads;
    row_start = static_cast<int64_t>(tile / tiles) * in.row_tokens;
    first_query = (tiles - 1 - tile % tiles) * in.query_tile;
    queries = at_most(in.query_tile, in.row_tokens - first_query);
    keys = first_query + queries;
    k_at = q_at + static_cast<uint32_t>(in.query_tile * kLineBytes);
    v_at = k_at + static_cast<uint32_t>(in.key_tile * kLineBytes);
    segments_at = v_at + static_cast<uint32_t>(in.key_tile * kLineBytes);
    inside = lane.thread() % 32;
    warp_row = lane.thread() / 32 * kWarpRows;
  }

  IFAB_CARD int32_t kv_head() const { return head / (in.heads / in.kv_heads); }
  IFAB_CARD int32_t threads() const { return in.query_tile * 2; }
  IFAB_CARD bool active() const { return warp_row < queries; }

  static IFAB_CARD uint32_t at(uint32_t matrix, int32_t line, int32_t chunk) {
    return matrix + static_cast<uint32_t>(line * kLineBytes + ((chunk ^ (line & 7)) << 4));
  }

  // Asks for `count` tokens of one head, from `first` of the row on.
  IFAB_CARD void load(uint32_t matrix, int32_t which, int32_t first, int32_t count) {
    const int64_t width = static_cast<int64_t>(in.heads + 2 * in.kv_heads) * kHeadSize;
    const uint16_t* from = in.qkv + (row_start + first) * width + static_cast<int64_t>(which) * kHeadSize;
    for (int32_t i = lane.thread(); i < count * kChunks; i += threads()) {
      lane.copy(at(matrix, i / kChunks, i % kChunks), from + i / kChunks * width + i % kChunks * 8);
    }
  }

  IFAB_CARD void keep_segments(int32_t first, int32_t count) {
    if constexpr (kPacked) {
      for (int32_t i = lane.thread(); i < count; i += threads()) {
        lane.store_word(segments_at + static_cast<uint32_t>(i * 4),
                        static_cast<uint32_t>(lane.read(in.segments + row_start + first + i)));
      }
    }
  }

  // A position beyond the tables is held at their ends, so that nothing else is read.
  IFAB_CARD Angles angles(int32_t token, int32_t chunk) const {
    int32_t position = token;
    if constexpr (kPacked) {
      position = lane.read(in.positions + row_start + token);
      position = position < 0 ? 0 : at_most(position, in.row_tokens - 1);
    }
    const int32_t from = position * (kHeadSize / 2) + chunk * 8;
    return {{lane.read_chunk(in.cosine + from), lane.read_chunk(in.cosine + from + 4)},
            {lane.read_chunk(in.sine + from), lane.read_chunk(in.sine + from + 4)}};
  }

  // Turns eight pairs of a line in shared memory: (x, y) becomes (x cos - y sin, y cos + x sin), where y lies half a
  // head behind x.
  IFAB_CARD void turn(uint32_t matrix, int32_t line, int32_t chunk, const Angles& angle) {
    const uint32_t first = at(matrix, line, chunk), second = at(matrix, line, chunk + kChunks / 2);
    Chunk x = lane.load_chunk(first), y = lane.load_chunk(second);
    IFAB_UNROLL
    for (int32_t i = 0; i < 4; ++i) {
      const uint32_t cosines[2] = {angle.cosine[i / 2].word[i % 2 * 2], angle.cosine[i / 2].word[i % 2 * 2 + 1]};
      const uint32_t sines[2] = {angle.sine[i / 2].word[i % 2 * 2], angle.sine[i / 2].word[i % 2 * 2 + 1]};
      const float c0 = __builtin_bit_cast(float, cosines[0]), c1 = __builtin_bit_cast(float, cosines[1]);
      const float s0 = __builtin_bit_cast(float, sines[0]), s1 = __builtin_bit_cast(float, sines[1]);
      const float x0 = low_half(x.word[i]), x1 = high_half(x.word[i]);
      const float y0 = low_half(y.word[i]), y1 = high_half(y.word[i]);
      x.word[i] = lane.bfloat16_pair(x0 * c0 - y0 * s0, x1 * c1 - y1 * s1);
      y.word[i] = lane.bfloat16_pair(y0 * c0 + x0 * s0, y1 * c1 + x1 * s1);
    }
    lane.store_chunk(first, x);
    lane.store_chunk(second, y);
  }

  // Turns the queries and, where the first tile's keys are of the same tokens, those with the same angles. The angles
  // are read while queries and keys are still on their way.
  IFAB_CARD void turn_queries(bool keys_too) {
    Angles of[kTurns];
    IFAB_UNROLL
    for (int32_t j = 0; j < kTurns; ++j) {
      const int32_t i = lane.thread() + threads() * j;
      const int32_t line = i / (kChunks / 2);
      of[j] = angles(first_query + (line < queries ? line : 0), i % (kChunks / 2));
    }
    lane.template wait<1>();
    lane.sync_block();
    IFAB_UNROLL
    for (int32_t j = 0; j < kTurns; ++j) {
      const int32_t i = lane.thread() + threads() * j;
      const int32_t line = i / (kChunks / 2), chunk = i % (kChunks / 2);
      if (line < queries) {
        turn(q_at, line, chunk, of[j]);
        if (keys_too) turn(k_at, line, chunk, of[j]);
      }
    }
  }

  IFAB_CARD void turn_keys(int32_t first, int32_t count) {
    for (int32_t i = lane.thread(); i < count * (kChunks / 2); i += threads()) {
      const int32_t line = i / (kChunks / 2), chunk = i % (kChunks / 2);
      turn(k_at, line, chunk, angles(first + line, chunk));
    }
  }

  IFAB_CARD void begin() {
    IFAB_UNROLL
    for (int32_t c = 0; c < kChunks; ++c) {
      IFAB_UNROLL
      for (int32_t i = 0; i < 4; ++i) sum[c][i] = 0.0F;
    }
    IFAB_UNROLL
    for (int32_t half = 0; half < 2; ++half) {
      most[half] = kNothingSeen;
      weight[half] = 0.0F;
      if constexpr (kPacked) {
        if (active()) own_segment[half] = lane.read(in.segments + row_start + query(half));
      }
    }
  }

  // The two queries whose scores a thread holds, as places in the row.
  IFAB_CARD int32_t query(int32_t half) const { return first_query + warp_row + inside / 4 + half * 8; }

  // Scores, weighs and sums up to kStep keys of a tile, from `key` on. Keys come in sixteens; those behind the warp's
  // last query are left out.
  IFAB_CARD void step(int32_t first_key, int32_t key, int32_t count) {
    const int32_t seen = at_most(count, first_query + warp_row + kWarpRows - first_key) - key;
    if (!active() || seen <= 0) return;
    float score[kStep / 8][4];
    IFAB_UNROLL
    for (int32_t n = 0; n < kStep / 8; ++n) {
      IFAB_UNROLL
      for (int32_t i = 0; i < 4; ++i) score[n][i] = 0.0F;
    }
    IFAB_UNROLL
    for (int32_t k = 0; k < kHeadSize / 16; ++k) {
      Fragment q;
      lane.load_matrices(at(q_at, warp_row + inside % 16, 2 * k + inside / 16), q.word);
      IFAB_UNROLL
      for (int32_t n = 0; n < kStep / 16; ++n) {
        if (n * 16 < seen) {
          Fragment b;
          const int32_t line = key + n * 16 + inside % 8 + inside / 16 * 8;
          lane.load_matrices(at(k_at, line, 2 * k + inside / 8 % 2), b.word);
          lane.multiply(score[2 * n], q.word, b.word[0], b.word[1]);
          lane.multiply(score[2 * n + 1], q.word, b.word[2], b.word[3]);
        }
      }
    }
    mask(score, first_key, key, seen);
    weigh(score);
    IFAB_UNROLL
    for (int32_t n = 0; n < kStep / 16; ++n) {
      if (n * 16 < seen) {
        const float (&low)[4] = score[2 * n];
        const float (&high)[4] = score[2 * n + 1];
        const Fragment p = {{lane.bfloat16_pair(low[0], low[1]), lane.bfloat16_pair(low[2], low[3]),
                             lane.bfloat16_pair(high[0], high[1]), lane.bfloat16_pair(high[2], high[3])}};
        IFAB_UNROLL
        for (int32_t c = 0; c < kChunks / 2; ++c) {
          Fragment b;
          lane.load_matrices_turned(at(v_at, key + n * 16 + inside % 16, 2 * c + inside / 16), b.word);
          lane.multiply(sum[2 * c], p.word, b.word[0], b.word[1]);
          lane.multiply(sum[2 * c + 1], p.word, b.word[2], b.word[3]);
        }
      }
    }
  }

  // Puts a score that its query must not see to minus infinity.
  IFAB_CARD void mask(float (&score)[kStep / 8][4], int32_t first_key, int32_t key, int32_t seen) const {
    constexpr float kHidden = -__builtin_huge_valf();
    IFAB_UNROLL
    for (int32_t n = 0; n < kStep / 8; ++n) {
      const int32_t line = key + n * 8 + inside % 4 * 2;
      const bool there = n / 2 * 16 < seen;
      int32_t segment[2] = {0, 0};
      if constexpr (kPacked) {
        if (there) {
          segment[0] = static_cast<int32_t>(lane.load_word(segments_at + static_cast<uint32_t>(line * 4)));
          segment[1] = static_cast<int32_t>(lane.load_word(segments_at + static_cast<uint32_t>(line * 4 + 4)));
        }
      }
      IFAB_UNROLL
      for (int32_t i = 0; i < 4; ++i) {
        const bool visible = there && first_key + line + i % 2 <= query(i / 2) && segment[i % 2] == own_segment[i / 2];
        score[n][i] = visible ? score[n][i] : kHidden;
      }
    }
  }

  // Scores become weights, relative to the largest score so far; what was summed before is brought to the same base.
  IFAB_CARD void weigh(float (&score)[kStep / 8][4]) {
    IFAB_UNROLL
    for (int32_t half = 0; half < 2; ++half) {
      float largest = most[half];
      IFAB_UNROLL
      for (int32_t n = 0; n < kStep / 8; ++n) {
        largest = larger(largest, larger(score[n][2 * half], score[n][2 * half + 1]));
      }
      largest = larger(largest, lane.exchange(largest, 1));
      largest = larger(largest, lane.exchange(largest, 2));
      const float before = lane.power_of_two((most[half] - largest) * in.score_scale);
      const float base = largest * in.score_scale;
      most[half] = largest;
      weight[half] *= before;
      IFAB_UNROLL
      for (int32_t n = 0; n < kStep / 8; ++n) {
        IFAB_UNROLL
        for (int32_t i = 2 * half; i < 2 * half + 2; ++i) {
          score[n][i] = lane.power_of_two(score[n][i] * in.score_scale - base);
          weight[half] += score[n][i];
        }
      }
      IFAB_UNROLL
      for (int32_t c = 0; c < kChunks; ++c) {
        sum[c][2 * half] *= before;
        sum[c][2 * half + 1] *= before;
      }
    }
  }

  // The weighted means, laid out in the place of the warp's own queries and written in whole chunks.
  IFAB_CARD void write() {
    lane.sync_warp();
    IFAB_UNROLL
    for (int32_t half = 0; half < 2; ++half) {
      float total = weight[half] + lane.exchange(weight[half], 1);
      total += lane.exchange(total, 2);
      const float factor = in.output_factor / total;
      const int32_t line = warp_row + inside / 4 + half * 8;
      IFAB_UNROLL
      for (int32_t c = 0; c < kChunks; ++c) {
        const float first = sum[c][2 * half] * factor, second = sum[c][2 * half + 1] * factor;
        if constexpr (kFp8) {
          lane.store_half_word(at(q_at, line, c / 2) + static_cast<uint32_t>(c % 2 * 8 + inside % 4 * 2),
                               lane.fp8_pair(first, second));
        } else {
          lane.store_word(at(q_at, line, c) + static_cast<uint32_t>(inside % 4 * 4), lane.bfloat16_pair(first, second));
        }
      }
    }
    lane.sync_warp();
    constexpr int32_t kValueBytes = kFp8 ? 1 : 2;
    constexpr int32_t kOut = kHeadSize * kValueBytes / 16;
    const int64_t width = static_cast<int64_t>(in.heads) * kHeadSize * kValueBytes;
    uint8_t* to = in.output + (row_start + first_query + warp_row) * width + head * (kHeadSize * kValueBytes);
    IFAB_UNROLL
    for (int32_t i = 0; i < kWarpRows * kOut / 32; ++i) {
      const int32_t line = (i * 32 + inside) / kOut, chunk = (i * 32 + inside) % kOut;
      lane.write_chunk(to + line * width + chunk * 16, lane.load_chunk(at(q_at, warp_row + line, chunk)));
    }
  }
};

}  // namespace ifab::plugins
