// SPDX-License-Identifier: Apache-2.0
#include "sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "vocabulary_math.h"

namespace ifab::llama {
namespace {

bool has_penalties(const ifab_sampling_t& sampling) {
  return sampling.repetition_penalty != 1.0f || sampling.presence_penalty != 0.0f || sampling.frequency_penalty != 0.0f;
}

// Below this the most probable token has all the weight that a float can tell.
constexpr float kCold = 1e-5f;

bool truncates(const ifab_sampling_t& sampling) {
  return sampling.top_k > 0 || sampling.top_p < 1.0f || sampling.min_p > 0.0f;
}

uint64_t mix(uint64_t x) {
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

}  // namespace

double counter_uniform(uint64_t seed, uint32_t sample, uint32_t position, uint32_t attempt) {
  const uint64_t counter = mix(mix(mix(seed) ^ sample) ^ (uint64_t{position} << 32 | attempt));
  return static_cast<double>(counter >> 11) * 0x1.0p-53;
}

Sampler::Sampler(uint32_t vocab_size)
    : adjusted_(vocab_size), weights_(vocab_size), ids_(vocab_size), seen_in_(vocab_size), count_(vocab_size) {
  candidates_.reserve(vocab_size);
}

float Sampler::logprob(std::span<const float> logits, int32_t token) {
  const float top = largest(logits).value;
  const double sum = sum_of_exponentials(logits, top, 1.0f);
  return static_cast<float>(static_cast<double>(logits[static_cast<size_t>(token)] - top) - std::log(sum));
}

Choice Sampler::choose(std::span<const float> logits, const Draw& draw) {
  std::span<const float> row = logits;
  if (has_penalties(*draw.sampling)) {
    std::copy(logits.begin(), logits.end(), adjusted_.begin());
    penalise(draw);
    row = adjusted_;
  }
  Choice choice;
  choice.token = pick(row, draw, 0);
  if (choice.token >= 0 && draw.filter != nullptr && !draw.filter->allows(choice.token)) {
    if (row.data() != adjusted_.data()) std::copy(row.begin(), row.end(), adjusted_.begin());
    draw.filter->mask(adjusted_);
    // A draw of its own: the first one is known to have fallen on a token that is forbidden.
    choice.token = pick(adjusted_, draw, 1);
  }
  if (choice.token >= 0 && draw.logprob) choice.logprob = logprob(logits, choice.token);
  return choice;
}

// Repetition counts tokens of prompt and output once; presence and frequency those of the output.
void Sampler::penalise(const Draw& draw) {
  const ifab_sampling_t& sampling = *draw.sampling;
  if (++pass_ == 0) {
    std::fill(seen_in_.begin(), seen_in_.end(), 0u);
    pass_ = 1;
  }
  const auto first_sight = [&](int32_t token) {
    const auto id = static_cast<size_t>(token);
    if (seen_in_[id] == pass_) return;
    seen_in_[id] = pass_;
    count_[id] = 0;
    float& logit = adjusted_[id];
    logit = logit > 0 ? logit / sampling.repetition_penalty : logit * sampling.repetition_penalty;
  };
  for (const int32_t token : draw.prompt) first_sight(token);
  for (const int32_t token : draw.generated) {
    first_sight(token);
    const auto id = static_cast<size_t>(token);
    if (count_[id]++ == 0) adjusted_[id] -= sampling.presence_penalty;
    adjusted_[id] -= sampling.frequency_penalty;
  }
}

int32_t Sampler::pick(std::span<const float> logits, const Draw& draw, uint32_t attempt) {
  const Largest top = largest(logits);
  const ifab_sampling_t& sampling = *draw.sampling;
  if (top.id < 0 || !std::isfinite(top.value)) return -1;
  if (sampling.temperature < kCold || sampling.top_k == 1) return top.id;
  const double uniform =
      counter_uniform(sampling.seed, draw.sample, static_cast<uint32_t>(draw.generated.size()), attempt);
  return truncates(sampling) ? pick_from_best(logits, sampling, top.value, uniform)
                             : pick_from_all(logits, top.value, 1.0f / sampling.temperature, uniform);
}

int32_t Sampler::pick_from_all(std::span<const float> logits, float top, float scale, double uniform) {
  double left = uniform * exponentials(logits, top, scale, weights_);
  int32_t last = -1;
  for (size_t id = 0; id < weights_.size(); ++id) {
    if (weights_[id] <= 0.0f) continue;
    last = static_cast<int32_t>(id);
    left -= static_cast<double>(weights_[id]);
    if (left < 0) break;
  }
  return last;
}

// Fills candidates_ with every token whose logit, times the scale, is within `window` of the top, the most probable
// first, equal ones by id. False where tokens outside the window are left that have any weight.
bool Sampler::gather(std::span<const float> logits, float top, float scale, float window) {
  const float threshold = top - window / scale;
  const size_t count = at_least(logits, threshold, ids_.data());
  candidates_.clear();
  for (size_t i = 0; i < count; ++i) {
    const int32_t id = ids_[i];
    candidates_.push_back({id, std::exp((logits[static_cast<size_t>(id)] - top) * scale)});
  }
  std::sort(candidates_.begin(), candidates_.end(), [](const Candidate& a, const Candidate& b) {
    return a.weight != b.weight ? a.weight > b.weight : a.id < b.id;
  });
  return window >= 87.0f;
}

int32_t Sampler::pick_from_best(std::span<const float> logits, const ifab_sampling_t& sampling, float top,
                                double uniform) {
  const float scale = 1.0f / sampling.temperature;
  const size_t most = sampling.top_k > 0 ? static_cast<size_t>(sampling.top_k) : logits.size();
  // min_p bounds the window from the start. Otherwise it widens until it holds all that can be kept: enough tokens for
  // top_k, or enough weight for top_p. Distributions are peaked, so that the first window is nearly always enough.
  const bool bounded = sampling.min_p > 0.0f;
  const float widest = bounded ? std::min(87.0f, -std::log(sampling.min_p)) : 87.0f;
  const double whole = sampling.top_p < 1.0f && sampling.top_k == 0 && !bounded
                           ? sum_of_exponentials(logits, top, scale)
                           : std::numeric_limits<double>::infinity();
  float window = std::min(6.0f, widest);
  for (;;) {
    const bool complete = gather(logits, top, scale, window) || window >= widest;
    if (complete || candidates_.size() >= most) break;
    double weight = 0;
    for (const Candidate& candidate : candidates_) weight += static_cast<double>(candidate.weight);
    if (weight >= static_cast<double>(sampling.top_p) * whole) break;
    window = std::min(window * 2, widest);
  }
  candidates_.resize(std::min(candidates_.size(), most));

  double kept = 0;
  for (const Candidate& candidate : candidates_) kept += static_cast<double>(candidate.weight);
  const double total = std::isinf(whole) ? kept : whole;
  const double goal =
      sampling.top_p < 1.0f ? static_cast<double>(sampling.top_p) * total : std::numeric_limits<double>::infinity();
  size_t end = 0;
  double nucleus = 0;
  while (end < candidates_.size() && (end == 0 || nucleus < goal)) {
    nucleus += static_cast<double>(candidates_[end++].weight);
  }
  double left = uniform * nucleus;
  for (size_t i = 0; i + 1 < end; ++i) {
    left -= static_cast<double>(candidates_[i].weight);
    if (left < 0) return candidates_[i].id;
  }
  return candidates_[end - 1].id;
}

}  // namespace ifab::llama
