// SPDX-License-Identifier: Apache-2.0
#include "live_blocks.h"

namespace ifab::executor {
namespace {

uint64_t mixed(uint64_t hash, uint64_t value) {
  hash ^= value + 0x9E3779B97F4A7C15u + (hash << 6) + (hash >> 2);
  hash = (hash ^ (hash >> 30)) * 0xBF58476D1CE4E5B9u;
  return hash ^ (hash >> 27);
}

}  // namespace

uint64_t LiveBlocks::total(const Request& request) const {
  if (block_tokens_ == 0) return 0;
  const uint64_t prompt = request.prompt.size();
  const uint64_t full = prompt / block_tokens_;
  const uint64_t each = (prompt + request.max_tokens + block_tokens_ - 1) / block_tokens_ - full;
  return full + each * request.samples;
}

std::vector<uint64_t> LiveBlocks::keys_of(const Request& request) const {
  std::vector<uint64_t> keys;
  if (block_tokens_ == 0 || !reuse_) return keys;
  keys.reserve(request.prompt.size() / block_tokens_);
  uint64_t hash = mixed(0, request.salt);
  size_t at = 0;
  while (at + block_tokens_ <= request.prompt.size()) {
    for (const size_t end = at + block_tokens_; at < end; ++at) {
      hash = mixed(hash, static_cast<uint32_t>(request.prompt[at]));
    }
    keys.push_back(hash);
  }
  return keys;
}

LiveBlocks::Need LiveBlocks::need(const Request& request) const {
  Need need;
  need.blocks_ever = total(request);
  uint64_t held = 0;
  for (const uint64_t key : keys_of(request)) {
    const auto found = blocks_.find(key);
    if (found == blocks_.end()) break;
    if (found->second.computed == 0) {
      need.leader_computes = true;
      break;
    }
    ++held;
  }
  // One token of a prompt is always computed, so that there is a state to generate from.
  if (held * block_tokens_ == request.prompt.size() && held > 0) --held;
  need.blocks = need.blocks_ever - held;
  need.shared_tokens = static_cast<uint32_t>(held * block_tokens_);
  return need;
}

void LiveBlocks::enter(const Request& request) {
  uint64_t shared = 0;
  for (const uint64_t key : keys_of(request)) shared += ++blocks_[key].holders > 1 ? 1 : 0;
  held_ += total(request) - shared;
}

void LiveBlocks::context_done(const Request& request) {
  for (const uint64_t key : keys_of(request)) ++blocks_[key].computed;
}

void LiveBlocks::leave(const Request& request, bool done) {
  uint64_t still_held = 0;
  for (const uint64_t key : keys_of(request)) {
    const auto found = blocks_.find(key);
    found->second.computed -= done ? 1 : 0;
    if (--found->second.holders == 0) {
      blocks_.erase(found);
    } else {
      ++still_held;
    }
  }
  held_ -= total(request) - still_held;
}

}  // namespace ifab::executor
