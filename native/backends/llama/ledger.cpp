// SPDX-License-Identifier: Apache-2.0
#include "ledger.h"

#include <algorithm>

namespace ifab::llama {

void Ledger::begin(int32_t sequence, int32_t parent, uint32_t shared) {
  at(sequence) = {shared, shared, parent};
}

void Ledger::rename(int32_t from, int32_t to) {
  at(to) = at(from);
  at(from) = {};
  for (Sequence& other : sequences_) {
    if (other.parent == from) other.parent = to;
  }
}

void Ledger::end(int32_t sequence) {
  const Sequence gone = at(sequence);
  at(sequence) = {};
  int32_t heir = -1;
  for (size_t i = 0; i < sequences_.size(); ++i) {
    if (sequences_[i].parent == sequence && (heir < 0 || sequences_[i].shared > at(heir).shared)) {
      heir = static_cast<int32_t>(i);
    }
  }
  if (heir < 0) return;
  for (size_t i = 0; i < sequences_.size(); ++i) {
    if (sequences_[i].parent == sequence && static_cast<int32_t>(i) != heir) sequences_[i].parent = heir;
  }
  at(heir).parent = gone.parent;
  at(heir).shared = std::min(at(heir).shared, gone.shared);
}

uint64_t Ledger::cells() const {
  uint64_t total = 0;
  for (const Sequence& sequence : sequences_) total += sequence.length - sequence.shared;
  return total;
}

uint64_t Ledger::cells_of_sequences_below(int32_t end) const {
  referenced_.assign(sequences_.size(), 0);
  for (int32_t i = 0; i < end; ++i) {
    const Sequence& live = sequences_[static_cast<size_t>(i)];
    uint32_t reach = live.length;
    for (int32_t node = i; node >= 0 && reach > 0; node = sequences_[static_cast<size_t>(node)].parent) {
      uint32_t& referenced = referenced_[static_cast<size_t>(node)];
      referenced = std::max(referenced, reach);
      reach = std::min(reach, sequences_[static_cast<size_t>(node)].shared);
    }
  }
  uint64_t total = 0;
  for (size_t i = 0; i < sequences_.size(); ++i) {
    total += referenced_[i] > sequences_[i].shared ? referenced_[i] - sequences_[i].shared : 0;
  }
  return total;
}

}  // namespace ifab::llama
