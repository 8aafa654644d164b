// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "config.h"
#include "id_map.h"
#include "request.h"

namespace ifab::llama {

// What the cache holds that a request to come could start from: for each sequence, live or resident, the leading part
// of a prompt that it has computed, in whole blocks. Tokens are compared one by one, so that a match is exact.
class Prefixes {
 public:
  struct Match {
    int32_t sequence = -1;
    uint32_t tokens = 0;  // whole blocks
  };

  explicit Prefixes(uint32_t sequences) : held_(sequences) {}

  // From now on the sequence holds `tokens`, of which whole blocks can be shared within `salt`. The tokens stay where
  // they are until the next set() or clear() of the sequence.
  void set(int32_t sequence, uint64_t salt, std::span<const int32_t> tokens);
  void clear(int32_t sequence) { held_[static_cast<size_t>(sequence)] = {}; }

  // The longest shared part, at most `limit` tokens. `skip` is a sequence that does not count, or -1.
  Match longest(uint64_t salt, std::span<const int32_t> prompt, uint32_t limit, int32_t skip = -1) const;
  // The same among sequences below `end`.
  Match longest_below(int32_t end, uint64_t salt, std::span<const int32_t> prompt, uint32_t limit) const;

 private:
  struct Held {
    uint64_t salt = 0;
    std::span<const int32_t> tokens;
  };
  Match longest_in(size_t end, uint64_t salt, std::span<const int32_t> prompt, uint32_t limit, int32_t skip) const;

  std::vector<Held> held_;
};

// Tokens in whole blocks, at most `limit`, that two prompts begin with.
uint32_t shared_tokens(std::span<const int32_t> a, std::span<const int32_t> b, uint32_t limit);

// Which leading parts of prompts requests are waiting for: a count for each block and everything before it.
class WaitingHeads {
 public:
  WaitingHeads();
  void add(const Request& request) { change(request, true); }
  void remove(const Request& request) { change(request, false); }
  // How many leading tokens of `tokens`, in whole blocks, some waiting request begins with.
  uint32_t wanted(uint64_t salt, std::span<const int32_t> tokens) const;

 private:
  void change(const Request& request, bool more);

  std::unique_ptr<IdMap<uint32_t>> counts_;  // by chained hash; grows with what waits
};

}  // namespace ifab::llama
