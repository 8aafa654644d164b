// SPDX-License-Identifier: Apache-2.0
#include "reader.h"

namespace ifab::guide {

bool Reader::take(std::string_view what) {
  if (!at(what)) return false;
  at_ += what.size();
  return true;
}

void Reader::expect(std::string_view what) {
  if (!take(what)) fail("expected " + std::string(what));
}

uint32_t Reader::character() {
  if (done()) fail("the text ends here");
  const auto lead = static_cast<unsigned char>(text_[at_]);
  const size_t size = lead < 0x80 ? 1 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
  if (at_ + size > text_.size()) fail("the text ends inside a character");
  uint32_t point = size == 1 ? lead : lead & (0x7Fu >> size);
  for (size_t i = 1; i < size; ++i) point = point << 6 | (static_cast<unsigned char>(text_[at_ + i]) & 0x3Fu);
  at_ += size;
  return point;
}

uint32_t Reader::hexadecimal(size_t digits) {
  uint32_t value = 0;
  for (size_t i = 0; i < digits; ++i) {
    const char c = peek();
    const int digit = c >= '0' && c <= '9'   ? c - '0'
                      : c >= 'a' && c <= 'f' ? c - 'a' + 10
                      : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                             : -1;
    if (digit < 0) fail("expected " + std::to_string(digits) + " hexadecimal digits");
    value = value << 4 | static_cast<uint32_t>(digit);
    ++at_;
  }
  if (value > kLastCodePoint || (value >= 0xD800 && value <= 0xDFFF)) fail("no character has this code point");
  return value;
}

uint32_t Reader::number() {
  uint32_t value = 0;
  const size_t start = at_;
  while (peek() >= '0' && peek() <= '9') {
    if (at_ - start == 9) fail("the number is too large");
    value = value * 10 + static_cast<uint32_t>(peek() - '0');
    ++at_;
  }
  if (at_ == start) fail("expected a number");
  return value;
}

std::string Reader::place() const {
  size_t line = 1;
  size_t column = 1;
  for (const char c : text_.substr(0, at_)) {
    if (c == '\n') {
      ++line;
      column = 1;
    } else if ((static_cast<unsigned char>(c) & 0xC0u) != 0x80) {
      ++column;
    }
  }
  return "line " + std::to_string(line) + ", column " + std::to_string(column) + ": ";
}

void Reader::fail(const std::string& what) const {
  throw GuideError(place() + what);
}

void Reader::unsupported(const std::string& what) const {
  throw GuideError(place() + what + " is not supported", IFAB_UNIMPLEMENTED);
}

bool take_repetition(Reader& reader, Repetition& out) {
  if (reader.take("*")) {
    out = {0, GrammarBuilder::kUnbounded};
  } else if (reader.take("+")) {
    out = {1, GrammarBuilder::kUnbounded};
  } else if (reader.take("?")) {
    out = {0, 1};
  } else if (reader.take("{")) {
    out.least = out.most = reader.number();
    if (reader.take(",")) out.most = reader.peek() == '}' ? GrammarBuilder::kUnbounded : reader.number();
    reader.expect("}");
  } else {
    return false;
  }
  return true;
}

}  // namespace ifab::guide
