// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

namespace ifab {

// CRC-32 (ISO-HDLC: the one of zlib and gzip) of some bytes.
uint32_t crc32(const uint8_t* data, size_t size);

}  // namespace ifab
