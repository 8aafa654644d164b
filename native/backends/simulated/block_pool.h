// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace ifab::simulated {

// The KV pool of a simulated engine: blocks of a fixed number of tokens, held by sequences, shared between prompts.
//
// A full block of a prompt is registered under what it holds: its exact ids, the block before it, and the salt. While
// its holder computes it, others see that it will come; then they can share it. A block that nobody holds any more
// stays resident until its place is needed, the one let go of longest ago first. Since a sequence lets go of its last
// blocks first, a block never outlives the one before it. Allocates nothing after construction.
class BlockPool {
 public:
  static constexpr uint32_t kNone = UINT32_MAX;

  BlockPool(uint32_t blocks, uint32_t block_tokens);

  uint32_t block_tokens() const { return block_tokens_; }
  uint32_t total() const { return static_cast<uint32_t>(blocks_.size()); }
  // Blocks that could be taken: free ones, and resident ones that nobody holds.
  uint32_t available() const { return free_count_ + resident_count_; }
  // Blocks that are held or resident.
  uint32_t used() const { return total() - free_count_; }
  bool held(uint32_t block) const { return blocks_[block].holders > 0; }

  // A block for its caller alone; kNone where none is available.
  uint32_t take();
  // One more, or one fewer, sequence holds it.
  void hold(uint32_t block);
  void release(uint32_t block);

  // The block that holds these ids behind `before` (kNone: at the start of a prompt); kNone where there is none.
  uint32_t find(uint32_t before, uint64_t salt, std::span<const int32_t> ids) const;
  // A held block will have that content; there is no such block yet.
  void announce(uint32_t block, uint32_t before, uint64_t salt, std::span<const int32_t> ids);
  // It has it now; `chain` is the value of the chain behind its last token.
  void complete(uint32_t block, uint64_t chain);
  // An announced block that will not be completed.
  void retract(uint32_t block);
  bool announced(uint32_t block) const { return blocks_[block].state == State::kAnnounced; }
  uint64_t chain(uint32_t block) const { return blocks_[block].chain; }

 private:
  enum class State : uint8_t { kPrivate, kAnnounced, kComplete };
  struct Block {
    uint64_t chain = 0;
    uint64_t salt = 0;
    uint64_t key = 0;
    uint32_t holders = 0;
    uint32_t before = kNone;  // in its prompt
    uint32_t next_in_bucket = kNone;
    uint32_t older = kNone;  // among resident blocks that nobody holds; next free one
    uint32_t newer = kNone;
    State state = State::kPrivate;
  };

  static uint64_t key_of(uint32_t before, uint64_t salt, std::span<const int32_t> ids);
  std::span<const int32_t> ids_of(uint32_t block) const {
    return {ids_.data() + size_t{block} * block_tokens_, block_tokens_};
  }
  uint32_t& bucket(uint64_t key) { return buckets_[key & (buckets_.size() - 1)]; }
  void unregister(uint32_t block);
  void unlink_resident(uint32_t block);

  uint32_t block_tokens_;
  std::vector<Block> blocks_;
  std::vector<int32_t> ids_;  // of registered blocks
  std::vector<uint32_t> buckets_;
  uint32_t free_ = kNone;
  uint32_t oldest_ = kNone;
  uint32_t newest_ = kNone;
  uint32_t free_count_;
  uint32_t resident_count_ = 0;
};

}  // namespace ifab::simulated
