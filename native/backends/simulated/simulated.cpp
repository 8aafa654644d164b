// SPDX-License-Identifier: Apache-2.0
#include "simulated.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <span>

#include "formula.h"

namespace ifab::simulated {
namespace {

uint32_t dtype_bytes(int32_t dtype) {
  return dtype == IFAB_DTYPE_FLOAT32 ? 4 : 2;
}

}  // namespace

EngineFacts facts_of(const Config& config) {
  EngineFacts facts;
  facts.vocab_size = config.vocab_size;
  facts.hidden_size = config.hidden_size;
  facts.layers = config.layers;
  facts.slots = config.slots;
  facts.max_sequence_tokens = config.sequence_tokens;
  facts.step_token_budget = config.step_token_budget;
  facts.kv_block_tokens = config.kv_block_tokens;
  facts.kv_pool_blocks = config.kv_pool_blocks;
  facts.payload_bytes = config.payload_values * dtype_bytes(config.payload_dtype);
  facts.payload_dtype = config.payload_values > 0 ? config.payload_dtype : 0;
  facts.scoring = config.scoring;
  facts.samples_max = config.samples_max;
  facts.splits_prompts = config.splits_prompts;
  return facts;
}

SimulatedBackend::SimulatedBackend(const Config& config)
    : config_(config),
      facts_(facts_of(config_)),
      pool_(config_.kv_pool_blocks, config_.kv_block_tokens),
      faults_(config_),
      blocks_a_sequence_(config_.kv_block_tokens == 0 ? 0 : config_.sequence_tokens / config_.kv_block_tokens + 1),
      lives_(config_.slots),
      by_id_(config_.slots),
      prompt_tables_(size_t{config_.slots} * blocks_a_sequence_, kNone),
      sample_tables_(size_t{config_.slots} * blocks_a_sequence_, kNone),
      scores_(config_.scoring ? config_.max_input_tokens : 0),
      slots_left_(config_.slots) {
  free_lives_.reserve(config_.slots);
  free_rows_.reserve(config_.slots);
  prompts_.reserve(config_.slots);
  samples_.reserve(config_.slots);
  for (uint32_t slot = config_.slots; slot > 0; --slot) {
    free_lives_.push_back(slot - 1);
    free_rows_.push_back(slot - 1);
  }
}

// ---- what admission asks ----

Room SimulatedBackend::room() const {
  const uint64_t next = samples_.size() + prompt_pending_;
  return {.slots = slots_left_,
          .blocks = pool_.available(),
          .promised = promised_,
          .step_tokens = static_cast<uint32_t>(std::min<uint64_t>(next, config_.step_token_budget))};
}

SimulatedBackend::Shape SimulatedBackend::shape_of(const Request& request) const {
  if (config_.kv_block_tokens == 0) return {};
  const uint32_t block = config_.kv_block_tokens;
  const auto prompt = static_cast<uint32_t>(request.prompt.size());
  const uint32_t full = prompt / block;
  return {.full = full,
          .each = (prompt + request.max_tokens + block - 1) / block - full,
          .part = prompt % block == 0 ? 0u : 1u};
}

std::span<const int32_t> SimulatedBackend::block_ids(const Request& request, uint32_t index) const {
  return std::span(request.prompt).subspan(size_t{index} * config_.kv_block_tokens, config_.kv_block_tokens);
}

SimulatedBackend::Shared SimulatedBackend::shareable(const Request& request, uint32_t* table) const {
  Shared shared;
  // Log-probabilities of the prompt need all of it computed.
  if (config_.kv_block_tokens == 0 || request.prompt_logprobs) return shared;
  // At least one token is left to compute, so that there is a state to generate from.
  const size_t most = (request.prompt.size() - 1) / config_.kv_block_tokens;
  uint32_t before = BlockPool::kNone;
  while (shared.blocks < most) {
    const uint32_t block = pool_.find(before, request.salt, block_ids(request, shared.blocks));
    if (block == BlockPool::kNone) break;
    shared.next_announced = pool_.announced(block);
    if (shared.next_announced) break;
    if (table != nullptr) table[shared.blocks] = block;
    shared.held += pool_.held(block) ? 1 : 0;
    ++shared.blocks;
    before = block;
  }
  return shared;
}

Need SimulatedBackend::need(const Request& request) const {
  const uint32_t total = shape_of(request).total(request.samples);
  const Shared shared = shareable(request, nullptr);
  return {.slots = request.samples,
          .blocks = total - shared.held,
          .blocks_ever = total,
          .prompt_tokens = static_cast<uint32_t>(request.prompt.size()) - shared.blocks * config_.kv_block_tokens,
          .leader_computes = shared.next_announced};
}

AdmitResult SimulatedBackend::admit(const Request& request) {
  if (request.samples > slots_left_) return {AdmitOutcome::kNoRoom, {}};
  const Faults::Mask faults = faults_.hits(request);
  if (faults_.refuses_room(request.id, faults)) return {AdmitOutcome::kNoRoom, {}};
  const uint32_t index = free_lives_.back();
  const Shape shape = shape_of(request);
  const Shared shared = shareable(request, prompt_table(index));
  const uint32_t unheld = shared.blocks - shared.held;
  if (shape.full - shared.blocks + shape.part + unheld > pool_.available()) return {AdmitOutcome::kNoRoom, {}};

  free_lives_.pop_back();
  Live& live = lives_[index];
  live = {.request = &request, .samples_left = request.samples, .faults = faults};
  live.chain = shared.blocks > 0 ? pool_.chain(prompt_table(index)[shared.blocks - 1]) : chain_start(config_.seed);
  live.position = live.cached = shared.blocks * config_.kv_block_tokens;
  hold_prompt(index, shape, shared.blocks);
  by_id_.insert(request.id, index);
  prompts_.push_back(index);
  slots_left_ -= request.samples;
  promised_ += shape.total(request.samples) - shape.full - shape.part;
  prompt_pending_ += request.prompt.size() - live.position;
  return {AdmitOutcome::kAdmitted, {}};
}

void SimulatedBackend::hold_prompt(uint32_t index, const Shape& shape, uint32_t shared) {
  Live& live = lives_[index];
  uint32_t* table = prompt_table(index);
  // All that is shared first: taking a block may push out one that nobody holds.
  for (uint32_t i = 0; i < shared; ++i) pool_.hold(table[i]);
  bool findable = true;
  live.registered = shared;
  for (uint32_t i = shared; i < shape.full; ++i) {
    table[i] = pool_.take();
    const uint32_t before = i == 0 ? BlockPool::kNone : table[i - 1];
    const std::span<const int32_t> ids = block_ids(*live.request, i);
    // Where another sequence computes the same block, this one keeps its own to itself, and those behind it too.
    findable = findable && pool_.find(before, live.request->salt, ids) == BlockPool::kNone;
    if (!findable) continue;
    pool_.announce(table[i], before, live.request->salt, ids);
    live.registered = i + 1;
  }
  if (shape.part > 0) live.part = pool_.take();
}

// ---- one step ----

StepReport SimulatedBackend::step(StepMode mode, Sink& sink) {
  const auto start = std::chrono::steady_clock::now();
  StepReport report;
  uint64_t context_tokens = 0;
  if (!faults_.stalls(mode)) {
    context_tokens = generate(report, sink);
    compute_prompts(report, sink);
  }
  report.progressed = report.prompt_tokens + report.generated_tokens > 0;
  spend(report, context_tokens, start);
  return report;
}

uint64_t SimulatedBackend::generate(StepReport& report, Sink& sink) {
  uint64_t context_tokens = 0;
  for (size_t at = 0; at < samples_.size();) {
    Sample& sample = samples_[at];
    if (!has_block(sample)) {
      ++at;
      continue;
    }
    context_tokens += lives_[sample.live].request->prompt.size() + sample.generated;
    if (!generate_one(sample, report, sink)) {
      ++at;
      continue;
    }
    const uint32_t live = sample.live;
    drop_sample(sample);
    sample = samples_.back();
    samples_.pop_back();
    if (--lives_[live].samples_left == 0) drop_live(live);
  }
  return context_tokens;
}

bool SimulatedBackend::has_block(Sample& sample) {
  if (config_.kv_block_tokens == 0) return true;
  const size_t prompt = lives_[sample.live].request->prompt.size();
  const size_t needed = (prompt + sample.generated) / config_.kv_block_tokens - prompt / config_.kv_block_tokens + 1;
  if (needed <= sample.blocks) return true;
  const uint32_t block = pool_.take();
  if (block == BlockPool::kNone) return false;
  sample_table(sample.row)[sample.blocks++] = block;
  --promised_;
  return true;
}

bool SimulatedBackend::generate_one(Sample& sample, StepReport& report, Sink& sink) {
  const Live& live = lives_[sample.live];
  const Request& request = *live.request;
  const uint64_t word = token_word(sample.key, sample.generated);
  const int32_t token = token_of(word, config_.vocab_size, config_.end_ids, config_.end_one_in);
  ++sample.generated;
  ++report.generated_tokens;
  const bool stopped = std::binary_search(request.stop_ids.begin(), request.stop_ids.end(), token);
  if (!stopped) {
    const float logprob = logprob_of(word);
    sink.tokens(request.id, sample.number, {&token, 1},
                request.logprobs ? std::span(&logprob, 1) : std::span<const float>());
    if (sample.generated < request.max_tokens) return false;
  }
  const char* payload_failure = sample.number == 0 ? extract_payload(live, sink) : "";
  sink.finished(request.id, sample.number, stopped ? IFAB_FINISH_STOP : IFAB_FINISH_LENGTH, stopped ? token : -1,
                payload_failure);
  return true;
}

void SimulatedBackend::compute_prompts(StepReport& report, Sink& sink) {
  size_t done = 0;
  for (const uint32_t index : prompts_) {
    Live& live = lives_[index];
    const uint32_t budget = config_.step_token_budget - report.generated_tokens - report.prompt_tokens;
    const auto left = static_cast<uint32_t>(live.request->prompt.size() - live.position);
    if (budget == 0 || (!config_.splits_prompts && left > budget)) break;
    if (live.position == live.cached) faults_.computing(live.faults);
    const uint32_t tokens = std::min(left, budget);
    compute_part(index, tokens, sink);
    report.prompt_tokens += tokens;
    prompt_pending_ -= tokens;
    if (tokens < left) break;
    ++done;
  }
  // Those whose prompt is computed are at the front, since parts are computed in order.
  for (size_t i = 0; i < done; ++i) finish_prompt(prompts_[i], sink);
  prompts_.erase(prompts_.begin(), prompts_.begin() + static_cast<ptrdiff_t>(done));
}

void SimulatedBackend::compute_part(uint32_t index, uint32_t tokens, Sink& sink) {
  Live& live = lives_[index];
  const int32_t* ids = live.request->prompt.data();
  const uint32_t block = config_.kv_block_tokens;
  uint64_t chain = live.chain;
  for (uint32_t end = live.position + tokens; live.position < end;) {
    chain = chain_next(chain, ids[live.position]);
    ++live.position;
    if (block > 0 && live.position % block == 0 && live.position / block <= live.registered) {
      pool_.complete(prompt_table(index)[live.position / block - 1], chain);
    }
  }
  live.chain = chain;
  sink.prompt_computed(live.request->id, tokens);
}

void SimulatedBackend::finish_prompt(uint32_t index, Sink& sink) {
  Live& live = lives_[index];
  const Request& request = *live.request;
  if (faults_.find(live.faults, FaultKind::kFailRequest) != nullptr) {
    sink.failed(request.id, {IFAB_INTERNAL, "simulated failure of this request"});
    return drop_live(index);
  }
  if (faults_.find(live.faults, FaultKind::kWrongOrder) != nullptr) {
    const int32_t token = 0;
    sink.tokens(request.id, 0, {&token, 1}, {});
  }
  std::span<const float> scores;
  if (request.prompt_logprobs) {
    scores_[0] = 0;
    uint64_t chain = chain_next(chain_start(config_.seed), request.prompt[0]);
    for (size_t i = 1; i < request.prompt.size(); ++i) {
      chain = chain_next(chain, request.prompt[i]);
      scores_[i] = logprob_of(chain);
    }
    scores = {scores_.data(), request.prompt.size()};
  }
  sink.context_done(request.id, live.cached, live.position - live.cached, scores);
  if (request.max_tokens > 0) return start_samples(index);
  sink.finished(request.id, 0, IFAB_FINISH_COMPLETE, -1, extract_payload(live, sink));
  drop_live(index);
}

void SimulatedBackend::start_samples(uint32_t index) {
  Live& live = lives_[index];
  live.started = true;
  for (uint32_t number = 0; number < live.request->samples; ++number) {
    Sample sample{.live = index, .number = number, .row = free_rows_.back()};
    free_rows_.pop_back();
    sample.key = sample_key(live.chain, live.request->sampling.seed, number);
    if (number == 0 && live.part != kNone) {
      sample_table(sample.row)[sample.blocks++] = live.part;
      live.part = kNone;
    }
    samples_.push_back(sample);
  }
}

const char* SimulatedBackend::extract_payload(const Live& live, Sink& sink) {
  if (config_.payload_values == 0) return "";
  if (faults_.find(live.faults, FaultKind::kPayloadFails) != nullptr) return "simulated failure of the extraction";
  if (uint8_t* out = sink.payload(live.request->id)) {
    write_payload(live.chain, config_.payload_values, config_.payload_dtype, out);
  }
  return "";
}

// ---- ends ----

void SimulatedBackend::cancel(uint64_t request_id) {
  const uint32_t* found = by_id_.find(request_id);
  if (found == nullptr) return;
  const uint32_t index = *found;
  if (lives_[index].started) {
    for (size_t at = samples_.size(); at > 0; --at) {
      Sample& sample = samples_[at - 1];
      if (sample.live != index) continue;
      drop_sample(sample);
      sample = samples_.back();
      samples_.pop_back();
    }
  } else {
    std::erase(prompts_, index);
  }
  drop_live(index);
}

void SimulatedBackend::drop_sample(const Sample& sample) {
  for (uint32_t i = sample.blocks; i > 0; --i) pool_.release(sample_table(sample.row)[i - 1]);
  promised_ -= shape_of(*lives_[sample.live].request).each - sample.blocks;
  free_rows_.push_back(sample.row);
  ++slots_left_;
}

void SimulatedBackend::drop_live(uint32_t index) {
  const Live& live = lives_[index];
  const Shape shape = shape_of(*live.request);
  const uint32_t* table = prompt_table(index);
  if (!live.started) {
    promised_ -= shape.total(live.request->samples) - shape.full - shape.part;
    slots_left_ += live.request->samples;
    if (live.part != kNone) pool_.release(live.part);
  }
  prompt_pending_ -= live.request->prompt.size() - live.position;
  // The last blocks first: what stays resident is then pushed out from its end.
  for (uint32_t i = shape.full; i > 0; --i) {
    if (pool_.announced(table[i - 1]) && i <= live.registered) pool_.retract(table[i - 1]);
    pool_.release(table[i - 1]);
  }
  by_id_.erase(live.request->id);
  free_lives_.push_back(index);
}

// ---- time ----

void SimulatedBackend::spend(StepReport& report, uint64_t context_tokens, std::chrono::steady_clock::time_point start) {
  const StepTime& time = config_.time;
  const uint64_t work_ns = time.step_ns + report.prompt_tokens * time.prompt_token_ns +
                           report.generated_tokens * time.generated_token_ns + context_tokens * time.context_token_ns;
  const uint64_t extra_ns = uint64_t{faults_.take_extra_ms()} * 1'000'000;
  if (time.scale == 0) {
    report.clock_us = (work_ns + extra_ns) / 1000;
    return;
  }
  const auto real = std::chrono::nanoseconds(static_cast<int64_t>(static_cast<double>(work_ns) * time.scale) +
                                             static_cast<int64_t>(extra_ns));
  std::unique_lock lock(interrupt_mutex_);
  interrupts_.wait_until(lock, start + real, [this] { return interrupted_; });
}

void SimulatedBackend::interrupt() noexcept {
  {
    const std::lock_guard lock(interrupt_mutex_);
    interrupted_ = true;
  }
  interrupts_.notify_all();
}

}  // namespace ifab::simulated
