// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "grammar.h"

namespace ifab::guide {

// Reads text along a grammar, byte by byte.
//
// A state is every way in which the text so far can stand in the grammar: a set of stacks of places to come back to.
// States and the steps between them are remembered, so that text that was seen in some state before costs a table look-
// up a byte; samples of the same guide share one automaton. What an ambiguous grammar could grow without bound has
// limits, and beyond them a step leads to kTooLarge, which ends the sample and nothing else. One thread.
class Automaton {
 public:
  using State = uint32_t;
  static constexpr State kDead = UINT32_MAX;          // no text of the grammar goes on so
  static constexpr State kTooLarge = UINT32_MAX - 1;  // beyond the limits

  explicit Automaton(std::shared_ptr<const Grammar> grammar);

  State start() const { return start_; }
  // Of a state that is neither kDead nor kTooLarge.
  State next(State state, uint8_t byte);
  // Whether the text may end here.
  bool accepts(State state) const { return states_[state].accepts; }
  // Whether it can only end here.
  bool only_ends(State state) const { return states_[state].stacks.empty(); }
  // States so far: how much memory it has come to use.
  size_t size() const { return states_.size(); }

  static constexpr size_t kMostStacks = 1024;    // of one state
  static constexpr size_t kMostNodes = 500'000;  // of all stacks
  static constexpr size_t kMostStates = 100'000;

 private:
  static constexpr uint32_t kBottom = UINT32_MAX;
  static constexpr State kUnknown = UINT32_MAX - 2;

  // A stack: the place on top, which reads bytes, over the places to come back to. Equal stacks have equal numbers.
  struct Node {
    uint32_t place;
    uint32_t below;
  };
  struct StateData {
    std::vector<uint32_t> stacks;  // ascending
    bool accepts = false;
    std::vector<State> next;  // by byte class; kUnknown until asked
  };

  uint32_t node(uint32_t place, uint32_t below);
  // Adds every stack that begins at `place` over `below` to the state that is being made. False beyond the limits.
  bool expand(uint32_t place, uint32_t below);
  State finish_state();

  std::shared_ptr<const Grammar> grammar_;
  std::vector<Node> nodes_;
  std::unordered_map<uint64_t, uint32_t> node_numbers_;
  std::vector<StateData> states_;
  std::unordered_multimap<uint64_t, State> state_numbers_;
  State start_ = kDead;

  // Of the state that is being made.
  std::vector<uint32_t> stacks_;
  bool accepts_ = false;
  std::unordered_set<uint64_t> expanded_;
  std::vector<std::pair<uint32_t, uint32_t>> to_expand_;
};

}  // namespace ifab::guide
