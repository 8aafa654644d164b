// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>

namespace ifab {

// SHA-256 (FIPS 180-4) of some bytes, as 64 lower-case hexadecimal digits. For documents, not for weights.
std::string sha256_hex(std::string_view bytes);

}  // namespace ifab
