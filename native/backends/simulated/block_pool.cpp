// SPDX-License-Identifier: Apache-2.0
#include "block_pool.h"

#include <algorithm>
#include <bit>

#include "formula.h"

namespace ifab::simulated {

BlockPool::BlockPool(uint32_t blocks, uint32_t block_tokens)
    : block_tokens_(block_tokens),
      blocks_(blocks),
      ids_(size_t{blocks} * block_tokens),
      buckets_(std::bit_ceil(size_t{blocks} + 1), kNone),
      free_count_(blocks) {
  for (uint32_t block = blocks; block > 0; --block) {
    blocks_[block - 1].older = free_;
    free_ = block - 1;
  }
}

uint32_t BlockPool::take() {
  uint32_t block = free_;
  if (block != kNone) {
    free_ = blocks_[block].older;
    --free_count_;
  } else if (oldest_ != kNone) {
    block = oldest_;
    unlink_resident(block);
    unregister(block);
  } else {
    return kNone;
  }
  blocks_[block].holders = 1;
  blocks_[block].older = kNone;
  return block;
}

void BlockPool::hold(uint32_t block) {
  if (blocks_[block].holders++ == 0) unlink_resident(block);
}

void BlockPool::release(uint32_t block) {
  Block& it = blocks_[block];
  if (--it.holders > 0) return;
  if (it.state == State::kComplete) {
    it.older = newest_;
    it.newer = kNone;
    (newest_ == kNone ? oldest_ : blocks_[newest_].newer) = block;
    newest_ = block;
    ++resident_count_;
  } else {
    it.older = free_;
    free_ = block;
    ++free_count_;
  }
}

uint64_t BlockPool::key_of(uint32_t before, uint64_t salt, std::span<const int32_t> ids) {
  uint64_t key = mix(salt ^ before);
  for (const int32_t id : ids) {
    key = (key ^ static_cast<uint32_t>(id)) * 0x9E3779B97F4A7C15u;
    key ^= key >> 32;
  }
  return key;
}

uint32_t BlockPool::find(uint32_t before, uint64_t salt, std::span<const int32_t> ids) const {
  const uint64_t key = key_of(before, salt, ids);
  for (uint32_t at = buckets_[key & (buckets_.size() - 1)]; at != kNone; at = blocks_[at].next_in_bucket) {
    const Block& it = blocks_[at];
    if (it.key == key && it.before == before && it.salt == salt &&
        std::equal(ids.begin(), ids.end(), ids_of(at).begin())) {
      return at;
    }
  }
  return kNone;
}

void BlockPool::announce(uint32_t block, uint32_t before, uint64_t salt, std::span<const int32_t> ids) {
  Block& it = blocks_[block];
  it.state = State::kAnnounced;
  it.before = before;
  it.salt = salt;
  it.key = key_of(before, salt, ids);
  std::copy(ids.begin(), ids.end(), ids_.begin() + static_cast<ptrdiff_t>(size_t{block} * block_tokens_));
  it.next_in_bucket = bucket(it.key);
  bucket(it.key) = block;
}

void BlockPool::complete(uint32_t block, uint64_t chain) {
  blocks_[block].state = State::kComplete;
  blocks_[block].chain = chain;
}

void BlockPool::retract(uint32_t block) {
  unregister(block);
}

void BlockPool::unregister(uint32_t block) {
  Block& it = blocks_[block];
  uint32_t* at = &bucket(it.key);
  while (*at != block) at = &blocks_[*at].next_in_bucket;
  *at = it.next_in_bucket;
  it.state = State::kPrivate;
}

void BlockPool::unlink_resident(uint32_t block) {
  Block& it = blocks_[block];
  (it.older == kNone ? oldest_ : blocks_[it.older].newer) = it.newer;
  (it.newer == kNone ? newest_ : blocks_[it.newer].older) = it.older;
  it.older = it.newer = kNone;
  --resident_count_;
}

}  // namespace ifab::simulated
