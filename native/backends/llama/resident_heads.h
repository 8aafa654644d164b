// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "config.h"
#include "ledger.h"
#include "prefixes.h"
#include "session.h"

namespace ifab::llama {

// Leading parts of prompts that stay in the cache after the request that computed them has ended, each as a sequence of
// its own with an id above those of live sequences. A longer head serves every request that shares a part of it, so a
// head that is the beginning of another is replaced by it.
class ResidentHeads {
 public:
  ResidentHeads(const Config& config, Session& session, Ledger& ledger, Prefixes& prefixes);

  // A live sequence that holds `tokens` is about to end. Keeps the leading part that waiting requests begin with or a
  // hint of the request says is worth it, unless another sequence holds that anyway.
  void consider(int32_t sequence, const Request& request, std::span<const int32_t> tokens, const WaitingHeads& waiting);
  // A request started from what this sequence holds.
  void used(int32_t sequence);
  // Gives up the head that is worth least. False where there is none.
  bool give_up_one(const WaitingHeads& waiting);

 private:
  struct Head {
    int32_t sequence = -1;
    uint64_t salt = 0;
    uint64_t last_use = 0;
    std::vector<int32_t> tokens;  // empty: free
  };

  Head* place_for(uint64_t salt, std::span<const int32_t> tokens, const WaitingHeads& waiting);
  Head* worth_least(const WaitingHeads& waiting);
  void free(Head& head);

  Session& session_;
  Ledger& ledger_;
  Prefixes& prefixes_;
  const bool shares_cells_;
  std::vector<Head> heads_;
  uint64_t clock_ = 0;
};

}  // namespace ifab::llama
