// SPDX-License-Identifier: Apache-2.0
#include "formula.h"

#include <bit>
#include <cstring>

#include "ifab/engine.h"

namespace ifab::simulated {
namespace {

// The value k / 2^bits - 1, for k of bits + 1 bits, in a format of `mantissa` stored mantissa bits and the exponent
// bias `bias`. It has at most as many significant bits as the format, so nothing is rounded.
uint32_t encode(uint32_t k, uint32_t bits, uint32_t mantissa, uint32_t bias, uint32_t sign_bit) {
  const int64_t scaled = int64_t{k} - (int64_t{1} << bits);
  if (scaled == 0) return 0;
  const auto magnitude = static_cast<uint32_t>(scaled < 0 ? -scaled : scaled);
  const auto exponent = static_cast<uint32_t>(std::bit_width(magnitude)) - 1;
  const uint32_t fraction = (magnitude << (mantissa - exponent)) & ((1u << mantissa) - 1);
  const uint32_t sign = scaled < 0 ? sign_bit : 0;
  return sign | ((bias + exponent - bits) << mantissa) | fraction;
}

void put16(uint32_t value, uint8_t* out) {
  const auto half = static_cast<uint16_t>(value);
  std::memcpy(out, &half, sizeof half);
}

}  // namespace

void write_payload(uint64_t chain, uint32_t values, int32_t dtype, uint8_t* out) {
  for (uint32_t i = 0; i < values; ++i) {
    const uint64_t word = mix(chain ^ i);
    if (dtype == IFAB_DTYPE_FLOAT32) {
      const uint32_t value = encode(static_cast<uint32_t>(word >> 40), 23, 23, 127, 0x80000000u);
      std::memcpy(out + size_t{4} * i, &value, sizeof value);
    } else if (dtype == IFAB_DTYPE_FLOAT16) {
      put16(encode(static_cast<uint32_t>(word >> 53), 10, 10, 15, 0x8000u), out + size_t{2} * i);
    } else {
      put16(encode(static_cast<uint32_t>(word >> 56), 7, 7, 127, 0x8000u), out + size_t{2} * i);
    }
  }
}

}  // namespace ifab::simulated
