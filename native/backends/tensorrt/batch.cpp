// SPDX-License-Identifier: Apache-2.0
#include "batch.h"

#include <algorithm>

namespace ifab::tensorrt {

Batch::Batch(const BindingPlan& plan, uint32_t token_budget)
    : packed_(plan.packed),
      shares_rows_(plan.shares_rows),
      row_tokens_(plan.row_tokens),
      rows_max_(plan.packed ? 0 : token_budget / plan.row_tokens),
      tokens_max_(std::min(token_budget, plan.tokens)),
      prompts_max_(plan.prompts),
      longest_(plan.row_tokens) {
  requests_.reserve(prompts_max_);
  items_.reserve(prompts_max_);
  places_.reserve(prompts_max_);
  row_used_.reserve(rows_max_);
  row_prompts_.reserve(rows_max_);
}

void Batch::clear() {
  requests_.clear();
  items_.clear();
  places_.clear();
  row_used_.clear();
  row_prompts_.clear();
  prompt_tokens_ = 0;
}

bool Batch::add(const Request& request) {
  const auto size = static_cast<uint32_t>(request.prompt.size());
  if (requests_.size() == prompts_max_ || size > longest_) return false;
  Place place{0, prompt_tokens_, 0};
  if (packed_) {
    if (prompt_tokens_ + size > tokens_max_) return false;
  } else {
    const auto row = std::find_if(row_used_.begin(), row_used_.end(),
                                  [&](uint32_t used) { return shares_rows_ && used + size <= row_tokens_; });
    place.row = static_cast<uint32_t>(row - row_used_.begin());
    if (row == row_used_.end()) {
      if (rows() == rows_max_) return false;
      row_used_.push_back(0);
      row_prompts_.push_back(0);
    }
    place.begin = row_used_[place.row];
    place.segment = row_prompts_[place.row]++;
    row_used_[place.row] += size;
  }
  prompt_tokens_ += size;
  requests_.push_back(&request);
  items_.push_back({request.id, size, false});
  places_.push_back(place);
  return true;
}

template <class Write>
uint64_t Batch::each_token(int32_t* out, int32_t padding, Write write) const {
  const uint64_t count = packed_ ? prompt_tokens_ : uint64_t{rows()} * row_tokens_;
  if (!packed_) std::fill_n(out, count, padding);
  for (size_t i = 0; i < requests_.size(); ++i) {
    const std::vector<int32_t>& prompt = requests_[i]->prompt;
    int32_t* at = out + (packed_ ? 0 : uint64_t{places_[i].row} * row_tokens_) + places_[i].begin;
    for (size_t token = 0; token < prompt.size(); ++token) at[token] = write(i, token);
  }
  return count;
}

uint64_t Batch::fill(const Binding& binding, void* out, std::vector<int64_t>& extents) const {
  auto* ints = static_cast<int32_t*>(out);
  auto* longs = static_cast<int64_t*>(out);
  const auto prompts = static_cast<int64_t>(requests_.size());
  const auto each_prompt = [&](auto value) {
    for (size_t i = 0; i < requests_.size(); ++i) ints[i] = value(i);
    extents.assign(1, prompts);
    return static_cast<uint64_t>(prompts);
  };
  const auto length = [&](size_t i) { return static_cast<int32_t>(requests_[i]->prompt.size()); };
  const auto token_extents = [&](uint64_t count) {
    if (packed_) {
      extents.assign(1, static_cast<int64_t>(count));
    } else {
      extents.assign({int64_t{rows()}, int64_t{row_tokens_}});
    }
    return count;
  };
  switch (binding.role) {
    case Role::kTokenIds:
      return token_extents(each_token(ints, 0, [&](size_t i, size_t token) { return requests_[i]->prompt[token]; }));
    case Role::kPositions:
      return token_extents(each_token(ints, 0, [](size_t, size_t token) { return static_cast<int32_t>(token); }));
    case Role::kSegments:
      return token_extents(
          each_token(ints, -1, [&](size_t i, size_t) { return static_cast<int32_t>(places_[i].segment); }));
    case Role::kLastRows:
      return each_prompt([&](size_t i) {
        return static_cast<int32_t>(places_[i].row * row_tokens_ + places_[i].begin) + length(i) - 1;
      });
    case Role::kLastTokenIds:
      return each_prompt([&](size_t i) { return static_cast<int32_t>(places_[i].begin) + length(i); });
    case Role::kRequestTypes:
      return each_prompt([](size_t) { return 0; });
    case Role::kContextLengths:
    case Role::kHostContextLengths:
      return each_prompt(length);
    case Role::kPerfKnobs:
      // Element 0 switches multi-block mode, element 1 FP32 accumulation; -1 leaves the rest to the plugin.
      std::fill_n(longs, 16, int64_t{-1});
      longs[0] = 1;
      longs[1] = 0;
      extents.assign(1, 16);
      return 16;
    case Role::kContextProgress:
      longs[0] = 0;
      extents.assign(1, 1);
      return 1;
    case Role::kAttentionWindows:
      std::fill_n(ints, binding.tensor.extents[0], static_cast<int32_t>(longest_));
      extents.assign(1, binding.tensor.extents[0]);
      return static_cast<uint64_t>(binding.tensor.extents[0]);
    case Role::kSinkTokens:
      ints[0] = 0;
      extents.assign(1, 1);
      return 1;
    case Role::kHidden:
    case Role::kIgnored:
      break;
  }
  return 0;
}

}  // namespace ifab::tensorrt
