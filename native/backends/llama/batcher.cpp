// SPDX-License-Identifier: Apache-2.0
#include "batcher.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "ifab/engine.h"

namespace ifab::llama {

Batcher::Batcher(const Config& config, Session& session, PayloadTap* tap)
    : config_(config),
      session_(session),
      tap_(tap),
      ledger_(config.sequences()),
      prefixes_(config.sequences()),
      heads_(config, session, ledger_, prefixes_),
      jobs_(config, tap != nullptr ? tap->payload_bytes() : 0),
      chooser_(session.vocab_size(), config.threads, config.slots),
      guidances_(session.token_pieces()),
      profile_(StepProfile::from_environment()) {
  rows_.reserve(config.step_token_budget);
  chosen_.reserve(config.slots);
  parts_.reserve(config.slots);
  generating_.reserve(config.slots);
  fillers_.reserve(config.slots);
}

StepReport Batcher::step(StepMode mode, Sink& sink) {
  StepReport report;
  if (profile_) profile_->step_begins();
  if (config_.streams()) {
    step_streams(mode, report, sink);
  } else {
    step_unified(mode, report, sink);
  }
  if (profile_) profile_->step_ends(jobs_.free_slots() == config_.slots);
  return report;
}

bool Batcher::decode(StepProfile::Kind kind, StepReport& report) {
  if (profile_) profile_->call_begins(kind, session_.rows(), session_.shape());
  const Session::Outcome outcome = session_.decode();
  if (profile_) profile_->call_ends();
  switch (outcome) {
    case Session::Outcome::kDone:
      report.progressed = true;
      return true;
    case Session::Outcome::kNoRoom:
      return false;
    case Session::Outcome::kInterrupted:
      report.engine_failure = {IFAB_CANCELLED, "the engine is being destroyed"};
      return false;
    case Session::Outcome::kFailed:
      break;
  }
  report.engine_failure = {IFAB_INTERNAL, "the runtime failed to compute a step"};
  return false;
}

// ---- Admission

bool Batcher::admit(const Request& request) {
  if (request.samples > jobs_.free_slots()) return false;
  Job& job = jobs_.take(request);
  if (request.compiled_guide != nullptr) {
    const std::shared_ptr<guide::Guidance> guidance = guidances_.get(request.compiled_guide);
    for (Sample* sample : job.samples) sample->guide.start(guidance, request.stop_ids);
  }
  // In a unified cache what it shares is bound now, so that it cannot go before the prompt's turn comes and what was
  // promised stays enough.
  if (config_.streams()) {
    job.foreseen = prefixes_.longest(request.salt, request.prompt, most_shared(request)).tokens;
  } else {
    begin(job, jobs_.lowest_free_sequence());
  }
  waiting_.remove(request);
  return true;
}

void Batcher::cancel(uint64_t request_id) {
  Job* job = jobs_.find(request_id);
  if (job == nullptr) return;
  release_prompt(*job);
  while (job->request != nullptr) release(*job->samples.back());
}

// ---- Prompts

// The last token is always computed, for its logits; a prompt that is scored is computed whole.
uint32_t Batcher::most_shared(const Request& request) const {
  return request.prompt_logprobs ? 0 : whole_blocks(static_cast<uint32_t>(request.prompt.size()) - 1);
}

void Batcher::begin(Job& job, int32_t sequence) {
  const Request& request = *job.request;
  const Prefixes::Match match = prefixes_.longest(request.salt, request.prompt, most_shared(request));
  if (match.tokens > 0) {
    session_.copy(match.sequence, sequence, match.tokens);
    heads_.used(match.sequence);
  }
  if (config_.streams()) {
    ledger_.begin(sequence, -1, 0);
    ledger_.grow(sequence, match.tokens);
  } else {
    ledger_.begin(sequence, match.sequence, match.tokens);
    const uint64_t generated = uint64_t{std::max(request.max_tokens, 1u) - 1} * request.samples;
    job.cells_left = request.prompt.size() - match.tokens + generated;
  }
  jobs_.give_sequence(job, sequence);
  job.done = job.cached = match.tokens;
  prefixes_.set(sequence, request.salt, job.shareable());
}

Batcher::Part Batcher::add_part(Job& job, uint32_t tokens) {
  const Part part{&job, tokens, session_.rows()};
  const bool ends = part.ends_prompt();
  for (uint32_t i = 0; i < tokens; ++i) {
    const uint32_t position = job.done + i;
    const bool output = job.request->prompt_logprobs || (ends && i + 1 == tokens);
    session_.add_row(job.sequence, job.prompt()[position], position, output);
  }
  return part;
}

void Batcher::arm_tap(const Part& part) {
  if (tap_ == nullptr || !part.job->request->want_payload || !part.ends_prompt()) return;
  // Rows before it that ask for output: none but those of its own prompt where that is scored.
  const uint32_t row = part.first_row + part.tokens - 1;
  const uint32_t output_row = session_.outputs() - 1;
  // Another row with output, or a part that is scored, needs its logits.
  const bool logits_wanted = part.job->request->max_tokens > 0 || session_.outputs() > 1;
  tap_->want(row, session_.rows(), output_row, logits_wanted, part.job->payload);
}

void Batcher::part_computed(const Part& part, StepReport& report, Sink& sink) {
  Job& job = *part.job;
  const Request& request = *job.request;
  const bool ends = part.ends_prompt();
  if (request.prompt_logprobs) score(part);
  job.done += part.tokens;
  job.cells_left -= std::min<uint64_t>(job.cells_left, part.tokens);
  ledger_.grow(job.sequence, part.tokens);
  prefixes_.set(job.sequence, request.salt, job.shareable());
  report.prompt_tokens += part.tokens;
  sink.prompt_computed(request.id, part.tokens);
  if (!ends) return;
  if (tap_ != nullptr && request.want_payload) job.payload_failure = tap_->take_failure();
  prompt_computed(job, session_.logits(part.first_row + part.tokens - 1), report, sink);
}

// Row i of the part predicts the token after it. The first token of a prompt is predicted by nothing.
void Batcher::score(const Part& part) {
  Job& job = *part.job;
  if (job.scores.empty()) job.scores.push_back(std::numeric_limits<float>::quiet_NaN());
  for (uint32_t i = 0; i < part.tokens && job.scores.size() < job.prompt().size(); ++i) {
    const int32_t next = job.prompt()[job.scores.size()];
    job.scores.push_back(Sampler::logprob(session_.logits(part.first_row + i), next));
  }
}

void Batcher::prompt_computed(Job& job, std::span<const float> logits, StepReport& report, Sink& sink) {
  const Request& request = *job.request;
  jobs_.prompt_computed(job);
  sink.context_done(request.id, job.cached, job.done - job.cached, job.scores);
  if (request.max_tokens == 0) {
    while (job.request == &request) finish(*job.samples.front(), IFAB_FINISH_COMPLETE, -1, sink);
    return;
  }
  // Every sample gets a sequence before any of them goes on: the first one that of the prompt, the others copies.
  const int32_t prompt_sequence = job.sequence;
  jobs_.take_sequence_from(job);
  for (Sample* sample : job.samples) {
    if (sample->index == 0) {
      jobs_.give_sequence(*sample, prompt_sequence);
      continue;
    }
    const int32_t sequence = jobs_.lowest_free_sequence();
    session_.copy(prompt_sequence, sequence, job.done);
    if (config_.streams()) {
      ledger_.begin(sequence, -1, 0);
      ledger_.grow(sequence, job.done);
    } else {
      ledger_.begin(sequence, prompt_sequence, job.done);
    }
    jobs_.give_sequence(*sample, sequence);
    prefixes_.set(sequence, request.salt, job.shareable());
  }
  // Ending samples leave the list, and the last one takes the job with it.
  std::vector<Sample*>& samples = job.samples;
  for (uint32_t index = 0; index < request.samples && job.request == &request;) {
    const auto sample =
        std::find_if(samples.begin(), samples.end(), [&](const Sample* s) { return s->index == index; });
    ++index;
    if (sample != samples.end()) go_on(**sample, chooser_.choose(logits, draw_of(**sample)), report, sink);
  }
}

// ---- Samples

uint32_t Batcher::sample_tokens_left(const Sample& sample) const {
  return sample.job->request->max_tokens - static_cast<uint32_t>(sample.generated.size());
}

Draw Batcher::draw_of(Sample& sample) const {
  const Request& request = *sample.job->request;
  Draw draw;
  draw.sampling = &request.sampling;
  draw.prompt = request.prompt;
  draw.generated = sample.generated;
  draw.sample = sample.index;
  draw.filter = sample.guide.active() ? &sample.guide : nullptr;
  draw.logprob = request.logprobs;
  return draw;
}

void Batcher::rows_computed(StepReport& report, Sink& sink) {
  chosen_.clear();
  for (uint32_t row = 0; row < rows_.size(); ++row) {
    if (rows_[row] != nullptr) chosen_.push_back({session_.logits(row), draw_of(*rows_[row]), {}});
  }
  chooser_.choose(chosen_);
  auto chosen = chosen_.begin();
  for (Sample* sample : rows_) {
    if (sample == nullptr) continue;
    const Choice choice = (chosen++)->choice;
    if (sample->job == nullptr) continue;  // ended with another sample of its request
    ledger_.grow(sample->sequence, 1);
    sample->job->cells_left -= std::min<uint64_t>(sample->job->cells_left, 1);
    go_on(*sample, choice, report, sink);
  }
}

void Batcher::go_on(Sample& sample, const Choice& choice, StepReport& report, Sink& sink) {
  Job& job = *sample.job;
  const Request& request = *job.request;
  if (choice.token < 0) {
    fail(job,
         sample.guide.active() ? sample.guide.dead_end() : Status(IFAB_INTERNAL, "the engine's logits are not numbers"),
         sink);
    return;
  }
  ++report.generated_tokens;
  if (std::binary_search(request.stop_ids.begin(), request.stop_ids.end(), choice.token)) {
    finish(sample, IFAB_FINISH_STOP, choice.token, sink);
    return;
  }
  sample.token = choice.token;
  sample.generated.push_back(choice.token);
  const std::span<const float> logprobs(&choice.logprob, request.logprobs ? 1 : 0);
  sink.tokens(request.id, sample.index, std::span<const int32_t>(&choice.token, 1), logprobs);
  if (sample.guide.active()) {
    sample.guide.accept(choice.token);
    // Nothing can follow but the end, so that it needs no token to say it.
    if (sample.guide.only_ends()) return finish(sample, IFAB_FINISH_STOP, -1, sink);
  }
  const bool full = request.prompt.size() + sample.generated.size() >= config_.sequence_tokens;
  if (sample_tokens_left(sample) == 0 || full) finish(sample, IFAB_FINISH_LENGTH, -1, sink);
}

void Batcher::finish(Sample& sample, int32_t reason, int32_t stop_id, Sink& sink) {
  Job& job = *sample.job;
  const uint64_t id = job.request->id;
  const uint32_t index = sample.index;
  std::string_view failure;
  if (tap_ != nullptr && index == 0 && job.request->want_payload) {
    failure = job.payload_failure;
    uint8_t* out = failure.empty() ? sink.payload(id) : nullptr;
    if (out != nullptr) std::memcpy(out, job.payload.data(), job.payload.size());
  }
  sink.finished(id, index, reason, stop_id, failure);
  // What it was promised and will not take; its last token needs no cell, and a stop token has none.
  const uint32_t unused = std::max(sample_tokens_left(sample), 1u) - 1;
  job.cells_left -= std::min<uint64_t>(job.cells_left, unused);
  release(sample);
}

void Batcher::fail(Job& job, const Status& status, Sink& sink) {
  sink.failed(job.request->id, status);
  release_prompt(job);
  while (job.request != nullptr) release(*job.samples.back());
}

void Batcher::release(Sample& sample) {
  Job& job = *sample.job;
  const bool last = job.samples.size() == 1;
  if (last) release_prompt(job);
  if (sample.sequence >= 0) {
    const int32_t sequence = sample.sequence;
    jobs_.take_sequence_from(sample);
    release_sequence(job, sequence, last);
  }
  jobs_.end(sample);
}

void Batcher::release_prompt(Job& job) {
  if (job.sequence < 0) return;
  const int32_t sequence = job.sequence;
  jobs_.take_sequence_from(job);
  release_sequence(job, sequence, true);
}

void Batcher::release_sequence(const Job& job, int32_t sequence, bool last) {
  if (last) heads_.consider(sequence, *job.request, job.shareable(), waiting_);
  prefixes_.clear(sequence);
  ledger_.end(sequence);
  session_.drop(sequence);
}

// ---- What admission asks

Room Batcher::room() const {
  Room room;
  room.slots = jobs_.free_slots();
  uint64_t next = jobs_.generating();
  uint64_t promised = 0;
  uint64_t held = 0;
  jobs_.for_each([&](const Job& job) {
    const uint64_t whole = job.request->prompt.size() + job.request->max_tokens;
    promised += config_.streams() ? blocks_for(whole) * job.samples.size() : job.cells_left;
  });
  for (const Job* job : jobs_.prompts()) next += job->to_compute();
  for (int32_t id = 0; id < static_cast<int32_t>(config_.slots); ++id) held += blocks_for(ledger_.length(id));
  if (config_.streams()) {
    // Every slot has the cache of a whole sequence, so a free slot is always enough.
    const uint64_t all = blocks_for(config_.sequence_tokens) * config_.slots;
    room.blocks = all - held;
    room.promised = promised > held ? promised - held : 0;
  } else {
    const uint64_t live = ledger_.cells_of_sequences_below(static_cast<int32_t>(config_.slots));
    room.blocks = (config_.pool_tokens - live) / kBlockTokens;
    room.promised = blocks_for(promised);
  }
  room.step_tokens = static_cast<uint32_t>(std::min<uint64_t>(next, config_.step_token_budget));
  return room;
}

Need Batcher::need(const Request& request) const {
  const auto prompt = static_cast<uint32_t>(request.prompt.size());
  const auto live_end = static_cast<int32_t>(config_.slots);
  const uint32_t most = most_shared(request);
  const uint32_t cached = prefixes_.longest(request.salt, request.prompt, most).tokens;
  Need need;
  need.slots = request.samples;
  need.prompt_tokens = prompt - cached;
  if (config_.streams()) {
    need.blocks_ever = need.blocks = blocks_for(uint64_t{prompt} + request.max_tokens) * request.samples;
  } else {
    const uint64_t generated = uint64_t{std::max(request.max_tokens, 1u) - 1} * request.samples;
    const uint32_t live = prefixes_.longest_below(live_end, request.salt, request.prompt, most).tokens;
    need.blocks_ever = blocks_for(prompt + generated);
    need.blocks = blocks_for(prompt - live + generated);
  }
  for (const Job* job : jobs_.prompts()) {
    if (job->request->salt != request.salt) continue;
    const uint32_t to_come = shared_tokens(job->prompt(), request.prompt, most);
    need.leader_computes = need.leader_computes || to_come > std::max(cached, job->done);
  }
  return need;
}

}  // namespace ifab::llama
