// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <compare>
#include <cstdint>
#include <string>
#include <string_view>

namespace ifab::guide {

// A number of a JSON document, exactly: digits * 10^exponent. A double would take 9007199254740993 for its neighbour
// and a text for another text of the same value.
class Decimal {
 public:
  // Whole numbers of this magnitude and more are this number to floor() and ceil().
  static constexpr int64_t kFar = 1'000'000'000'000'000'000;

  // `literal`: a number as JSON writes it.
  explicit Decimal(std::string_view literal);

  bool whole() const { return exponent_ >= 0; }
  // The next whole number that is not above, and not below; within -kFar and kFar.
  int64_t floor() const;
  int64_t ceil() const;
  // The one text of this value.
  std::string text() const;

  std::strong_ordering operator<=>(const Decimal& other) const;
  bool operator==(const Decimal& other) const = default;

 private:
  int64_t whole_part() const;
  std::strong_ordering compare_magnitudes(const Decimal& other) const;

  bool negative_ = false;
  std::string digits_;  // without zeros at its ends; empty for zero
  int64_t exponent_ = 0;
};

}  // namespace ifab::guide
