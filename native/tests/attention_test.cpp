// SPDX-License-Identifier: Apache-2.0
//
// The attention kernel's own source on a model of the warp's instructions, against attention written out in double.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "attention_kernel.h"
#include "attention_shape.h"
#include "fp8.h"
#include "warp/host_lane.h"

namespace ifab::plugins {
namespace {

using warp::from_bfloat16;
using warp::to_bfloat16;

constexpr int32_t kH200Bytes = 233472, kReserved = 1024;

struct Case {
  AttentionShape shape;
  int32_t rows = 1;
  int32_t multiprocessor_bytes = kH200Bytes;
  bool backwards = false;
  float size = 1.0F;  // of values
};

struct Inputs {
  std::vector<uint16_t> qkv;
  std::vector<int32_t> positions, segments;
  std::vector<float> cosine, sine;
};

// Rows with two or three prompts and padding behind them; tables with angles of no regularity.
Inputs make(const Case& c, uint32_t seed) {
  const AttentionShape& s = c.shape;
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  Inputs in;
  const auto tokens = static_cast<size_t>(c.rows) * static_cast<size_t>(s.row_tokens);
  in.qkv.resize(tokens * static_cast<size_t>((s.heads + 2 * s.kv_heads) * s.head_size));
  for (uint16_t& value : in.qkv) value = to_bfloat16(normal(random) * c.size);
  const size_t angles = static_cast<size_t>(s.row_tokens * s.head_size / 2);
  for (size_t i = 0; i < angles; ++i) {
    const float angle = normal(random) * 3.0F;
    in.cosine.push_back(std::cos(angle));
    in.sine.push_back(std::sin(angle));
  }
  for (int32_t row = 0; row < c.rows; ++row) {
    const int32_t first = s.row_tokens / 3 + row, second = s.row_tokens - s.row_tokens / 5;
    for (int32_t t = 0; t < s.row_tokens; ++t) {
      const int32_t segment = t < first ? 0 : t < second ? 1 : -1;
      in.segments.push_back(segment);
      in.positions.push_back(segment == 0 ? t : segment == 1 ? t - first : 0);
    }
  }
  return in;
}

template <int32_t kHeadSize, bool kPacked, bool kFp8>
void run(const Case& c, const Geometry& cut, const AttentionArguments& arguments) {
  for (int32_t block = 0; block < cut.blocks; ++block) {
    warp::run_block(block, cut.threads, static_cast<uint32_t>(cut.shared_bytes), c.backwards, [&](warp::HostLane lane) {
      Attention<warp::HostLane, kHeadSize, kPacked, kFp8>(lane, arguments).run();
    });
  }
}

std::vector<uint8_t> computed(const Case& c, const Inputs& in) {
  const AttentionShape& s = c.shape;
  const bool fp8 = s.output_scale > 0.0F;
  const Geometry cut = geometry(s, c.rows, c.multiprocessor_bytes, kReserved);
  AttentionArguments a = arguments_of(s, cut);
  std::vector<uint8_t> out(static_cast<size_t>(c.rows * s.row_tokens * s.heads * s.head_size) * (fp8 ? 1 : 2), 0xee);
  a.qkv = in.qkv.data();
  a.cosine = in.cosine.data();
  a.sine = in.sine.data();
  a.output = out.data();
  if (s.packed != 0) {
    a.positions = in.positions.data();
    a.segments = in.segments.data();
  }
  const auto kernel = s.head_size == 64 ? (s.packed != 0 ? (fp8 ? run<64, true, true> : run<64, true, false>)
                                                         : (fp8 ? run<64, false, true> : run<64, false, false>))
                                        : (s.packed != 0 ? (fp8 ? run<128, true, true> : run<128, true, false>)
                                                         : (fp8 ? run<128, false, true> : run<128, false, false>));
  kernel(c, cut, a);
  return out;
}

std::vector<double> expected(const Case& c, const Inputs& in) {
  const AttentionShape& s = c.shape;
  const int32_t half = s.head_size / 2;
  const auto value = [&](int32_t row, int32_t t, int32_t head, int32_t i) -> double {
    const size_t token = static_cast<size_t>(row * s.row_tokens + t);
    const auto width = static_cast<size_t>((s.heads + 2 * s.kv_heads) * s.head_size);
    return from_bfloat16(in.qkv[token * width + static_cast<size_t>(head * s.head_size + i)]);
  };
  const auto rotated = [&](int32_t row, int32_t t, int32_t head) {
    const int32_t position = s.packed != 0 ? in.positions[static_cast<size_t>(row * s.row_tokens + t)] : t;
    std::vector<double> out(static_cast<size_t>(s.head_size));
    for (int32_t i = 0; i < half; ++i) {
      const double cosine = in.cosine[static_cast<size_t>(position * half + i)];
      const double sine = in.sine[static_cast<size_t>(position * half + i)];
      const double x = value(row, t, head, i), y = value(row, t, head, i + half);
      out[static_cast<size_t>(i)] = from_bfloat16(to_bfloat16(static_cast<float>(x * cosine - y * sine)));
      out[static_cast<size_t>(i + half)] = from_bfloat16(to_bfloat16(static_cast<float>(y * cosine + x * sine)));
    }
    return out;
  };
  std::vector<double> out;
  out.resize(static_cast<size_t>(c.rows * s.row_tokens * s.heads * s.head_size));
  for (int32_t row = 0; row < c.rows; ++row) {
    for (int32_t head = 0; head < s.heads; ++head) {
      const int32_t kv = head / (s.heads / s.kv_heads);
      std::vector<std::vector<double>> k;
      for (int32_t u = 0; u < s.row_tokens; ++u) k.push_back(rotated(row, u, s.heads + kv));
      for (int32_t t = 0; t < s.row_tokens; ++t) {
        const std::vector<double> q = rotated(row, t, head);
        std::vector<double> weight(static_cast<size_t>(t + 1), 0.0);
        double largest = -std::numeric_limits<double>::infinity(), total = 0.0;
        const auto same = [&](int32_t u) {
          const auto at = [&](int32_t x) { return in.segments[static_cast<size_t>(row * s.row_tokens + x)]; };
          return s.packed == 0 || at(u) == at(t);
        };
        for (int32_t u = 0; u <= t; ++u) {
          double score = 0.0;
          for (size_t i = 0; i < q.size(); ++i) score += q[i] * k[static_cast<size_t>(u)][i];
          weight[static_cast<size_t>(u)] = score / std::sqrt(static_cast<double>(s.head_size));
          if (same(u)) largest = std::max(largest, weight[static_cast<size_t>(u)]);
        }
        for (int32_t u = 0; u <= t; ++u) {
          double& w = weight[static_cast<size_t>(u)];
          w = same(u) ? std::exp(w - largest) : 0.0;
          total += w;
        }
        for (int32_t i = 0; i < s.head_size; ++i) {
          double mean = 0.0;
          for (int32_t u = 0; u <= t; ++u) {
            if (weight[static_cast<size_t>(u)] > 0.0) {
              mean += weight[static_cast<size_t>(u)] * value(row, u, s.heads + s.kv_heads + kv, i);
            }
          }
          out[static_cast<size_t>(((row * s.row_tokens + t) * s.heads + head) * s.head_size + i)] = mean / total;
        }
      }
    }
  }
  return out;
}

class AttentionKernel : public testing::TestWithParam<Case> {};

TEST_P(AttentionKernel, IsAttentionWrittenOutInDouble) {
  const Case& c = GetParam();
  ASSERT_EQ(refuse(c.shape), "");
  const Inputs in = make(c, 7);
  const std::vector<uint8_t> out = computed(c, in);
  const std::vector<double> wanted = expected(c, in);
  const double scale = c.shape.output_scale;
  size_t wrong = 0;
  for (size_t i = 0; i < wanted.size(); ++i) {
    // Weights and results are rounded to eight bits; FP8 has four, and steps of 2^-9 near zero.
    double got = 0.0, want = wanted[i], allowed = std::fabs(want) * 0.008 + 0.008 * c.size;
    if (scale > 0.0) {
      got = warp::from_fp8(out[i]) * scale;
      want = std::clamp(want, -448.0 * scale, 448.0 * scale);
      allowed += std::fabs(want) * 0.0625 + scale / 1024.0;
    } else {
      got = from_bfloat16(static_cast<uint16_t>(out[2 * i] | out[2 * i + 1] << 8));
    }
    if (!(std::fabs(got - want) <= allowed) && ++wrong <= 5) {
      ADD_FAILURE() << "value " << i << " is " << got << " and should be " << want;
    }
  }
  EXPECT_EQ(wrong, 0U);
}

// The shapes name heads, kv_heads, head_size, row_tokens, packed, output_scale. 100 KB are the smaller cards' memory:
// tiles of 32 keys; 164 KB those of sm_80.
INSTANTIATE_TEST_SUITE_P(Shapes, AttentionKernel,
                         testing::Values(Case{{1, 1, 128, 128, 1, 0.0F}},
                                         Case{{1, 1, 128, 128, 0, 0.0F}, 1, kH200Bytes, true},
                                         Case{{4, 1, 64, 64, 1, 0.0F}, 2}, Case{{8, 1, 64, 16, 0, 0.0F}, 3},
                                         Case{{2, 2, 128, 48, 1, 0.01F}, 2, kH200Bytes, true},
                                         Case{{1, 1, 64, 128, 0, 0.002F}}, Case{{1, 1, 64, 512, 1, 0.0F}},
                                         Case{{1, 1, 128, 272, 0, 0.0F}, 1, 102400, true},
                                         Case{{2, 1, 128, 144, 1, 0.0F}, 1, 167936},
                                         Case{{1, 1, 64, 32, 1, 0.0F}, 2, kH200Bytes, false, 30.0F}),
                         [](const auto& given) {
                           const AttentionShape& s = given.param.shape;
                           return kernel_name(s).substr(5) + "_" + std::to_string(s.heads) + "_" +
                                  std::to_string(s.kv_heads) + "_heads_" + std::to_string(s.row_tokens) + "_tokens";
                         });

TEST(AttentionFp8, ByHandIsTheNearest) {
  std::vector<float> values = {0.0F,
                               -0.0F,
                               448.0F,
                               449.0F,
                               464.0F,
                               1e30F,
                               -1e30F,
                               std::numeric_limits<float>::infinity(),
                               std::numeric_limits<float>::quiet_NaN(),
                               1e-30F};
  for (int bits = 0; bits < 0x7e; ++bits) {
    const float here = warp::from_fp8(static_cast<uint8_t>(bits)),
                next = warp::from_fp8(static_cast<uint8_t>(bits + 1));
    const float middle = (here + next) / 2.0F;
    for (const float value : {here, middle, std::nextafter(middle, here), std::nextafter(middle, next)}) {
      values.push_back(value);
      values.push_back(-value);
    }
  }
  for (const float value : values) EXPECT_EQ(fp8_by_hand(value), warp::to_fp8(value)) << value;
}

TEST(AttentionShape, IsRefusedByField) {
  const AttentionShape good{8, 2, 128, 128, 1, 0.0F};
  ASSERT_EQ(refuse(good), "");
  const auto refused = [&](auto change) {
    AttentionShape shape = good;
    change(shape);
    return refuse(shape);
  };
  EXPECT_EQ(refused([](AttentionShape& s) { s.head_size = 96; }),
            "ifab_packed_attention: head_size is 96, and must be 64 or 128");
  EXPECT_EQ(refused([](AttentionShape& s) { s.kv_heads = 3; }),
            "ifab_packed_attention: kv_heads is 3, and must be a divisor of heads, 8");
  for (const int32_t tokens : {0, 8, 100, 8208}) {
    EXPECT_NE(refused([=](AttentionShape& s) { s.row_tokens = tokens; }).find("row_tokens is"), std::string::npos)
        << tokens;
  }
  EXPECT_NE(refused([](AttentionShape& s) { s.heads = 0; }).find("heads is 0"), std::string::npos);
  EXPECT_NE(refused([](AttentionShape& s) { s.kv_heads = 0; }).find("kv_heads is 0"), std::string::npos);
  EXPECT_NE(refused([](AttentionShape& s) { s.packed = 2; }).find("packed is 2"), std::string::npos);
  for (const float scale : {-1.0F, 1e-40F, std::numeric_limits<float>::infinity(), std::nanf("")}) {
    EXPECT_NE(refused([=](AttentionShape& s) { s.output_scale = scale; }).find("output_scale is"), std::string::npos)
        << scale;
  }
  EXPECT_EQ(refuse_tokens(good, 1280), "");
  EXPECT_NE(refuse_tokens(good, 100).find("100"), std::string::npos);
  EXPECT_NE(refuse_tokens(good, int64_t{1} << 40).find("at most"), std::string::npos);
}

TEST(AttentionShape, TwoBlocksFitIntoAMultiprocessor) {
  for (const int32_t bytes : {102400, 167936, kH200Bytes}) {
    for (const int32_t head_size : {64, 128}) {
      for (const int32_t tokens : {16, 128, 144, 8192}) {
        const Geometry cut = geometry({32, 8, head_size, tokens, 1, 0.0F}, 3, bytes, kReserved);
        EXPECT_LE(2 * (cut.shared_bytes + kReserved), bytes);
        EXPECT_EQ(cut.blocks, 3 * 32 * ((tokens + 127) / 128));
      }
    }
  }
  EXPECT_EQ(geometry({32, 32, 128, 128, 1, 0.0F}, 64, kH200Bytes, kReserved).key_tile, 128);
}

}  // namespace
}  // namespace ifab::plugins
