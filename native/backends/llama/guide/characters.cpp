// SPDX-License-Identifier: Apache-2.0
//
// Sets of characters as sequences of bytes.
#include <algorithm>

#include "grammar.h"

namespace ifab::guide {
namespace {

constexpr CodePoints kSurrogates{0xD800, 0xDFFF};

struct ByteRange {
  uint8_t first;
  uint8_t last;
};

size_t encode(uint32_t point, uint8_t* out) {
  if (point < 0x80) {
    out[0] = static_cast<uint8_t>(point);
    return 1;
  }
  const size_t size = point < 0x800 ? 2 : point < 0x10000 ? 3 : 4;
  for (size_t i = size - 1; i > 0; --i, point >>= 6) out[i] = static_cast<uint8_t>(0x80 | (point & 0x3F));
  static constexpr uint8_t kLead[] = {0, 0, 0xC0, 0xE0, 0xF0};
  out[0] = static_cast<uint8_t>(kLead[size] | point);
  return size;
}

// Cuts a range of code points into ranges whose UTF-8 forms differ in whole byte ranges only.
void cut(uint32_t first, uint32_t last, std::vector<std::vector<ByteRange>>& out) {
  static constexpr uint32_t kLastOfSize[] = {0x7F, 0x7FF, 0xFFFF};
  for (const uint32_t end : kLastOfSize) {
    if (first <= end && last > end) {
      cut(first, end, out);
      cut(end + 1, last, out);
      return;
    }
  }
  uint8_t low[4];
  uint8_t high[4];
  const size_t size = encode(first, low);
  encode(last, high);
  // Behind the first byte in which they differ, the range has to go from the least to the largest of continuations.
  for (size_t rest = 1; rest < size; ++rest) {
    const uint32_t mask = (1u << (6 * rest)) - 1;
    if ((first & ~mask) == (last & ~mask)) continue;
    if ((first & mask) != 0) {
      cut(first, first | mask, out);
      cut((first | mask) + 1, last, out);
      return;
    }
    if ((last & mask) != mask) {
      cut(first, (last & ~mask) - 1, out);
      cut(last & ~mask, last, out);
      return;
    }
  }
  std::vector<ByteRange>& sequence = out.emplace_back();
  for (size_t i = 0; i < size; ++i) sequence.push_back({low[i], high[i]});
}

ByteSet set_of(const ByteRange& range) {
  ByteSet set;
  for (unsigned byte = range.first; byte <= range.last; ++byte) set.set(byte);
  return set;
}

}  // namespace

CharacterSet normalised(CharacterSet set) {
  CharacterSet valid;
  for (const CodePoints& range : set) {
    if (range.first < kSurrogates.first) valid.push_back({range.first, std::min(range.last, kSurrogates.first - 1)});
    if (range.last > kSurrogates.last) {
      valid.push_back({std::max(range.first, kSurrogates.last + 1), std::min(range.last, kLastCodePoint)});
    }
  }
  std::sort(valid.begin(), valid.end());
  CharacterSet out;
  for (const CodePoints& range : valid) {
    if (range.first > range.last) continue;
    if (!out.empty() && range.first <= out.back().last + 1) {
      out.back().last = std::max(out.back().last, range.last);
    } else {
      out.push_back(range);
    }
  }
  return out;
}

CharacterSet complement(const CharacterSet& set) {
  CharacterSet out;
  uint32_t next = 0;
  for (const CodePoints& range : normalised(set)) {
    if (range.first > next) out.push_back({next, range.first - 1});
    next = range.last + 1;
  }
  if (next <= kLastCodePoint) out.push_back({next, kLastCodePoint});
  return normalised(out);
}

Element GrammarBuilder::characters(const CharacterSet& set) {
  const CharacterSet points = normalised(set);
  if (points.empty()) throw GuideError("a set of characters is empty");
  if (const auto known = known_characters_.find(points); known != known_characters_.end()) return known->second;
  std::vector<std::vector<ByteRange>> sequences;
  for (const CodePoints& range : points) cut(range.first, range.last, sequences);
  ByteSet single;
  std::vector<Sequence> alternatives;
  for (const auto& sequence : sequences) {
    if (sequence.size() == 1) {
      single |= set_of(sequence.front());
      continue;
    }
    Sequence& alternative = alternatives.emplace_back();
    for (const ByteRange& range : sequence) alternative.push_back(bytes(set_of(range)));
  }
  Element element;
  if (alternatives.empty()) {
    element = bytes(single);
  } else {
    if (single.any()) alternatives.push_back({bytes(single)});
    element = choice(std::move(alternatives));
  }
  known_characters_.emplace(points, element);
  return element;
}

}  // namespace ifab::guide
