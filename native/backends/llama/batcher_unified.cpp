// SPDX-License-Identifier: Apache-2.0
//
// Steps of an engine whose sequences share one pool of cells.
//
// All rows of a step go into one call. Where the pool has no room for them, which happens when more was admitted than
// it can hold, the step gives way: resident heads go first, then prompts wait, then the samples with the most left to
// generate pause. What is left nobody can compute is a step without progress, and no error.
#include <algorithm>

#include "batcher.h"

namespace ifab::llama {

void Batcher::step_unified(StepMode mode, StepReport& report, Sink& sink) {
  generating_.clear();
  for (int32_t id = 0; id <= jobs_.last_generating(); ++id) {
    if (Sample* sample = jobs_.sample_with(id)) generating_.push_back(sample);
  }
  const bool prompts_go_on = mode == StepMode::kNormal || generating_.empty();
  uint32_t prompt_tokens = prompts_go_on ? config_.step_token_budget - static_cast<uint32_t>(generating_.size()) : 0;
  for (;;) {
    fill_unified_batch(prompt_tokens);
    if (session_.rows() == 0) return;
    if (decode(kind_of_batch(), report)) break;
    if (!report.engine_failure.ok()) return;
    if (heads_.give_up_one(waiting_)) continue;
    if (prompt_tokens > 0) {
      // Smaller parts find room longer, but a pool that is all but full is left to those that generate.
      prompt_tokens = session_.rows() - static_cast<uint32_t>(generating_.size()) > kBlockTokens ? kBlockTokens : 0;
    } else if (generating_.size() > 1) {
      std::stable_sort(generating_.begin(), generating_.end(), [this](const Sample* a, const Sample* b) {
        return sample_tokens_left(*a) < sample_tokens_left(*b);
      });
      generating_.resize(generating_.size() / 2);
    } else {
      return;
    }
  }
  rows_computed(report, sink);
  for (const Part& part : parts_) {
    if (part.job->request != nullptr) part_computed(part, report, sink);
  }
}

StepProfile::Kind Batcher::kind_of_batch() const {
  if (parts_.empty()) return StepProfile::Kind::kGenerate;
  return rows_.empty() ? StepProfile::Kind::kPrompt : StepProfile::Kind::kBoth;
}

void Batcher::fill_unified_batch(uint32_t prompt_tokens) {
  session_.clear_batch();
  if (tap_ != nullptr) tap_->forget();
  rows_.clear();
  parts_.clear();
  for (Sample* sample : generating_) {
    session_.add_row(sample->sequence, sample->token, session_.length(sample->sequence), true);
    rows_.push_back(sample);
  }
  for (Job* job : jobs_.prompts()) {
    const uint32_t outputs_left = session_.most_outputs() - session_.outputs();
    uint32_t tokens = std::min(job->prompt_left(), prompt_tokens);
    if (job->request->prompt_logprobs) tokens = std::min(tokens, outputs_left);
    if (tokens == 0 || outputs_left == 0) break;
    const Part part = add_part(*job, tokens);
    parts_.push_back(part);
    prompt_tokens -= tokens;
    // The tap takes one state a call.
    if (tap_ != nullptr && job->request->want_payload && part.ends_prompt()) {
      arm_tap(part);
      break;
    }
  }
}

}  // namespace ifab::llama
