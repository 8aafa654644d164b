// SPDX-License-Identifier: Apache-2.0
#include "gbnf.h"

#include <map>
#include <string>

#include "reader.h"

namespace ifab::guide {
namespace {

bool is_name_character(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' || c == '_';
}

class GbnfReader {
 public:
  explicit GbnfReader(std::string_view text) : reader_(text) {}

  std::shared_ptr<const Grammar> read() {
    skip_space(true);
    while (!reader_.done()) read_rule();
    for (const auto& [name, rule] : rules_) {
      if (!rule.defined) throw GuideError("rule " + name + " is used and not defined");
    }
    const auto root = rules_.find("root");
    if (root == rules_.end()) throw GuideError("there is no rule root");
    return builder_.finish(root->second.element);
  }

 private:
  struct Rule {
    Element element;
    bool defined = false;
  };

  // Blanks and comments, and line ends where the rule may go on behind them.
  void skip_space(bool lines) {
    for (;;) {
      const char c = reader_.peek();
      if (c == ' ' || c == '\t' || (lines && (c == '\n' || c == '\r'))) {
        reader_.skip(1);
      } else if (c == '#') {
        while (!reader_.done() && reader_.peek() != '\n') reader_.skip(1);
      } else {
        return;
      }
    }
  }

  std::string name() {
    const size_t start = reader_.position();
    while (is_name_character(reader_.peek())) reader_.skip(1);
    if (reader_.position() == start) reader_.fail("expected the name of a rule");
    return std::string(reader_.from(start));
  }

  Rule& rule_named(const std::string& name) {
    const auto [known, added] = rules_.try_emplace(name);
    if (added) known->second.element = builder_.rule();
    return known->second;
  }

  void read_rule() {
    Rule& rule = rule_named(name());
    if (rule.defined) reader_.fail("the rule is defined twice");
    rule.defined = true;
    skip_space(false);
    reader_.expect("::=");
    skip_space(true);
    read_alternatives(rule.element, 0);
    if (!reader_.done() && reader_.peek() != '\n' && reader_.peek() != '\r')
      reader_.fail("expected the end of the rule");
    skip_space(true);
  }

  void read_alternatives(Element rule, int depth) {
    if (depth > kDeepestGroup) reader_.fail("groups are nested too deeply");
    builder_.add(rule, read_sequence(depth));
    while (reader_.take("|")) {
      skip_space(true);
      builder_.add(rule, read_sequence(depth));
    }
  }

  Sequence read_sequence(int depth) {
    Sequence out;
    Sequence item;
    while (read_item(item, depth)) {
      skip_space(depth > 0);
      for (Repetition repetition; take_repetition(reader_, repetition); skip_space(depth > 0)) {
        item = builder_.repeat(item, repetition.least, repetition.most);
      }
      GrammarBuilder::append(out, item);
    }
    return out;
  }

  bool read_item(Sequence& out, int depth) {
    out.clear();
    const char c = reader_.peek();
    if (reader_.take("\"")) {
      while (!reader_.take("\"")) out.push_back(builder_.characters({character()}));
    } else if (reader_.take("[")) {
      out.push_back(read_class());
    } else if (reader_.take("(")) {
      skip_space(true);
      const Element group = builder_.rule();
      read_alternatives(group, depth + 1);
      reader_.expect(")");
      out.push_back(group);
    } else if (reader_.take(".")) {
      out.push_back(builder_.characters({{0, kLastCodePoint}}));
    } else if (c == '<' || c == '!') {
      reader_.unsupported("a reference to a token");
    } else if (is_name_character(c)) {
      out.push_back(rule_named(name()).element);
    } else {
      return false;
    }
    return true;
  }

  Element read_class() {
    const bool inverse = reader_.take("^");
    CharacterSet set;
    while (!reader_.take("]")) {
      CodePoints range = character();
      if (reader_.peek() == '-' && reader_.peek(1) != ']') {
        reader_.skip(1);
        range.last = character().first;
        if (range.last < range.first) reader_.fail("a range ends before it begins");
      }
      set.push_back(range);
    }
    if (set.empty() && !inverse) reader_.fail("a set of characters is empty");
    return builder_.characters(inverse ? complement(set) : set);
  }

  CodePoints character() {
    uint32_t point = reader_.character();
    if (point == '\\') {
      const uint32_t kind = reader_.character();
      switch (kind) {
        case 'n':
          point = '\n';
          break;
        case 'r':
          point = '\r';
          break;
        case 't':
          point = '\t';
          break;
        case 'x':
          point = reader_.hexadecimal(2);
          break;
        case 'u':
          point = reader_.hexadecimal(4);
          break;
        case 'U':
          point = reader_.hexadecimal(8);
          break;
        case '\\':
        case '"':
        case '[':
        case ']':
        case '-':
        case '^':
          point = kind;
          break;
        default:
          reader_.fail("unknown escape");
      }
    }
    return {point, point};
  }

  Reader reader_;
  GrammarBuilder builder_;
  std::map<std::string, Rule> rules_;
};

}  // namespace

std::shared_ptr<const Grammar> read_gbnf(std::string_view text) {
  return GbnfReader(text).read();
}

}  // namespace ifab::guide
