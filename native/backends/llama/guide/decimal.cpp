// SPDX-License-Identifier: Apache-2.0
#include "decimal.h"

#include <algorithm>

namespace ifab::guide {
namespace {

// Far beyond every exponent that a document of 1 MiB can shift by its digits.
constexpr int64_t kMostExponent = 1'000'000'000;

int64_t exponent_of(std::string_view text) {
  const bool negative = text.starts_with('-');
  if (negative || text.starts_with('+')) text.remove_prefix(1);
  int64_t out = 0;
  for (const char digit : text) out = std::min(kMostExponent, out * 10 + (digit - '0'));
  return negative ? -out : out;
}

}  // namespace

Decimal::Decimal(std::string_view literal) {
  negative_ = literal.starts_with('-');
  if (negative_) literal.remove_prefix(1);
  if (const size_t mark = literal.find_first_of("eE"); mark != std::string_view::npos) {
    exponent_ = exponent_of(literal.substr(mark + 1));
    literal = literal.substr(0, mark);
  }
  const size_t point = std::min(literal.find('.'), literal.size());
  digits_ = literal.substr(0, point);
  if (point < literal.size()) {
    digits_ += literal.substr(point + 1);
    exponent_ -= static_cast<int64_t>(literal.size() - point - 1);
  }
  digits_.erase(0, std::min(digits_.find_first_not_of('0'), digits_.size()));
  if (digits_.empty()) {
    negative_ = false;
    exponent_ = 0;
    return;
  }
  const size_t size = digits_.find_last_not_of('0') + 1;
  exponent_ += static_cast<int64_t>(digits_.size() - size);
  digits_.resize(size);
}

// The magnitude without its fraction, at most kFar.
int64_t Decimal::whole_part() const {
  const int64_t length = static_cast<int64_t>(digits_.size()) + exponent_;
  if (digits_.empty() || length <= 0) return 0;
  if (length > 18) return kFar;
  std::string text = digits_.substr(0, static_cast<size_t>(length));
  text.resize(static_cast<size_t>(length), '0');
  return std::stoll(text);
}

int64_t Decimal::floor() const {
  const int64_t part = whole_part();
  if (!negative_) return part;
  return whole() || part == kFar ? -part : -part - 1;
}

int64_t Decimal::ceil() const {
  const int64_t part = whole_part();
  if (negative_) return -part;
  return whole() || part == kFar ? part : part + 1;
}

std::string Decimal::text() const {
  if (digits_.empty()) return "0";
  return (negative_ ? "-" : "") + digits_ + "e" + std::to_string(exponent_);
}

std::strong_ordering Decimal::compare_magnitudes(const Decimal& other) const {
  if (digits_.empty() || other.digits_.empty()) return digits_.size() <=> other.digits_.size();
  const int64_t length = static_cast<int64_t>(digits_.size()) + exponent_;
  const int64_t other_length = static_cast<int64_t>(other.digits_.size()) + other.exponent_;
  if (length != other_length) return length <=> other_length;
  // Of equally long numbers the digits decide from the left: neither ends in zeros.
  return digits_ <=> other.digits_;
}

std::strong_ordering Decimal::operator<=>(const Decimal& other) const {
  if (negative_ != other.negative_) return negative_ ? std::strong_ordering::less : std::strong_ordering::greater;
  return negative_ ? other.compare_magnitudes(*this) : compare_magnitudes(other);
}

}  // namespace ifab::guide
