// SPDX-License-Identifier: Apache-2.0
//
// The kernels of norm and gated unit, their own source on a model of the warp's instructions, against both written out
// in double with the roundings that the recorded operations state.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "rows_kernel.h"
#include "rows_shape.h"
#include "warp/host_lane.h"

namespace ifab::plugins {
namespace {

using warp::from_bfloat16;
using warp::to_bfloat16;

struct Case {
  int32_t width = 0;
  int32_t tokens = 1;
  float scale = 0.0F;  // of the result
  bool added = false;
  float epsilon = 1e-5F;
  float size = 1.0F;  // of values
  bool backwards = false;
};

double rounded(double value) {
  return from_bfloat16(to_bfloat16(static_cast<float>(value)));
}

std::vector<uint16_t> values(size_t count, float size, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<uint16_t> out(count);
  for (uint16_t& value : out) value = to_bfloat16(normal(random) * size);
  return out;
}

size_t count_of(const Case& c) {
  return static_cast<size_t>(c.tokens) * static_cast<size_t>(c.width);
}

std::vector<uint8_t> room(const Case& c) {
  return std::vector<uint8_t>(count_of(c) * (c.scale > 0.0F ? 1 : 2), 0xee);
}

// Holds results to the exact ones, rounded. What differs in a last bit of float32 falls to the other side of a rounding
// now and then: few values may be a neighbour of the right one, and none further away than `furthest`.
void expect_same(const Case& c, const std::vector<uint8_t>& out, const std::vector<double>& exact, int furthest) {
  size_t neighbours = 0, wrong = 0;
  for (size_t i = 0; i < exact.size(); ++i) {
    int got = 0, want = 0;
    if (std::fabs(exact[i]) < 1e-36 && c.scale == 0.0F) {
      // An exponential beyond float32 gives nothing, where the exact value is next to nothing.
      EXPECT_LT(std::fabs(from_bfloat16(static_cast<uint16_t>(out[2 * i] | out[2 * i + 1] << 8))), 1e-36);
      continue;
    }
    const double value = c.scale > 0.0F ? exact[i] / c.scale : exact[i];
    if (c.scale > 0.0F) {
      got = out[i];
      want = warp::to_fp8(static_cast<float>(value));
    } else {
      got = out[2 * i] | out[2 * i + 1] << 8;
      want = to_bfloat16(static_cast<float>(value));
    }
    neighbours += got != want ? 1 : 0;
    if (std::abs(got - want) > furthest && ++wrong <= 5)
      ADD_FAILURE() << "value " << i << " is " << got << ", and not " << want;
  }
  EXPECT_EQ(wrong, 0U);
  EXPECT_LE(neighbours, exact.size() / 200 + 1);
}

template <class Body>
void run(const Case& c, Body body) {
  for (int32_t block = 0; block < c.tokens; ++block) {
    warp::run_block(block, row_threads(c.width), kNormSharedBytes, c.backwards, body);
  }
}

class NormKernel : public testing::TestWithParam<Case> {};

TEST_P(NormKernel, IsTheRecordedOneInDouble) {
  const Case& c = GetParam();
  const Norm norm{c.epsilon, c.added ? 1 : 0, c.scale};
  ASSERT_EQ(refuse(norm), "");
  ASSERT_EQ(refuse_rows("ifab_norm", c.width, c.tokens), "");
  const std::vector<uint16_t> x = values(count_of(c), c.size, 1), addend = values(count_of(c), c.size, 2);
  const std::vector<uint16_t> weight = values(static_cast<size_t>(c.width), 1.0F, 3);
  std::vector<uint16_t> sum(count_of(c), 0xeeee);
  std::vector<uint8_t> out = room(c);
  NormArguments a = arguments_of(norm, c.width);
  a.x = x.data();
  a.weight = weight.data();
  a.output = out.data();
  if (c.added) {
    a.addend = addend.data();
    a.sum = sum.data();
  }
  run(c, [&](warp::HostLane lane) {
    const bool fp8 = c.scale > 0.0F;
    if (c.added && fp8) NormRow<warp::HostLane, true, true>{lane, a}.run();
    if (c.added && !fp8) NormRow<warp::HostLane, true, false>{lane, a}.run();
    if (!c.added && fp8) NormRow<warp::HostLane, false, true>{lane, a}.run();
    if (!c.added && !fp8) NormRow<warp::HostLane, false, false>{lane, a}.run();
  });

  std::vector<double> exact;
  const auto width = static_cast<size_t>(c.width);
  for (size_t row = 0; row < static_cast<size_t>(c.tokens); ++row) {
    std::vector<double> normed;
    double squares = 0.0;
    for (size_t i = row * width; i < (row + 1) * width; ++i) {
      double value = from_bfloat16(x[i]);
      if (c.added) {
        value = rounded(value + from_bfloat16(addend[i]));
        ASSERT_EQ(from_bfloat16(sum[i]), value) << "sum " << i;
      }
      squares += value * value;
      normed.push_back(value);
    }
    const double root = std::sqrt(squares / c.width + static_cast<double>(c.epsilon));
    for (size_t i = 0; i < width; ++i) exact.push_back(rounded(normed[i] / root) * from_bfloat16(weight[i]));
  }
  // A normed value that is its own neighbour is then multiplied: up to two steps of bfloat16, and one of FP8.
  expect_same(c, out, exact, c.scale > 0.0F ? 1 : 2);
}

// Widths of one chunk, of less than a warp, of exactly one and of four chunks a thread, and of neither; as wide as
// models.
INSTANTIATE_TEST_SUITE_P(
    Widths, NormKernel,
    testing::Values(Case{8}, Case{64, 3, 0.01F}, Case{256, 2, 0.0F, true}, Case{1024, 2, 0.02F, true}, Case{1032, 2},
                    Case{2056, 2, 0.005F, false, 1e-5F, 1.0F, true}, Case{4096, 3, 0.02F, true, 1e-5F, 1.0F, true},
                    Case{4096, 2}, Case{5120, 1, 0.0F, true, 1e-6F, 300.0F}, Case{128, 2, 0.01F, true, 0.5F, 0.001F},
                    Case{kWidestRow, 1, 0.02F}, Case{512, 2, 0.002F}));

class GatedUnitKernel : public testing::TestWithParam<Case> {};

TEST_P(GatedUnitKernel, IsTheRecordedOneInDouble) {
  const Case& c = GetParam();
  const GatedUnit unit{c.scale};
  ASSERT_EQ(refuse(unit), "");
  ASSERT_EQ(refuse_rows("ifab_gated_unit", c.width, c.tokens), "");
  const std::vector<uint16_t> x = values(2 * count_of(c), c.size, 4);
  std::vector<uint8_t> out = room(c);
  GatedUnitArguments a = arguments_of(unit, c.width);
  a.x = x.data();
  a.output = out.data();
  run(c, [&](warp::HostLane lane) {
    if (c.scale > 0.0F) {
      GatedUnitRow<warp::HostLane, true>{lane, a}.run();
    } else {
      GatedUnitRow<warp::HostLane, false>{lane, a}.run();
    }
  });
  std::vector<double> exact;
  const auto width = static_cast<size_t>(c.width);
  for (size_t row = 0; row < static_cast<size_t>(c.tokens); ++row) {
    for (size_t i = 0; i < width; ++i) {
      const double gate = from_bfloat16(x[row * 2 * width + i]), up = from_bfloat16(x[row * 2 * width + width + i]);
      exact.push_back(gate / (1.0 + std::exp(-gate)) * up);
    }
  }
  expect_same(c, out, exact, 1);
}

// Gates of 40 reach from nothing to themselves; 11008 is a width that leaves threads of the last warp idle.
INSTANTIATE_TEST_SUITE_P(Widths, GatedUnitKernel,
                         testing::Values(Case{8}, Case{136, 2, 0.01F}, Case{1024, 2, 0.02F}, Case{1088, 2},
                                         Case{11008, 2, 0.02F, false, 0.0F, 1.0F, true}, Case{11008, 1},
                                         Case{512, 2, 0.0F, false, 0.0F, 40.0F}, Case{512, 2, 0.5F, false, 0.0F, 40.0F},
                                         Case{kWidestRow, 1, 0.02F}));

TEST(Rows, AreRefusedByField) {
  EXPECT_EQ(refuse(Norm{1e-5F, 1, 0.01F}), "");
  EXPECT_EQ(refuse(Norm{0.0F, 0, 0.0F}), "");
  EXPECT_NE(refuse(Norm{-1.0F, 0, 0.0F}).find("ifab_norm: epsilon is -1"), std::string::npos);
  EXPECT_NE(refuse(Norm{std::nanf(""), 0, 0.0F}).find("epsilon is"), std::string::npos);
  EXPECT_EQ(refuse(Norm{1e-5F, 2, 0.0F}), "ifab_norm: added is 2, and must be 0 or 1");
  for (const float scale : {-1.0F, 1e-40F, std::numeric_limits<float>::infinity(), std::nanf("")}) {
    EXPECT_NE(refuse(Norm{1e-5F, 0, scale}).find("ifab_norm: output_scale is"), std::string::npos) << scale;
    EXPECT_NE(refuse(GatedUnit{scale}).find("ifab_gated_unit: output_scale is"), std::string::npos) << scale;
  }
  for (const int64_t width : {int64_t{0}, int64_t{-8}, int64_t{12}, int64_t{kWidestRow} + 8}) {
    EXPECT_NE(refuse_rows("ifab_norm", width, 1).find("the width of a row is " + std::to_string(width)),
              std::string::npos);
  }
  EXPECT_EQ(refuse_rows("ifab_gated_unit", kWidestRow, 1), "");
  EXPECT_NE(refuse_rows("ifab_norm", 64, 0).find("the number of tokens is 0"), std::string::npos);
  EXPECT_NE(refuse_rows("ifab_norm", 64, int64_t{1} << 40).find("1 to 2147483647"), std::string::npos);
}

TEST(Rows, HaveABlockThatHoldsThem) {
  for (int32_t width = 8; width <= kWidestRow; width += 8) {
    const int32_t threads = row_threads(width);
    ASSERT_TRUE(threads % 32 == 0 && threads >= 32 && threads <= kRowThreads) << width;
    ASSERT_GE(threads * kRowChunks * 8, width);
  }
}

}  // namespace
}  // namespace ifab::plugins
