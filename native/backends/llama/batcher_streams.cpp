// SPDX-License-Identifier: Apache-2.0
//
// Steps of an engine whose sequences each have a stream of their own.
//
// For the same tokens in any company, a row must meet the same kernels in any company. Attention takes three paths: one
// for 64 or more rows of a stream, one for fewer, and one for a single row alone over more than 256 cells. So a prompt
// is computed by itself, in whole blocks and then the rest; and a sequence that generates alone beyond 256 cells is
// given a second row, whose result nobody reads.
#include <algorithm>

#include "batcher.h"

namespace ifab::llama {
namespace {

constexpr int32_t kFillerToken = 0;

}  // namespace

void Batcher::step_streams(StepMode mode, StepReport& report, Sink& sink) {
  if (mode == StepMode::kNormal || jobs_.generating() == 0) {
    // A row for everybody who generates, or may begin to in this step, and one for company.
    const uint32_t taken = config_.slots - jobs_.free_slots();
    const uint32_t rows = std::max(taken, static_cast<uint32_t>(jobs_.last_generating() + 1));
    uint32_t left = config_.step_token_budget - std::max(rows, config_.reproducible ? 2u : 0u);
    while (const uint32_t tokens = fill_prompt_batch(left)) {
      if (!decode(StepProfile::Kind::kPrompt, report)) return;
      for (const Part& part : parts_) part_computed(part, report, sink);
      left -= tokens;
    }
  }
  if (jobs_.generating() > 0) generate_streams(report, sink);
}

// Whether a prompt may be computed beside others: nothing is promised of its last bits, and no row but its last one is
// looked at.
bool Batcher::computed_together(const Job& job) const {
  return !config_.reproducible && !job.request->prompt_logprobs && tap_ == nullptr;
}

// How many prompts will begin in a step, as far as is known before it looks for what others hold of them.
uint32_t Batcher::prompts_to_begin(uint32_t tokens_left) const {
  uint32_t prompts = 0;
  for (const Job* job : jobs_.prompts()) {
    if (tokens_left == 0 || (prompts > 0 && !computed_together(*job))) break;
    prompts += job->sequence < 0 ? 1 : 0;
    tokens_left -= std::min(tokens_left, job->to_compute());
  }
  return prompts;
}

// The runtime reads the weights once for sequences of neighbouring ids and equal lengths, so prompts that begin
// together become neighbours, and all that a step computes of prompts goes into one call, in the order of ids.
uint32_t Batcher::fill_prompt_batch(uint32_t tokens_left) {
  session_.clear_batch();
  parts_.clear();
  // Prompts that are computed one by one need no neighbours, and low ids leave the fewest gaps.
  std::span<const int32_t> ids;
  if (!config_.reproducible) ids = jobs_.neighbouring_free_sequences(prompts_to_begin(tokens_left));
  uint32_t added = 0;
  for (Job* job : jobs_.prompts()) {
    const bool together = computed_together(*job);
    if (!parts_.empty() && (!together || parts_.size() == session_.most_outputs())) break;
    if (job->sequence < 0) {
      if (!config_.reproducible && ids.empty()) break;
      begin(*job, config_.reproducible ? jobs_.lowest_free_sequence() : ids.front());
      if (!ids.empty()) ids = ids.subspan(1);
    }
    const uint32_t tokens = next_part(*job, tokens_left - added);
    if (tokens == 0) break;
    parts_.push_back({job, tokens});
    added += tokens;
    if (!together) break;
  }
  std::sort(parts_.begin(), parts_.end(),
            [](const Part& a, const Part& b) { return a.job->sequence < b.job->sequence; });
  for (Part& part : parts_) part = add_part(*part.job, part.tokens);
  if (added > 0) arm_tap(parts_.front());
  return added;
}

// How many tokens of a prompt the next call computes; 0 where the step has too few left.
uint32_t Batcher::next_part(const Job& job, uint32_t tokens_left) const {
  const uint32_t left = job.prompt_left();
  uint32_t most = tokens_left;
  if (job.request->prompt_logprobs) most = std::min(most, kBlockTokens);
  if (!config_.reproducible) return std::min(left, most);
  if (left >= kBlockTokens) return std::min(whole_blocks(left), whole_blocks(most));
  return left <= most ? left : 0;
}

// Generating samples are to have ids without gaps. A gap that a prompt fills, or will at once, is bridged by a filler
// row; copying the last sample into any other gap costs as much as a few such rows.
void Batcher::close_gaps() {
  size_t to_begin = 0;
  for (const Job* job : jobs_.prompts()) to_begin += job->sequence < 0 ? 1 : 0;
  for (;;) {
    const int32_t last = jobs_.last_generating();
    size_t gaps = 0;
    for (int32_t id = 0; id < last; ++id) gaps += jobs_.is_free(id) ? 1 : 0;
    if (gaps <= to_begin) return;
    const int32_t gap = jobs_.lowest_free_sequence();
    Sample& sample = *jobs_.sample_with(last);
    session_.copy(last, gap, session_.length(last));
    session_.drop(last);
    ledger_.rename(last, gap);
    prefixes_.clear(last);
    prefixes_.set(gap, sample.job->request->salt, sample.job->shareable());
    jobs_.move(sample, gap);
  }
}

void Batcher::add_filler(int32_t sequence) {
  session_.add_row(sequence, kFillerToken, session_.length(sequence), false);
  rows_.push_back(nullptr);
  fillers_.push_back(sequence);
  if (profile_) profile_->filler();
}

void Batcher::generate_streams(StepReport& report, Sink& sink) {
  close_gaps();
  session_.clear_batch();
  rows_.clear();
  fillers_.clear();
  const int32_t last = jobs_.last_generating();
  for (int32_t id = 0; id <= last; ++id) {
    Sample* sample = jobs_.sample_with(id);
    if (sample == nullptr) {
      add_filler(id);
      continue;
    }
    session_.add_row(id, sample->token, session_.length(id), true);
    rows_.push_back(sample);
  }
  if (config_.reproducible && rows_.size() == 1 && session_.length(last) >= kCacheGranule) add_filler(last + 1);
  const bool done = decode(StepProfile::Kind::kGenerate, report);
  for (const int32_t sequence : fillers_) session_.trim(sequence, ledger_.length(sequence));
  if (!done) return;
  rows_computed(report, sink);
}

}  // namespace ifab::llama
