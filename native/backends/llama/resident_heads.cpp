// SPDX-License-Identifier: Apache-2.0
#include "resident_heads.h"

#include <algorithm>

namespace ifab::llama {

ResidentHeads::ResidentHeads(const Config& config, Session& session, Ledger& ledger, Prefixes& prefixes)
    : session_(session),
      ledger_(ledger),
      prefixes_(prefixes),
      shares_cells_(!config.streams()),
      heads_(config.resident_heads) {
  for (size_t i = 0; i < heads_.size(); ++i) {
    heads_[i].sequence = static_cast<int32_t>(config.slots + i);
    heads_[i].tokens.reserve(config.sequence_tokens);
  }
}

void ResidentHeads::consider(int32_t sequence, const Request& request, std::span<const int32_t> tokens,
                             const WaitingHeads& waiting) {
  uint32_t keep = waiting.wanted(request.salt, tokens);
  for (const uint32_t end : request.head_ends) {
    keep = std::max(keep, whole_blocks(std::min(end, static_cast<uint32_t>(tokens.size()))));
  }
  if (keep == 0 || heads_.empty()) return;
  const std::span<const int32_t> head = tokens.first(keep);
  const Prefixes::Match other = prefixes_.longest(request.salt, head, keep, sequence);
  if (other.tokens == keep) {
    used(other.sequence);
    return;
  }
  Head* place = place_for(request.salt, head, waiting);
  if (!place->tokens.empty()) free(*place);
  session_.copy(sequence, place->sequence, keep);
  if (shares_cells_) {
    ledger_.begin(place->sequence, sequence, keep);
  } else {
    ledger_.begin(place->sequence, -1, 0);
    ledger_.grow(place->sequence, keep);
  }
  place->salt = request.salt;
  place->last_use = ++clock_;
  place->tokens.assign(head.begin(), head.end());
  prefixes_.set(place->sequence, place->salt, place->tokens);
}

void ResidentHeads::used(int32_t sequence) {
  for (Head& head : heads_) {
    if (head.sequence == sequence) head.last_use = ++clock_;
  }
}

bool ResidentHeads::give_up_one(const WaitingHeads& waiting) {
  Head* least = worth_least(waiting);
  if (least == nullptr) return false;
  free(*least);
  return true;
}

// A head that is the beginning of the new one, else a free place, else the head that is worth least.
ResidentHeads::Head* ResidentHeads::place_for(uint64_t salt, std::span<const int32_t> tokens,
                                              const WaitingHeads& waiting) {
  Head* free_place = nullptr;
  for (Head& head : heads_) {
    if (head.tokens.empty()) {
      free_place = &head;
    } else if (head.salt == salt && shared_tokens(head.tokens, tokens, UINT32_MAX) == head.tokens.size()) {
      return &head;
    }
  }
  return free_place != nullptr ? free_place : worth_least(waiting);
}

// The one that was used longest ago, of those that nobody waits for where there is one.
ResidentHeads::Head* ResidentHeads::worth_least(const WaitingHeads& waiting) {
  Head* least = nullptr;
  bool least_wanted = false;
  for (Head& head : heads_) {
    if (head.tokens.empty()) continue;
    const bool wanted = waiting.wanted(head.salt, head.tokens) == head.tokens.size();
    if (least == nullptr || (least_wanted && !wanted) || (least_wanted == wanted && head.last_use < least->last_use)) {
      least = &head;
      least_wanted = wanted;
    }
  }
  return least;
}

void ResidentHeads::free(Head& head) {
  session_.drop(head.sequence);
  ledger_.end(head.sequence);
  prefixes_.clear(head.sequence);
  head.tokens.clear();
}

}  // namespace ifab::llama
