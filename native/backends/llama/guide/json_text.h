// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "grammar.h"

namespace ifab::guide {

// The pieces that JSON documents are written of. One for each grammar; pieces are made once and shared.
//
// What is written is a little less than what JSON allows, so that a sample cannot fill itself with it: at most a line
// end and sixteen blanks at a time between pieces, integers of at most 18 digits, and 15 digits behind a point; where a
// number has a bound, a fraction makes it no longer than 15 digits.
class JsonText {
 public:
  explicit JsonText(GrammarBuilder& builder) : builder_(builder) {}

  Element space();
  // A string of so many characters.
  Element string(uint32_t least, uint32_t most);
  // A string whose value matches a pattern of a schema.
  Element string_like(std::string_view pattern);
  // A string in one of the formats date, time, date-time, uuid and ipv4; nothing for another format.
  std::optional<Element> string_in_format(std::string_view format);
  Element boolean();
  Element null();
  // Whole numbers between two bounds, both included. Throws GuideError where there are none.
  Element integer(std::optional<int64_t> least, std::optional<int64_t> most);
  Element any_number();
  // Numbers between two bounds, by the whole numbers next to them.
  struct WholeBounds {
    int64_t first;  // the least whole number within the bounds
    int64_t last;   // the largest
    int64_t lower;  // the least, were a whole bound itself included
    int64_t upper;  // the largest, likewise
  };
  // Throws GuideError where none can be written.
  Element number(const WholeBounds& bounds);
  Element any_value();
  // The text of a string value, in quotes.
  static std::string quoted(std::string_view value);

 private:
  Element digits(uint32_t least, uint32_t most);
  Element digit_between(char first, char last);
  // Digit strings of one length, between two of that length.
  Sequence same_length(std::string_view low, std::string_view high);
  void add_magnitudes(Element rule, const Sequence& before, uint64_t least, uint64_t most, bool with_fraction);
  Sequence fraction(uint32_t most);
  Element written(const CharacterSet& set);
  Element from_regex(std::string_view expression);

  GrammarBuilder& builder_;
  std::optional<Element> space_;
  std::optional<Element> any_value_;
  std::optional<Element> any_number_;
};

}  // namespace ifab::guide
