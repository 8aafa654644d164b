// SPDX-License-Identifier: Apache-2.0
//
// A context-free grammar over bytes: what every kind of guide becomes.
//
// Text is constrained byte by byte, since tokens may end inside a character. Nothing in this folder knows the runtime.
#pragma once

#include <array>
#include <bitset>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ifab/engine.h"

namespace ifab::guide {

// Why a guide is refused. Thrown inside this folder only: compile_guide() turns it into a status.
class GuideError : public std::runtime_error {
 public:
  explicit GuideError(const std::string& what, ifab_status_t code = IFAB_INVALID_ARGUMENT)
      : std::runtime_error(what), code_(code) {}
  ifab_status_t code() const { return code_; }

 private:
  ifab_status_t code_;
};

using ByteSet = std::bitset<256>;

// Code points from `first` to `last`, both included.
struct CodePoints {
  uint32_t first;
  uint32_t last;
  auto operator<=>(const CodePoints&) const = default;
};

// A set of characters: ranges in any order. Surrogates are no characters and are left out by whoever reads it.
using CharacterSet = std::vector<CodePoints>;

inline constexpr uint32_t kLastCodePoint = 0x10FFFF;

// Ranges in order, disjoint, without surrogates.
CharacterSet normalised(CharacterSet set);
CharacterSet complement(const CharacterSet& set);

// One place of an alternative.
struct Element {
  enum class Kind : uint8_t { kEnd, kBytes, kRule };
  Kind kind = Kind::kEnd;
  uint32_t value = 0;  // kBytes: index of a byte set; kRule: of a rule
};

// A finished grammar. Constant; shared by every sample that it guides.
class Grammar {
 public:
  uint32_t root() const { return root_; }
  // Where the alternatives of a rule begin; each runs to its kEnd.
  const std::vector<uint32_t>& alternatives(uint32_t rule) const { return rules_[rule]; }
  const Element& element(uint32_t position) const { return elements_[position]; }
  const ByteSet& bytes(uint32_t set) const { return sets_[set]; }

  // Bytes that no set tells apart are of one class.
  size_t byte_classes() const { return representatives_.size(); }
  uint8_t byte_class(uint8_t byte) const { return class_of_[byte]; }
  uint8_t representative(size_t byte_class) const { return representatives_[byte_class]; }

 private:
  friend class GrammarBuilder;

  uint32_t root_ = 0;
  std::vector<std::vector<uint32_t>> rules_;
  std::vector<Element> elements_;
  std::vector<ByteSet> sets_;
  std::array<uint8_t, 256> class_of_{};
  std::vector<uint8_t> representatives_;
};

using Sequence = std::vector<Element>;

// Puts a grammar together. Throws GuideError where it would be larger than kMostElements.
class GrammarBuilder {
 public:
  static constexpr size_t kMostElements = 100'000;
  static constexpr uint32_t kMostRepetitions = 10'000;
  static constexpr uint32_t kUnbounded = UINT32_MAX;

  // A rule without alternatives, to be referred to before it is defined.
  Element rule();
  void add(Element rule, Sequence alternative);
  // A rule of these alternatives.
  Element choice(std::vector<Sequence> alternatives);
  // One of these texts, at least one; as a tree of their common beginnings, so that of thousands of texts only those
  // are still open that begin with what was written.
  Sequence any_of(std::vector<std::string> texts);

  Element bytes(const ByteSet& set);
  Element byte(uint8_t value);
  static void append(Sequence& to, const Sequence& from);
  Sequence text(std::string_view utf8);
  // One character of a set, as its UTF-8 bytes.
  Element characters(const CharacterSet& set);
  // So many times, at least and at most.
  Sequence repeat(const Sequence& what, uint32_t least, uint32_t most);

  // The grammar that begins with `root`. Throws GuideError where a rule has no alternatives, no text can ever end, or
  // a rule begins with itself.
  std::shared_ptr<const Grammar> finish(Element root);

 private:
  Sequence any_of(std::span<const std::string> texts, size_t begin);
  // Rules that have an alternative of which every place may vanish, or of which every place can end.
  std::vector<bool> rules_where_all(bool bytes_count) const;
  void refuse_left_recursion(const std::vector<bool>& nullable) const;
  void classify_bytes();

  std::shared_ptr<Grammar> grammar_ = std::make_shared<Grammar>();
  std::map<std::string, uint32_t> known_sets_;
  std::map<CharacterSet, Element> known_characters_;
};

}  // namespace ifab::guide
