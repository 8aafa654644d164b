// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "request.h"

namespace ifab::executor {

// What requests in the runtime hold of its KV pool, as far as one can tell from outside.
//
// The runtime keeps its own books and shows only totals, late. Admission needs to know beforehand, so this counts what
// the runtime will: a request takes blocks for its prompt and for the most that it may generate, full blocks of prompts
// are shared by those that begin with the same ids under the same salt, and what a request is still computing will be
// shared once its prompt is done. Blocks are told apart by a 64-bit hash of everything before them; a collision would
// make a request look cheaper than it is, and the runtime's own scheduler then lets it wait.
class LiveBlocks {
 public:
  // `block_tokens` 0: no cache, and everything below answers 0. Without `reuse` nothing is shared.
  LiveBlocks(uint32_t block_tokens, bool reuse) : block_tokens_(block_tokens), reuse_(reuse) {}

  struct Need {
    uint64_t blocks = 0;           // beside what those inside hold
    uint64_t blocks_ever = 0;      // with nothing shared
    uint32_t shared_tokens = 0;    // of the prompt, held by those inside
    bool leader_computes = false;  // somebody inside computes the block behind these
  };
  Need need(const Request& request) const;

  // A request enters; its prompt's blocks will be there for others once context_done() says so.
  void enter(const Request& request);
  void context_done(const Request& request);
  // It is gone; `done` where context_done() was called for it.
  void leave(const Request& request, bool done);

  // Blocks that those inside hold or were promised.
  uint64_t held() const { return held_; }

 private:
  struct Block {
    uint32_t holders = 0;
    uint32_t computed = 0;  // of the holders, those whose prompts are done
  };

  uint64_t total(const Request& request) const;
  std::vector<uint64_t> keys_of(const Request& request) const;

  uint32_t block_tokens_;
  bool reuse_;
  std::unordered_map<uint64_t, Block> blocks_;
  uint64_t held_ = 0;
};

}  // namespace ifab::executor
