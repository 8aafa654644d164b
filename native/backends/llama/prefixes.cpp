// SPDX-License-Identifier: Apache-2.0
#include "prefixes.h"

#include <algorithm>
#include <cstring>

namespace ifab::llama {
namespace {

// The hash of a block and of everything before it. Equal hashes of different heads would only keep a head too many.
uint64_t chain(uint64_t before, std::span<const int32_t> block) {
  uint64_t hash = before;
  for (const int32_t token : block) {
    hash = (hash ^ static_cast<uint32_t>(token)) * 0x9FB21C651E98DF25u;
    hash ^= hash >> 32;
  }
  return hash;
}

uint64_t start_of_chain(uint64_t salt) {
  return (salt ^ 0x9E3779B97F4A7C15u) * 0xD6E8FEB86659FD93u;
}

}  // namespace

uint32_t shared_tokens(std::span<const int32_t> a, std::span<const int32_t> b, uint32_t limit) {
  const size_t most = std::min<size_t>({a.size(), b.size(), limit}) / kBlockTokens * kBlockTokens;
  size_t tokens = 0;
  while (tokens < most && std::memcmp(a.data() + tokens, b.data() + tokens, kBlockTokens * sizeof(int32_t)) == 0) {
    tokens += kBlockTokens;
  }
  return static_cast<uint32_t>(tokens);
}

void Prefixes::set(int32_t sequence, uint64_t salt, std::span<const int32_t> tokens) {
  held_[static_cast<size_t>(sequence)] = {salt, tokens.first(tokens.size() / kBlockTokens * kBlockTokens)};
}

Prefixes::Match Prefixes::longest(uint64_t salt, std::span<const int32_t> prompt, uint32_t limit, int32_t skip) const {
  return longest_in(held_.size(), salt, prompt, limit, skip);
}

Prefixes::Match Prefixes::longest_below(int32_t end, uint64_t salt, std::span<const int32_t> prompt,
                                        uint32_t limit) const {
  return longest_in(static_cast<size_t>(end), salt, prompt, limit, -1);
}

Prefixes::Match Prefixes::longest_in(size_t end, uint64_t salt, std::span<const int32_t> prompt, uint32_t limit,
                                     int32_t skip) const {
  Match best;
  for (size_t i = 0; i < end; ++i) {
    const Held& held = held_[i];
    if (held.salt != salt || held.tokens.size() <= best.tokens || static_cast<int32_t>(i) == skip) continue;
    const uint32_t tokens = shared_tokens(held.tokens, prompt, limit);
    if (tokens > best.tokens) best = {static_cast<int32_t>(i), tokens};
  }
  return best;
}

WaitingHeads::WaitingHeads() : counts_(std::make_unique<IdMap<uint32_t>>(1024)) {}

void WaitingHeads::change(const Request& request, bool more) {
  const std::span<const int32_t> prompt(request.prompt);
  uint64_t hash = start_of_chain(request.salt);
  for (size_t at = 0; at + kBlockTokens <= prompt.size(); at += kBlockTokens) {
    hash = chain(hash, prompt.subspan(at, kBlockTokens));
    uint32_t* count = counts_->find(hash);
    if (count != nullptr) {
      if (more) {
        ++*count;
      } else if (--*count == 0) {
        counts_->erase(hash);
      }
    } else if (more) {
      if (counts_->size() == counts_->capacity()) {
        auto larger = std::make_unique<IdMap<uint32_t>>(counts_->capacity() * 2);
        counts_->for_each([&](uint64_t key, uint32_t value) { larger->insert(key, value); });
        counts_ = std::move(larger);
      }
      counts_->insert(hash, 1);
    }
  }
}

uint32_t WaitingHeads::wanted(uint64_t salt, std::span<const int32_t> tokens) const {
  uint64_t hash = start_of_chain(salt);
  size_t at = 0;
  for (; at + kBlockTokens <= tokens.size(); at += kBlockTokens) {
    hash = chain(hash, tokens.subspan(at, kBlockTokens));
    if (counts_->find(hash) == nullptr) break;
  }
  return static_cast<uint32_t>(at);
}

}  // namespace ifab::llama
