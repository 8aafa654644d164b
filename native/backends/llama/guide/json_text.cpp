// SPDX-License-Identifier: Apache-2.0
#include "json_text.h"

#include <algorithm>
#include <array>
#include <tuple>

#include "regex.h"

namespace ifab::guide {
namespace {

constexpr int64_t kMostInteger = 999'999'999'999'999'999;  // 18 digits
// Two numbers of so many digits are never the same double (DBL_DIG), so that none is read as the bound next to it.
constexpr uint32_t kExactDigits = 15;
constexpr int64_t kMostWithFraction = 99'999'999'999'999;  // one digit less: at least one is behind the point

struct Escape {
  uint32_t point;
  std::string_view text;
};

// Characters that a string cannot hold as they are and that have a short form.
constexpr std::array<Escape, 7> kEscapes{
    {{'"', "\\\""}, {'\\', "\\\\"}, {'\b', "\\b"}, {'\f', "\\f"}, {'\n', "\\n"}, {'\r', "\\r"}, {'\t', "\\t"}}};

const CharacterSet kPlain{{0x20, '!'}, {'#', '['}, {']', kLastCodePoint}};

bool contains(const CharacterSet& normal, uint32_t point) {
  return std::any_of(normal.begin(), normal.end(),
                     [&](const CodePoints& r) { return r.first <= point && point <= r.last; });
}

CharacterSet both(const CharacterSet& a, const CharacterSet& b) {
  CharacterSet out;
  for (const CodePoints& x : a) {
    for (const CodePoints& y : b) {
      if (std::max(x.first, y.first) <= std::min(x.last, y.last)) {
        out.push_back({std::max(x.first, y.first), std::min(x.last, y.last)});
      }
    }
  }
  return out;
}

}  // namespace

Element JsonText::space() {
  if (!space_) {
    Sequence line = builder_.text("\n");
    GrammarBuilder::append(line, builder_.repeat({builder_.bytes(ByteSet().set(' ').set('\t'))}, 0, 16));
    space_ = builder_.choice({{}, builder_.text(" "), line});
  }
  return *space_;
}

// A character of a string's value, as the string writes it.
Element JsonText::written(const CharacterSet& set) {
  const CharacterSet points = normalised(set);
  std::vector<Sequence> alternatives;
  if (const CharacterSet plain = both(points, kPlain); !plain.empty())
    alternatives.push_back({builder_.characters(plain)});
  for (const Escape& escape : kEscapes) {
    if (contains(points, escape.point)) alternatives.push_back(builder_.text(escape.text));
  }
  if (alternatives.empty()) {
    throw GuideError("a pattern needs a control character that has no short escape", IFAB_UNIMPLEMENTED);
  }
  return builder_.choice(std::move(alternatives));
}

Element JsonText::string(uint32_t least, uint32_t most) {
  Sequence out = builder_.text("\"");
  GrammarBuilder::append(out, builder_.repeat({written({{0, kLastCodePoint}})}, least, most));
  GrammarBuilder::append(out, builder_.text("\""));
  return builder_.choice({out});
}

Element JsonText::string_like(std::string_view pattern) {
  const WriteCharacters write = [this](GrammarBuilder&, const CharacterSet& set) { return written(set); };
  Sequence out = builder_.text("\"");
  out.push_back(read_regex(builder_, pattern, false, write));
  GrammarBuilder::append(out, builder_.text("\""));
  return builder_.choice({out});
}

std::optional<Element> JsonText::string_in_format(std::string_view format) {
  // Days stop at 28, so that each of them exists in every month.
  static constexpr std::string_view kDate = "[12][0-9]{3}-(0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])";
  static constexpr std::string_view kTime =
      "([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](Z|[+-](0[0-9]|1[0-4]):[0-5][0-9])";
  static constexpr std::string_view kOctet = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])";
  const std::string octet(kOctet);
  if (format == "date") return string_like("^" + std::string(kDate) + "$");
  if (format == "time") return string_like("^" + std::string(kTime) + "$");
  if (format == "date-time") return string_like("^" + std::string(kDate) + "T" + std::string(kTime) + "$");
  if (format == "uuid") return string_like("^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$");
  if (format == "ipv4") return string_like("^" + octet + "\\." + octet + "\\." + octet + "\\." + octet + "$");
  return std::nullopt;
}

Element JsonText::boolean() {
  return builder_.choice({builder_.text("true"), builder_.text("false")});
}

Element JsonText::null() {
  return builder_.choice({builder_.text("null")});
}

Element JsonText::digit_between(char first, char last) {
  ByteSet set;
  for (char digit = first; digit <= last; ++digit) set.set(static_cast<unsigned char>(digit));
  return builder_.bytes(set);
}

Element JsonText::digits(uint32_t least, uint32_t most) {
  return builder_.choice({builder_.repeat({digit_between('0', '9')}, least, most)});
}

Sequence JsonText::same_length(std::string_view low, std::string_view high) {
  const auto size = static_cast<uint32_t>(low.size());
  if (size == 0) return {};
  if (low.find_first_not_of('0') == std::string_view::npos && high.find_first_not_of('9') == std::string_view::npos) {
    return Sequence(size, digit_between('0', '9'));
  }
  const char first = low.front();
  const char last = high.front();
  low.remove_prefix(1);
  high.remove_prefix(1);
  const auto one = [&](char digit, std::string_view from, std::string_view to) {
    Sequence out{digit_between(digit, digit)};
    GrammarBuilder::append(out, same_length(from, to));
    return out;
  };
  if (first == last) return one(first, low, high);
  std::vector<Sequence> alternatives{one(first, low, std::string(size - 1, '9'))};
  if (first + 1 < last) {
    Sequence between{digit_between(static_cast<char>(first + 1), static_cast<char>(last - 1))};
    between.resize(size, digit_between('0', '9'));
    alternatives.push_back(between);
  }
  alternatives.push_back(one(last, std::string(size - 1, '0'), high));
  return {builder_.choice(std::move(alternatives))};
}

// Adds `before` and a number between two bounds: one alternative for each number of digits.
void JsonText::add_magnitudes(Element rule, const Sequence& before, uint64_t least, uint64_t most, bool with_fraction) {
  uint64_t low = least;
  while (low <= most) {
    const std::string low_text = std::to_string(low);
    const std::string nines(low_text.size(), '9');
    const uint64_t high = std::min<uint64_t>(most, std::stoull(nines));
    Sequence out = before;
    GrammarBuilder::append(out, same_length(low_text, std::to_string(high)));
    if (with_fraction) {
      GrammarBuilder::append(out, fraction(kExactDigits - static_cast<uint32_t>(low_text.size())));
    }
    builder_.add(rule, std::move(out));
    low = high + 1;
  }
}

Element JsonText::integer(std::optional<int64_t> least, std::optional<int64_t> most) {
  const int64_t low = std::max(least.value_or(-kMostInteger), -kMostInteger);
  const int64_t high = std::min(most.value_or(kMostInteger), kMostInteger);
  if (low > high) throw GuideError("no whole number of at most 18 digits lies within its bounds");
  const Element rule = builder_.rule();
  if (high >= 0)
    add_magnitudes(rule, {}, static_cast<uint64_t>(std::max<int64_t>(low, 0)), static_cast<uint64_t>(high), false);
  if (low < 0) {
    const int64_t nearest = std::max<int64_t>(1, -high);
    add_magnitudes(rule, builder_.text("-"), static_cast<uint64_t>(nearest), static_cast<uint64_t>(-low), false);
  }
  return rule;
}

Sequence JsonText::fraction(uint32_t most) {
  Sequence out = builder_.text(".");
  out.push_back(digits(1, most));
  return out;
}

Element JsonText::any_number() {
  if (!any_number_) any_number_ = from_regex("-?(0|[1-9][0-9]{0,17})(\\.[0-9]{1,15})?([eE][+-]?[0-9]{1,2})?");
  return *any_number_;
}

Element JsonText::from_regex(std::string_view expression) {
  const WriteCharacters plain = [](GrammarBuilder& to, const CharacterSet& set) { return to.characters(set); };
  return read_regex(builder_, expression, true, plain);
}

// Whole numbers within the bounds, and n.f for every n such that all of n.0 to n.999 lies within them. Digits behind
// the point that only some n allow are left out, which makes the text a little poorer and never wrong.
Element JsonText::number(const WholeBounds& bounds) {
  std::vector<Sequence> alternatives;
  if (bounds.first <= bounds.last) alternatives.push_back({integer(bounds.first, bounds.last)});
  const auto add = [&](const Sequence& before, int64_t from, int64_t to) {
    const int64_t most = std::min(to, kMostWithFraction);
    if (from > most) return;
    const Element rule = builder_.rule();
    add_magnitudes(rule, before, static_cast<uint64_t>(from), static_cast<uint64_t>(most), true);
    alternatives.push_back({rule});
  };
  add({}, std::max<int64_t>(bounds.first, 0), bounds.upper - 1);
  add(builder_.text("-"), std::max<int64_t>(-bounds.last, 0), -bounds.lower - 1);
  if (alternatives.empty()) throw GuideError("its bounds leave no number that can be written", IFAB_UNIMPLEMENTED);
  return builder_.choice(std::move(alternatives));
}

Element JsonText::any_value() {
  if (any_value_) return *any_value_;
  any_value_ = builder_.rule();
  const auto sequence = [&](std::initializer_list<std::string_view> before, Element element) {
    Sequence out;
    for (const std::string_view text : before) {
      GrammarBuilder::append(out, builder_.text(text));
      out.push_back(space());
    }
    out.push_back(element);
    return out;
  };
  const Element text = string(0, GrammarBuilder::kUnbounded);
  Sequence member{text, builder_.byte(':'), space(), *any_value_};
  for (const auto& [open, close, item] :
       {std::tuple{"{", "}", builder_.choice({member})}, std::tuple{"[", "]", *any_value_}}) {
    Sequence more = builder_.repeat(sequence({","}, item), 0, GrammarBuilder::kUnbounded);
    Sequence filled = sequence({open}, item);
    GrammarBuilder::append(filled, more);
    filled.push_back(space());
    GrammarBuilder::append(filled, builder_.text(close));
    builder_.add(*any_value_, filled);
    Sequence empty = builder_.text(open);
    empty.push_back(space());
    GrammarBuilder::append(empty, builder_.text(close));
    builder_.add(*any_value_, empty);
  }
  for (const Element element : {text, any_number(), boolean(), null()}) builder_.add(*any_value_, {element});
  return *any_value_;
}

std::string JsonText::quoted(std::string_view value) {
  static constexpr char kHex[] = "0123456789abcdef";
  std::string out = "\"";
  for (const char c : value) {
    const auto* escape = std::find_if(kEscapes.begin(), kEscapes.end(),
                                      [&](const Escape& e) { return e.point == static_cast<unsigned char>(c); });
    if (escape != kEscapes.end()) {
      out += escape->text;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      out += "\\u00";
      out += kHex[static_cast<unsigned char>(c) >> 4];
      out += kHex[static_cast<unsigned char>(c) & 15];
    } else {
      out += c;
    }
  }
  return out + '"';
}

}  // namespace ifab::guide
