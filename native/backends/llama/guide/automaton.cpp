// SPDX-License-Identifier: Apache-2.0
#include "automaton.h"

#include <algorithm>

namespace ifab::guide {
namespace {

uint64_t pair_key(uint32_t a, uint32_t b) {
  return uint64_t{a} << 32 | b;
}

uint64_t hash_of(const std::vector<uint32_t>& stacks, bool accepts) {
  uint64_t hash = accepts ? 0x9E3779B97F4A7C15u : 0;
  for (const uint32_t stack : stacks) {
    hash = (hash ^ stack) * 0x9FB21C651E98DF25u;
    hash ^= hash >> 29;
  }
  return hash;
}

}  // namespace

Automaton::Automaton(std::shared_ptr<const Grammar> grammar) : grammar_(std::move(grammar)) {
  bool fits = true;
  for (const uint32_t alternative : grammar_->alternatives(grammar_->root()))
    fits = fits && expand(alternative, kBottom);
  start_ = fits ? finish_state() : kTooLarge;
}

uint32_t Automaton::node(uint32_t place, uint32_t below) {
  const auto [known, added] = node_numbers_.try_emplace(pair_key(place, below), static_cast<uint32_t>(nodes_.size()));
  if (added) nodes_.push_back({place, below});
  return known->second;
}

bool Automaton::expand(uint32_t place, uint32_t below) {
  to_expand_.clear();
  to_expand_.emplace_back(place, below);
  while (!to_expand_.empty()) {
    const auto [at, under] = to_expand_.back();
    to_expand_.pop_back();
    if (!expanded_.insert(pair_key(at, under)).second) continue;
    if (expanded_.size() > 16 * kMostStacks || nodes_.size() > kMostNodes) return false;
    const Element& element = grammar_->element(at);
    switch (element.kind) {
      case Element::Kind::kBytes:
        stacks_.push_back(node(at, under));
        if (stacks_.size() > kMostStacks) return false;
        break;
      case Element::Kind::kEnd:
        if (under == kBottom) {
          accepts_ = true;
        } else {
          to_expand_.emplace_back(nodes_[under].place, nodes_[under].below);
        }
        break;
      case Element::Kind::kRule: {
        // Behind the last place of an alternative there is nothing to come back to.
        const bool last = grammar_->element(at + 1).kind == Element::Kind::kEnd;
        const uint32_t over = last ? under : node(at + 1, under);
        for (const uint32_t alternative : grammar_->alternatives(element.value))
          to_expand_.emplace_back(alternative, over);
        break;
      }
    }
  }
  return true;
}

Automaton::State Automaton::finish_state() {
  expanded_.clear();
  std::sort(stacks_.begin(), stacks_.end());
  stacks_.erase(std::unique(stacks_.begin(), stacks_.end()), stacks_.end());
  const uint64_t hash = hash_of(stacks_, accepts_);
  const auto [first, last] = state_numbers_.equal_range(hash);
  const auto known = std::find_if(first, last, [&](const auto& entry) {
    return states_[entry.second].accepts == accepts_ && states_[entry.second].stacks == stacks_;
  });
  State state = kTooLarge;
  if (known != last) {
    state = known->second;
  } else if (states_.size() < kMostStates) {
    state = static_cast<State>(states_.size());
    states_.push_back({stacks_, accepts_, std::vector<State>(grammar_->byte_classes(), kUnknown)});
    state_numbers_.emplace(hash, state);
  }
  stacks_.clear();
  accepts_ = false;
  return state;
}

Automaton::State Automaton::next(State state, uint8_t byte) {
  const size_t byte_class = grammar_->byte_class(byte);
  if (const State known = states_[state].next[byte_class]; known != kUnknown) return known;
  const uint8_t representative = grammar_->representative(byte_class);
  bool any = false;
  bool fits = true;
  for (size_t i = 0; i < states_[state].stacks.size() && fits; ++i) {
    const Node top = nodes_[states_[state].stacks[i]];
    if (!grammar_->bytes(grammar_->element(top.place).value).test(representative)) continue;
    any = true;
    fits = expand(top.place + 1, top.below);
  }
  State to = kDead;
  if (!fits) {
    stacks_.clear();
    accepts_ = false;
    expanded_.clear();
    to = kTooLarge;
  } else if (any) {
    to = finish_state();
  }
  states_[state].next[byte_class] = to;
  return to;
}

}  // namespace ifab::guide
