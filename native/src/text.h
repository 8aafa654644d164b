// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string_view>

namespace ifab {

// The longest leading part of a UTF-8 text that has at most `bytes` bytes and ends between characters.
inline std::string_view cut_text(std::string_view text, size_t bytes) {
  if (text.size() <= bytes) return text;
  while (bytes > 0 && (static_cast<unsigned char>(text[bytes]) & 0xC0u) == 0x80u) --bytes;
  return text.substr(0, bytes);
}

}  // namespace ifab
