// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace ifab::llama {

// How many cells of the cache its sequences hold, where a cell may belong to several.
//
// A sequence that starts with tokens of another shares their cells in a unified cache; the other is its parent. When a
// parent goes, the child that shares most of it inherits what they shared. Between streams nothing is shared, and every
// sequence is its own.
class Ledger {
 public:
  explicit Ledger(uint32_t sequences) : sequences_(sequences) {}

  // A sequence begins with `shared` tokens that it shares with `parent`; parent -1 and 0 for none.
  void begin(int32_t sequence, int32_t parent, uint32_t shared);
  void grow(int32_t sequence, uint32_t tokens) { at(sequence).length += tokens; }
  // The sequence, with everything it shares, goes on under another id, which is free.
  void rename(int32_t from, int32_t to);
  void end(int32_t sequence);

  uint32_t length(int32_t sequence) const { return sequences_[static_cast<size_t>(sequence)].length; }
  // Cells that any sequence holds.
  uint64_t cells() const;
  // Of these, cells that some sequence below `end` holds: the ids of live sequences are the lowest.
  uint64_t cells_of_sequences_below(int32_t end) const;

 private:
  struct Sequence {
    uint32_t length = 0;
    uint32_t shared = 0;  // leading tokens whose cells count for the parent
    int32_t parent = -1;
  };
  Sequence& at(int32_t sequence) { return sequences_[static_cast<size_t>(sequence)]; }

  std::vector<Sequence> sequences_;
  mutable std::vector<uint32_t> referenced_;
};

}  // namespace ifab::llama
