// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "automaton.h"

namespace ifab::guide {

// The bytes that each token of a vocabulary stands for, in order, so that a pass over all of them reads what
// neighbours begin with only once. Tokens without text are not in it.
class TokenBytes {
 public:
  // pieces[id]: the bytes of a token; empty for one without text.
  explicit TokenBytes(const std::vector<std::string>& pieces);

  size_t vocab_size() const { return starts_.size() - 1; }
  // Empty for a token without text.
  std::string_view bytes(int32_t token) const;
  // Sets a bit for each token whose bytes can follow in that state. False where that goes beyond the automaton's
  // limits. `bits` holds vocab_size() bits in words of 64, all 0.
  bool mark_allowed(Automaton& automaton, Automaton::State state, std::span<uint64_t> bits) const;

 private:
  struct Ordered {
    int32_t token;
    uint32_t shared;  // bytes that it begins with like the one before it
  };

  std::string text_;
  std::vector<uint32_t> starts_;  // by token
  std::vector<Ordered> order_;
  size_t longest_ = 0;
};

}  // namespace ifab::guide
