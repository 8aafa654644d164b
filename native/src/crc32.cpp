// SPDX-License-Identifier: Apache-2.0
#include "crc32.h"

#include <array>
#include <bit>
#include <cstring>

namespace ifab {
namespace {

constexpr uint32_t kPolynomial = 0xEDB88320u;  // 0x04C11DB7, bits reversed

// tables[k][b]: what byte b does to the checksum when k more bytes follow it. Eight bytes a round make payloads of
// several KiB cost about a microsecond each.
constexpr std::array<std::array<uint32_t, 256>, 8> make_tables() {
  std::array<std::array<uint32_t, 256>, 8> tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t value = byte;
    for (int bit = 0; bit < 8; ++bit) value = (value >> 1) ^ ((value & 1) != 0 ? kPolynomial : 0);
    tables[0][byte] = value;
  }
  for (size_t k = 1; k < 8; ++k) {
    for (size_t byte = 0; byte < 256; ++byte) {
      const uint32_t before = tables[k - 1][byte];
      tables[k][byte] = (before >> 8) ^ tables[0][before & 0xFF];
    }
  }
  return tables;
}

constexpr auto kTables = make_tables();

static_assert(std::endian::native == std::endian::little, "payloads and checksums are little-endian");

}  // namespace

uint32_t crc32(const uint8_t* data, size_t size) {
  uint32_t value = 0xFFFFFFFFu;
  for (; size >= 8; data += 8, size -= 8) {
    uint32_t low = 0;
    uint32_t high = 0;
    std::memcpy(&low, data, 4);
    std::memcpy(&high, data + 4, 4);
    low ^= value;
    value = kTables[7][low & 0xFF] ^ kTables[6][(low >> 8) & 0xFF] ^ kTables[5][(low >> 16) & 0xFF] ^
            kTables[4][low >> 24] ^ kTables[3][high & 0xFF] ^ kTables[2][(high >> 8) & 0xFF] ^
            kTables[1][(high >> 16) & 0xFF] ^ kTables[0][high >> 24];
  }
  for (; size > 0; ++data, --size) value = (value >> 8) ^ kTables[0][(value ^ *data) & 0xFF];
  return ~value;
}

}  // namespace ifab
