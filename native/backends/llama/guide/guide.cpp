// SPDX-License-Identifier: Apache-2.0
#include "guide.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "gbnf.h"
#include "json_schema.h"
#include "regex.h"

namespace ifab::guide {
namespace {

std::shared_ptr<const Grammar> read(int32_t kind, std::string_view text) {
  switch (kind) {
    case IFAB_GUIDE_JSON_SCHEMA:
      return read_json_schema(text);
    case IFAB_GUIDE_REGEX:
      return read_regex(text);
    default:
      return read_gbnf(text);
  }
}

// Moves the entry that `fits` to the front and returns it; null where there is none.
template <class List, class Fits>
typename List::value_type find_used(List& list, Fits fits) {
  const auto found = std::find_if(list.begin(), list.end(), fits);
  if (found == list.end()) return nullptr;
  list.splice(list.begin(), list, found);
  return list.front();
}

}  // namespace

Status Compiler::compile(int32_t kind, std::string_view text, std::shared_ptr<const CompiledGuide>& out) {
  {
    const std::lock_guard lock(mutex_);
    out = find_used(last_, [&](const auto& compiled) { return compiled->kind == kind && compiled->text == text; });
    if (out != nullptr) return {};
  }
  auto compiled = std::make_shared<Compiled>();
  compiled->kind = kind;
  compiled->text = text;
  try {
    compiled->grammar = read(kind, text);
    if (Automaton(compiled->grammar).start() == Automaton::kTooLarge) throw GuideError("the guide is too ambiguous");
  } catch (const GuideError& error) {
    return {error.code(), std::string("guide: ") + error.what()};
  }
  out = compiled;
  const std::lock_guard lock(mutex_);
  last_.push_front(std::move(compiled));
  if (last_.size() > kRemembered) last_.pop_back();
  return {};
}

Guidance::Guidance(std::shared_ptr<const Compiled> compiled, const TokenBytes& tokens)
    : compiled_(std::move(compiled)), tokens_(tokens), automaton_(compiled_->grammar) {}

std::span<const uint64_t> Guidance::allowed(Automaton::State state) {
  if (masks_.size() == kMostMasks && !masks_.contains(state)) masks_.clear();
  const auto [known, added] = masks_.try_emplace(state);
  if (added) {
    known->second.resize((tokens_.vocab_size() + 63) / 64);
    if (!tokens_.mark_allowed(automaton_, state, known->second)) known->second.clear();
  }
  return known->second;
}

std::shared_ptr<Guidance> GuidanceCache::get(const std::shared_ptr<const CompiledGuide>& compiled) {
  const auto wanted = std::static_pointer_cast<const Compiled>(compiled);
  std::shared_ptr<Guidance> known = find_used(last_, [&](const auto& guidance) {
    return &guidance->compiled() == wanted.get() ||
           (guidance->compiled().kind == wanted->kind && guidance->compiled().text == wanted->text);
  });
  if (known != nullptr && !known->worn_out()) return known;
  if (known != nullptr) last_.pop_front();
  last_.push_front(std::make_shared<Guidance>(wanted, tokens_));
  if (last_.size() > kRemembered) last_.pop_back();
  return last_.front();
}

void GuideRun::start(std::shared_ptr<Guidance> guidance, std::span<const int32_t> stop_ids) {
  guidance_ = std::move(guidance);
  stop_ids_ = stop_ids;
  state_ = guidance_->automaton().start();
  too_large_ = false;
}

bool GuideRun::is_stop(int32_t token) const {
  return std::binary_search(stop_ids_.begin(), stop_ids_.end(), token);
}

Automaton::State GuideRun::after(int32_t token) {
  const std::string_view text = guidance_->tokens().bytes(token);
  if (text.empty()) return Automaton::kDead;
  Automaton::State state = state_;
  for (size_t i = 0; i < text.size() && state != Automaton::kDead && state != Automaton::kTooLarge; ++i) {
    state = guidance_->automaton().next(state, static_cast<uint8_t>(text[i]));
  }
  return state;
}

bool GuideRun::allows(int32_t token) {
  if (is_stop(token)) return guidance_->automaton().accepts(state_);
  const Automaton::State state = after(token);
  too_large_ = too_large_ || state == Automaton::kTooLarge;
  return state != Automaton::kDead && state != Automaton::kTooLarge;
}

void GuideRun::mask(std::span<float> logits) {
  constexpr float kForbidden = -std::numeric_limits<float>::infinity();
  const std::span<const uint64_t> allowed = guidance_->allowed(state_);
  if (allowed.empty()) {
    too_large_ = true;
    std::fill(logits.begin(), logits.end(), kForbidden);
    return;
  }
  std::vector<float> stops;
  for (const int32_t stop : stop_ids_) stops.push_back(logits[static_cast<size_t>(stop)]);
  for (size_t id = 0; id < logits.size(); ++id) {
    if ((allowed[id / 64] >> (id % 64) & 1) == 0) logits[id] = kForbidden;
  }
  const bool may_end = guidance_->automaton().accepts(state_);
  for (size_t i = 0; i < stop_ids_.size(); ++i) {
    logits[static_cast<size_t>(stop_ids_[i])] = may_end ? stops[i] : kForbidden;
  }
}

void GuideRun::accept(int32_t token) {
  state_ = after(token);
}

Status GuideRun::dead_end() const {
  if (too_large_) {
    return {IFAB_RESOURCE_EXHAUSTED,
            "guide: too ambiguous for the text that was generated; write it so that a text "
            "can be read in fewer ways"};
  }
  return {IFAB_FAILED_PRECONDITION,
          "guide: no token of the engine's vocabulary can follow the text that was generated"};
}

}  // namespace ifab::guide
