// SPDX-License-Identifier: Apache-2.0
//
// e4m3 where there is no instruction for it: cards before sm_89.
#pragma once

#include <cstdint>

#include "lane.h"

namespace ifab::plugins {

// e4m3 of a value (four bits of exponent with bias 7, three of fraction, no infinity): rounded to nearest, ties to
// even, held at 448; not-a-number stays one.
IFAB_CARD uint32_t fp8_by_hand(float value) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, value);
  const uint32_t sign = bits >> 24 & 0x80U, magnitude = bits & 0x7fffffffU;
  if (magnitude > 0x7f800000U) return sign | 0x7fU;
  if (magnitude >= 0x43e00000U) return sign | 0x7eU;  // 448
  if (magnitude < 0x3c800000U) {
    // Below 2^-6 neighbours are 2^-9 apart: adding 2^14 leaves the count of those in the last bits, rounded.
    const float counted = __builtin_bit_cast(float, magnitude) + 16384.0F;
    return sign | (__builtin_bit_cast(uint32_t, counted) - 0x46800000U);
  }
  const uint32_t rounded = magnitude + 0x7ffffU + (magnitude >> 20 & 1U);
  const uint32_t out = (rounded >> 20) - ((127U - 7U) << 3);
  return sign | (out > 0x7eU ? 0x7eU : out);
}

}  // namespace ifab::plugins
