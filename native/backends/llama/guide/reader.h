// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "grammar.h"

namespace ifab::guide {

// Reads the text of a guide, which is valid UTF-8, from front to back.
class Reader {
 public:
  explicit Reader(std::string_view text) : text_(text) {}

  bool done() const { return at_ == text_.size(); }
  size_t position() const { return at_; }
  // The byte here, or `ahead` bytes further; 0 behind the end.
  char peek(size_t ahead = 0) const { return at_ + ahead < text_.size() ? text_[at_ + ahead] : '\0'; }
  bool at(std::string_view what) const { return text_.substr(at_).starts_with(what); }
  void skip(size_t bytes) { at_ += bytes; }
  // Steps over `what` where it is here.
  bool take(std::string_view what);
  void expect(std::string_view what);
  // The character here, whole; steps over it.
  uint32_t character();
  // So many hexadecimal digits.
  uint32_t hexadecimal(size_t digits);
  // A decimal number of at most nine digits.
  uint32_t number();
  std::string_view from(size_t start) const { return text_.substr(start, at_ - start); }

  // Throws GuideError with the place: "line 3, column 7: ...".
  [[noreturn]] void fail(const std::string& what) const;
  [[noreturn]] void unsupported(const std::string& what) const;

 private:
  std::string place() const;

  std::string_view text_;
  size_t at_ = 0;
};

// Groups within groups that the readers of guides follow.
inline constexpr int kDeepestGroup = 200;

// {least, most} of a repetition; most is GrammarBuilder::kUnbounded without a limit.
struct Repetition {
  uint32_t least = 1;
  uint32_t most = 1;
};

// *, +, ?, {n}, {n,} or {n,m} where one is here. False where none is.
bool take_repetition(Reader& reader, Repetition& out);

}  // namespace ifab::guide
