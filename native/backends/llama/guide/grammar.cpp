// SPDX-License-Identifier: Apache-2.0
#include "grammar.h"

#include <algorithm>

namespace ifab::guide {
namespace {

[[noreturn]] void refuse_size() {
  throw GuideError("the guide is too large: more than " + std::to_string(GrammarBuilder::kMostElements) + " places");
}

}  // namespace

Element GrammarBuilder::rule() {
  if (grammar_->rules_.size() >= kMostElements) refuse_size();
  grammar_->rules_.emplace_back();
  return {Element::Kind::kRule, static_cast<uint32_t>(grammar_->rules_.size() - 1)};
}

void GrammarBuilder::add(Element rule, Sequence alternative) {
  std::vector<Element>& elements = grammar_->elements_;
  if (elements.size() + alternative.size() + 1 > kMostElements) refuse_size();
  grammar_->rules_[rule.value].push_back(static_cast<uint32_t>(elements.size()));
  elements.insert(elements.end(), alternative.begin(), alternative.end());
  elements.push_back({});
}

void GrammarBuilder::append(Sequence& to, const Sequence& from) {
  // Repetitions behind each other fill the memory before any of it is added.
  if (to.size() + from.size() > kMostElements) refuse_size();
  to.insert(to.end(), from.begin(), from.end());
}

Element GrammarBuilder::choice(std::vector<Sequence> alternatives) {
  if (alternatives.size() == 1 && alternatives[0].size() == 1) return alternatives[0][0];
  const Element out = rule();
  for (Sequence& alternative : alternatives) add(out, std::move(alternative));
  return out;
}

Sequence GrammarBuilder::any_of(std::vector<std::string> texts) {
  std::sort(texts.begin(), texts.end());
  texts.erase(std::unique(texts.begin(), texts.end()), texts.end());
  return any_of(std::span<const std::string>(texts), 0);
}

// Texts in ascending order that are equal up to `begin`. As deep as there are lengths at which one of them forks, and
// texts that fork at n lengths have n * n / 2 bytes: a guide of 1 MiB is less than 1,500 deep.
Sequence GrammarBuilder::any_of(std::span<const std::string> texts, size_t begin) {
  const std::string& first = texts.front();
  const std::string& last = texts.back();
  const auto fork = std::mismatch(first.begin() + static_cast<std::ptrdiff_t>(begin), first.end(),
                                  last.begin() + static_cast<std::ptrdiff_t>(begin), last.end());
  const auto end = static_cast<size_t>(fork.first - first.begin());
  Sequence out = text(std::string_view(first).substr(begin, end - begin));
  if (texts.size() == 1) return out;
  const Element ways = rule();
  for (size_t from = 0; from < texts.size();) {
    if (texts[from].size() == end) {
      add(ways, {});
      ++from;
      continue;
    }
    size_t to = from + 1;
    while (to < texts.size() && texts[to][end] == texts[from][end]) ++to;
    add(ways, any_of(texts.subspan(from, to - from), end));
    from = to;
  }
  out.push_back(ways);
  return out;
}

Element GrammarBuilder::bytes(const ByteSet& set) {
  const auto [known, added] = known_sets_.emplace(set.to_string(), static_cast<uint32_t>(grammar_->sets_.size()));
  if (added) grammar_->sets_.push_back(set);
  return {Element::Kind::kBytes, known->second};
}

Element GrammarBuilder::byte(uint8_t value) {
  return bytes(ByteSet().set(value));
}

Sequence GrammarBuilder::text(std::string_view utf8) {
  Sequence out;
  out.reserve(utf8.size());
  for (const char c : utf8) out.push_back(byte(static_cast<uint8_t>(c)));
  return out;
}

Sequence GrammarBuilder::repeat(const Sequence& what, uint32_t least, uint32_t most) {
  if (least > kMostRepetitions || (most != kUnbounded && most > kMostRepetitions)) {
    throw GuideError("a repetition of more than " + std::to_string(kMostRepetitions) + " times is too large");
  }
  if (most < least)
    throw GuideError("a repetition of at least " + std::to_string(least) + " and at most " + std::to_string(most) +
                     " times");
  const Element once = choice({what});
  Sequence out(least, once);
  if (most == kUnbounded) {
    const Element more = rule();
    add(more, {once, more});
    add(more, {});
    out.push_back(more);
  } else if (most > least) {
    // once (once (once)?)?, innermost first
    Element rest = choice({{once}, {}});
    for (uint32_t i = least + 1; i < most; ++i) rest = choice({{once, rest}, {}});
    out.push_back(rest);
  }
  return out;
}

std::shared_ptr<const Grammar> GrammarBuilder::finish(Element root) {
  for (const auto& alternatives : grammar_->rules_) {
    if (alternatives.empty()) throw GuideError("a rule is used and not defined");
  }
  if (root.kind != Element::Kind::kRule) {
    const Element rule_of_root = rule();
    add(rule_of_root, {root});
    root = rule_of_root;
  }
  grammar_->root_ = root.value;
  if (!rules_where_all(true)[grammar_->root_]) throw GuideError("no text can ever end: every way goes on for ever");
  refuse_left_recursion(rules_where_all(false));
  classify_bytes();
  return std::move(grammar_);
}

std::vector<bool> GrammarBuilder::rules_where_all(bool bytes_count) const {
  const Grammar& grammar = *grammar_;
  struct Alternative {
    uint32_t rule;
    uint32_t open;  // places that do not count yet
  };
  std::vector<Alternative> alternatives;
  std::vector<std::vector<uint32_t>> waiting(grammar.rules_.size());  // alternatives by the rules that they wait for
  std::vector<bool> holds(grammar.rules_.size());
  std::vector<uint32_t> news;
  const auto settle = [&](uint32_t rule) {
    if (!holds[rule]) {
      holds[rule] = true;
      news.push_back(rule);
    }
  };
  for (uint32_t rule = 0; rule < grammar.rules_.size(); ++rule) {
    for (const uint32_t start : grammar.rules_[rule]) {
      Alternative alternative{rule, 0};
      for (uint32_t at = start; grammar.elements_[at].kind != Element::Kind::kEnd; ++at) {
        const Element& element = grammar.elements_[at];
        if (element.kind == Element::Kind::kRule) {
          waiting[element.value].push_back(static_cast<uint32_t>(alternatives.size()));
          ++alternative.open;
        } else if (!bytes_count) {
          ++alternative.open;  // never settled: a byte does not vanish
        }
      }
      if (alternative.open == 0) settle(rule);
      alternatives.push_back(alternative);
    }
  }
  while (!news.empty()) {
    const uint32_t rule = news.back();
    news.pop_back();
    for (const uint32_t index : waiting[rule]) {
      if (--alternatives[index].open == 0) settle(alternatives[index].rule);
    }
  }
  return holds;
}

// A rule that begins with itself would pile up what is to follow without reading a byte. Where it is also the last
// place of its alternative nothing piles up, as in a repetition of what may be empty, and that is allowed.
void GrammarBuilder::refuse_left_recursion(const std::vector<bool>& nullable) const {
  const Grammar& grammar = *grammar_;
  const auto count = static_cast<uint32_t>(grammar.rules_.size());
  std::vector<std::vector<uint32_t>> begins_with(count);
  std::vector<std::pair<uint32_t, uint32_t>> not_last;
  for (uint32_t rule = 0; rule < count; ++rule) {
    for (const uint32_t start : grammar.rules_[rule]) {
      for (uint32_t at = start; grammar.elements_[at].kind == Element::Kind::kRule; ++at) {
        const uint32_t other = grammar.elements_[at].value;
        begins_with[rule].push_back(other);
        if (grammar.elements_[at + 1].kind != Element::Kind::kEnd) not_last.emplace_back(rule, other);
        if (!nullable[other]) break;
      }
    }
  }
  // Strongly connected components (Tarjan), without recursion: guides may nest deeply.
  std::vector<uint32_t> index(count, 0), low(count, 0), component(count, 0), next(count, 0), stack, path;
  std::vector<bool> on_stack(count);
  uint32_t seen = 0;
  uint32_t components = 0;
  for (uint32_t first = 0; first < count; ++first) {
    if (index[first] != 0) continue;
    path.push_back(first);
    while (!path.empty()) {
      const uint32_t rule = path.back();
      if (index[rule] == 0) {
        index[rule] = low[rule] = ++seen;
        stack.push_back(rule);
        on_stack[rule] = true;
      }
      if (next[rule] < begins_with[rule].size()) {
        const uint32_t other = begins_with[rule][next[rule]++];
        if (index[other] == 0) {
          path.push_back(other);
        } else if (on_stack[other]) {
          low[rule] = std::min(low[rule], index[other]);
        }
        continue;
      }
      path.pop_back();
      if (!path.empty()) low[path.back()] = std::min(low[path.back()], low[rule]);
      if (low[rule] != index[rule]) continue;
      ++components;
      for (uint32_t member = stack.back();; member = stack.back()) {
        stack.pop_back();
        on_stack[member] = false;
        component[member] = components;
        if (member == rule) break;
      }
    }
  }
  for (const auto& [rule, other] : not_last) {
    if (component[rule] == component[other]) throw GuideError("a rule begins with itself (left recursion)");
  }
}

void GrammarBuilder::classify_bytes() {
  std::map<std::vector<bool>, uint8_t> classes;
  for (unsigned byte = 0; byte < 256; ++byte) {
    std::vector<bool> signature;
    signature.reserve(grammar_->sets_.size());
    for (const ByteSet& set : grammar_->sets_) signature.push_back(set.test(byte));
    const auto [known, added] = classes.emplace(std::move(signature), static_cast<uint8_t>(classes.size()));
    if (added) grammar_->representatives_.push_back(static_cast<uint8_t>(byte));
    grammar_->class_of_[byte] = known->second;
  }
}

}  // namespace ifab::guide
