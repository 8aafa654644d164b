// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "ifab/engine.h"

namespace ifab::llama {

// Which tokens a constrained sample may go on with. Implemented by guide_run.h.
class TokenFilter {
 public:
  virtual ~TokenFilter() = default;
  // Whether this token may come next.
  virtual bool allows(int32_t token) = 0;
  // Sets the logits of all tokens that may not come next to minus infinity.
  virtual void mask(std::span<float> logits) = 0;
};

// What a choice depends on beside the logits: the sample's own past and nothing of the batch.
struct Draw {
  const ifab_sampling_t* sampling = nullptr;
  std::span<const int32_t> prompt;
  std::span<const int32_t> generated;
  uint32_t sample = 0;            // number of the sample among those of its request
  TokenFilter* filter = nullptr;  // null: every token may come
  bool logprob = false;
};

struct Choice {
  int32_t token = -1;  // -1: no token can be chosen, since the filter allows none or no logit is a number
  float logprob = 0;   // of the token under the model's own distribution, before every setting of the sampling
};

// Chooses tokens from logits.
//
// In this order: penalties; filter; temperature; min_p; top_k; top_p over what top_k left; the draw. Greedy is the
// largest logit, ties to the lowest id. Random numbers come from a counter, (seed, sample, position), so that a choice
// is the same in whatever batch the sample runs. With a filter, the choice is made first and checked then; only a
// choice that is rejected costs a pass over the vocabulary.
//
// One thread; allocates nothing after construction.
class Sampler {
 public:
  explicit Sampler(uint32_t vocab_size);

  Choice choose(std::span<const float> logits, const Draw& draw);

  // Log-probability of one token under the logits.
  static float logprob(std::span<const float> logits, int32_t token);

 private:
  struct Candidate {
    int32_t id;
    float weight;
  };

  int32_t pick(std::span<const float> logits, const Draw& draw, uint32_t attempt);
  int32_t pick_from_all(std::span<const float> logits, float top, float scale, double uniform);
  int32_t pick_from_best(std::span<const float> logits, const ifab_sampling_t& sampling, float top, double uniform);
  bool gather(std::span<const float> logits, float top, float scale, float window);
  void penalise(const Draw& draw);

  std::vector<float> adjusted_;  // logits after penalties and filter
  std::vector<float> weights_;
  std::vector<int32_t> ids_;
  std::vector<Candidate> candidates_;
  std::vector<uint32_t> seen_in_;  // per token: the pass that saw it last
  std::vector<uint32_t> count_;    // per token: times that it was generated, valid in that pass
  uint32_t pass_ = 0;
};

// A number in [0, 1) for one draw: equal arguments give equal numbers, on every machine.
double counter_uniform(uint64_t seed, uint32_t sample, uint32_t position, uint32_t attempt);

}  // namespace ifab::llama
