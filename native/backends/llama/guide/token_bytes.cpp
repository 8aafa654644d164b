// SPDX-License-Identifier: Apache-2.0
#include "token_bytes.h"

#include <algorithm>

namespace ifab::guide {

TokenBytes::TokenBytes(const std::vector<std::string>& pieces) {
  starts_.reserve(pieces.size() + 1);
  for (const std::string& piece : pieces) {
    starts_.push_back(static_cast<uint32_t>(text_.size()));
    text_ += piece;
    longest_ = std::max(longest_, piece.size());
  }
  starts_.push_back(static_cast<uint32_t>(text_.size()));
  for (size_t token = 0; token < pieces.size(); ++token) {
    if (!pieces[token].empty()) order_.push_back({static_cast<int32_t>(token), 0});
  }
  std::sort(order_.begin(), order_.end(), [&](const Ordered& a, const Ordered& b) {
    const auto left = bytes(a.token);
    const auto right = bytes(b.token);
    return left != right ? left < right : a.token < b.token;
  });
  for (size_t i = 1; i < order_.size(); ++i) {
    const auto before = bytes(order_[i - 1].token);
    const auto here = bytes(order_[i].token);
    const size_t most = std::min(before.size(), here.size());
    uint32_t shared = 0;
    while (shared < most && before[shared] == here[shared]) ++shared;
    order_[i].shared = shared;
  }
}

std::string_view TokenBytes::bytes(int32_t token) const {
  const auto id = static_cast<size_t>(token);
  return std::string_view(text_).substr(starts_[id], starts_[id + 1] - starts_[id]);
}

bool TokenBytes::mark_allowed(Automaton& automaton, Automaton::State state, std::span<uint64_t> bits) const {
  // after[n]: the state behind the first n bytes of the token at hand; valid up to where the text died.
  std::vector<Automaton::State> after(longest_ + 1, Automaton::kDead);
  after[0] = state;
  size_t dead_from = longest_ + 1;  // tokens that share so many bytes with the one before are dead too
  for (const Ordered& ordered : order_) {
    if (ordered.shared >= dead_from) continue;
    dead_from = longest_ + 1;
    const std::string_view text = bytes(ordered.token);
    for (size_t n = ordered.shared; n < text.size(); ++n) {
      after[n + 1] = automaton.next(after[n], static_cast<uint8_t>(text[n]));
      if (after[n + 1] == Automaton::kTooLarge) return false;
      if (after[n + 1] == Automaton::kDead) {
        dead_from = n + 1;
        break;
      }
    }
    if (dead_from > text.size()) {
      const auto id = static_cast<size_t>(ordered.token);
      bits[id / 64] |= uint64_t{1} << (id % 64);
    }
  }
  return true;
}

}  // namespace ifab::guide
