// SPDX-License-Identifier: Apache-2.0
#include "regex.h"

#include <string>

#include "reader.h"

namespace ifab::guide {
namespace {

const CharacterSet kDigits{{'0', '9'}};
const CharacterSet kWord{{'0', '9'}, {'A', 'Z'}, {'_', '_'}, {'a', 'z'}};
// WhiteSpace and LineTerminator of ECMA-262: the spaces of Unicode (category Zs), the byte order mark, line ends.
const CharacterSet kSpace{{'\t', '\r'},     {' ', ' '},       {0xA0, 0xA0},     {0x1680, 0x1680}, {0x2000, 0x200A},
                          {0x2028, 0x2029}, {0x202F, 0x202F}, {0x205F, 0x205F}, {0x3000, 0x3000}, {0xFEFF, 0xFEFF}};
const CharacterSet kLineEnds{{'\n', '\n'}, {'\r', '\r'}, {0x2028, 0x2029}};

class RegexReader {
 public:
  RegexReader(GrammarBuilder& builder, std::string_view text, const WriteCharacters& write)
      : builder_(builder), reader_(text), write_(write) {}

  Element read(bool whole) {
    const Element body = read_alternatives(0);
    if (!reader_.done()) reader_.fail("a group is closed that was not opened");
    if (!whole && !anchored_alike_) {
      throw GuideError("^ and $ in some alternatives and not in others are not supported", IFAB_UNIMPLEMENTED);
    }
    Sequence out;
    if (!whole && !starts_) GrammarBuilder::append(out, anything());
    out.push_back(body);
    if (!whole && !ends_) GrammarBuilder::append(out, anything());
    return builder_.choice({out});
  }

 private:
  Sequence anything() {
    return builder_.repeat({write_(builder_, {{0, kLastCodePoint}})}, 0, GrammarBuilder::kUnbounded);
  }

  Element read_alternatives(int depth) {
    if (depth > kDeepestGroup) reader_.fail("groups are nested too deeply");
    std::vector<Sequence> alternatives;
    bool starts = false;
    bool ends = false;
    do {
      // Anchors count at the ends of the whole expression only, and alike in each of its alternatives.
      bool starts_here = false;
      bool ends_here = false;
      alternatives.push_back(read_sequence(depth, starts_here, ends_here));
      if (alternatives.size() == 1) {
        starts = starts_here;
        ends = ends_here;
      } else if (starts != starts_here || ends != ends_here) {
        anchored_alike_ = false;
      }
    } while (reader_.take("|"));
    if (depth == 0) {
      starts_ = starts;
      ends_ = ends;
    }
    const Element rule = builder_.rule();
    for (Sequence& alternative : alternatives) builder_.add(rule, std::move(alternative));
    return rule;
  }

  Sequence read_sequence(int depth, bool& starts, bool& ends) {
    Sequence out;
    while (!reader_.done() && reader_.peek() != '|' && reader_.peek() != ')') {
      if (reader_.take("^")) {
        if (depth > 0 || !out.empty() || starts) reader_.unsupported("^ inside an expression");
        starts = true;
        continue;
      }
      if (reader_.take("$")) {
        if (depth > 0 || (!reader_.done() && reader_.peek() != '|')) reader_.unsupported("$ inside an expression");
        ends = true;
        continue;
      }
      Sequence item{read_item(depth)};
      Repetition repetition;
      if (take_repetition(reader_, repetition)) {
        if (reader_.take("+")) reader_.unsupported("a possessive repetition");
        reader_.take("?");
        if (reader_.peek() == '*' || reader_.peek() == '{') reader_.fail("a repetition of a repetition");
        item = builder_.repeat(item, repetition.least, repetition.most);
      }
      GrammarBuilder::append(out, item);
    }
    return out;
  }

  Element read_item(int depth) {
    const char c = reader_.peek();
    if (c == '*' || c == '+' || c == '?' || c == '{') reader_.fail("a repetition of nothing");
    if (reader_.take("(")) {
      open_group();
      const Element group = read_alternatives(depth + 1);
      reader_.expect(")");
      return group;
    }
    if (reader_.take("[")) return write_(builder_, read_class());
    if (reader_.take(".")) return write_(builder_, complement(kLineEnds));
    if (reader_.take("\\")) return write_(builder_, read_escape(false));
    const uint32_t point = reader_.character();
    return write_(builder_, {{point, point}});
  }

  void open_group() {
    if (!reader_.take("?")) return;
    if (reader_.take(":")) return;
    reader_.take("P");
    if (!reader_.take("<") || reader_.peek() == '=' || reader_.peek() == '!') {
      reader_.unsupported("a group of this kind (look-around, flags, conditions)");
    }
    while (!reader_.take(">")) reader_.character();
  }

  CharacterSet read_class() {
    const bool inverse = reader_.take("^");
    CharacterSet set;
    // Nothing, or anything, to ECMA-262; the bracket itself to others.
    if (reader_.peek() == ']') reader_.unsupported("a class that begins with ]");
    while (reader_.peek() != ']') {
      if (reader_.at("[:") || reader_.at("&&")) reader_.unsupported("a class inside a class");
      const CharacterSet low = class_item();
      const bool range = reader_.peek() == '-' && reader_.peek(1) != ']';
      if (range && low.size() == 1 && low[0].first == low[0].last) {
        reader_.skip(1);
        const CharacterSet high = class_item();
        if (high.size() != 1 || high[0].first != high[0].last || high[0].last < low[0].first) {
          reader_.fail("a range ends before it begins");
        }
        set.push_back({low[0].first, high[0].last});
      } else {
        set.insert(set.end(), low.begin(), low.end());
      }
    }
    reader_.expect("]");
    return inverse ? complement(set) : set;
  }

  CharacterSet class_item() {
    if (reader_.take("\\")) return read_escape(true);
    const uint32_t point = reader_.character();
    return {{point, point}};
  }

  CharacterSet read_escape(bool in_class) {
    const uint32_t kind = reader_.character();
    const auto one = [](uint32_t point) { return CharacterSet{{point, point}}; };
    switch (kind) {
      case 'd':
        return kDigits;
      case 'D':
        return complement(kDigits);
      case 'w':
        return kWord;
      case 'W':
        return complement(kWord);
      case 's':
        return kSpace;
      case 'S':
        return complement(kSpace);
      case 'n':
        return one('\n');
      case 'r':
        return one('\r');
      case 't':
        return one('\t');
      case 'f':
        return one('\f');
      case 'v':
        return one('\v');
      case 'x':
        return one(reader_.hexadecimal(2));
      case 'u':
        return one(reader_.hexadecimal(4));
      default:
        break;
    }
    if (kind == 'b' && in_class) return one('\b');
    const bool letter_or_digit =
        (kind >= '0' && kind <= '9') || (kind >= 'a' && kind <= 'z') || (kind >= 'A' && kind <= 'Z');
    if (letter_or_digit) reader_.unsupported(std::string("the escape \\") + static_cast<char>(kind));
    return one(kind);
  }

  GrammarBuilder& builder_;
  Reader reader_;
  const WriteCharacters& write_;
  bool starts_ = false;
  bool ends_ = false;
  bool anchored_alike_ = true;
};

}  // namespace

Element read_regex(GrammarBuilder& builder, std::string_view text, bool whole, const WriteCharacters& write) {
  return RegexReader(builder, text, write).read(whole);
}

std::shared_ptr<const Grammar> read_regex(std::string_view text) {
  GrammarBuilder builder;
  const WriteCharacters plain = [](GrammarBuilder& to, const CharacterSet& set) { return to.characters(set); };
  return builder.finish(read_regex(builder, text, true, plain));
}

}  // namespace ifab::guide
