// SPDX-License-Identifier: Apache-2.0
#include "client.h"

#include <algorithm>
#include <array>
#include <stdexcept>
#include <thread>

namespace ifab::test {
namespace {
constexpr size_t kAlignment = 64;
}  // namespace

ifab_request_t Ask::request() const {
  ifab_request_t request{};
  request.id = id;
  request.token_ids = prompt.data();
  request.token_count = static_cast<uint32_t>(prompt.size());
  request.stop_ids = stop_ids.empty() ? nullptr : stop_ids.data();
  request.stop_count = static_cast<uint32_t>(stop_ids.size());
  request.head_ends = head_ends.empty() ? nullptr : head_ends.data();
  request.head_count = static_cast<uint32_t>(head_ends.size());
  request.salt = salt;
  request.sampling.top_p = 1;
  request.sampling.repetition_penalty = 1;
  request.sampling.seed = seed;
  request.max_tokens = max_tokens;
  request.samples = samples;
  request.flags = flags;
  request.priority = priority;
  return request;
}

std::vector<int32_t> prompt_of(size_t size, uint64_t salt) {
  std::vector<int32_t> prompt(size);
  uint64_t state = salt * 2 + 1;
  for (int32_t& id : prompt) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    id = static_cast<int32_t>(state >> 56);
  }
  return prompt;
}

bool Outcome::ended() const {
  return failures > 0 || std::all_of(samples.begin(), samples.end(), [](const Sample& it) { return it.ends > 0; });
}

Client::Client(const SimulatedEngine& simulated)
    : events_(256), tokens_(8192), logprobs_(8192), payload_((1 << 20) + kAlignment), text_(1 << 16) {
  write_simulated_directory(directory_.path(), simulated);
  std::array<char, 4096> err{};
  if (ifab_engine_create(directory_.path().c_str(), &engine_, err.data(), err.size()) != IFAB_OK) {
    throw std::runtime_error(err.data());
  }
  payload_start_ = (kAlignment - reinterpret_cast<uintptr_t>(payload_.data()) % kAlignment) % kAlignment;
}

Client::~Client() {
  ifab_engine_destroy(&engine_);
}

std::vector<Verdict> Client::submit(const std::vector<Ask>& asks) {
  std::vector<ifab_request_t> requests;
  for (const Ask& ask : asks) requests.push_back(ask.request());
  std::vector<ifab_submit_result_t> results(asks.size());
  std::vector<char> text(asks.size() * 512);
  const ifab_status_t status = ifab_engine_submit(engine_, requests.data(), static_cast<uint32_t>(requests.size()),
                                                  results.data(), text.data(), static_cast<uint32_t>(text.size()));
  if (status != IFAB_OK) throw std::runtime_error("submit answered " + std::to_string(status));
  std::vector<Verdict> verdicts;
  for (size_t i = 0; i < asks.size(); ++i) {
    verdicts.push_back({results[i].status, std::string(text.data() + results[i].text_offset, results[i].text_size)});
    if (results[i].status != IFAB_OK) continue;
    outcomes_[asks[i].id] = Outcome{};
    outcomes_[asks[i].id].samples.resize(asks[i].samples);
    ++left_;
  }
  return verdicts;
}

uint32_t Client::cancel(std::vector<uint64_t> ids) {
  uint32_t count = 0;
  if (ifab_engine_cancel(engine_, ids.data(), static_cast<uint32_t>(ids.size()), &count) != IFAB_OK) {
    throw std::runtime_error("cancel failed");
  }
  return count;
}

ifab_stats_t Client::stats() {
  ifab_stats_t stats{};
  stats.struct_size = sizeof stats;
  if (ifab_engine_stats(engine_, &stats) != IFAB_OK) throw std::runtime_error("stats failed");
  return stats;
}

std::string Client::describe() {
  size_t size = 0;
  if (ifab_engine_describe(engine_, nullptr, 0, &size, nullptr, 0) == IFAB_OUT_OF_RANGE) {
    std::string text(size, '\0');
    if (ifab_engine_describe(engine_, text.data(), size, &size, nullptr, 0) == IFAB_OK) return text;
  }
  throw std::runtime_error("describe failed");
}

uint32_t Client::poll(int32_t timeout_ms) {
  ifab_poll_buffers_t buffers{};
  buffers.struct_size = sizeof buffers;
  buffers.events = events_.data();
  buffers.tokens = tokens_.data();
  buffers.logprobs = logprobs_.data();
  buffers.payload = payload_.data() + payload_start_;
  buffers.text = text_.data();
  buffers.events_cap = static_cast<uint32_t>(events_.size());
  buffers.tokens_cap = static_cast<uint32_t>(tokens_.size());
  buffers.payload_cap = static_cast<uint32_t>(payload_.size() - kAlignment);
  buffers.text_cap = static_cast<uint32_t>(text_.size());
  std::array<char, 512> err{};
  uint32_t count = 0;
  if (ifab_engine_poll(engine_, &buffers, &count, timeout_ms, err.data(), err.size()) != IFAB_OK) {
    throw std::runtime_error(err.data());
  }
  for (uint32_t i = 0; i < count; ++i) take(events_[i]);
  return count;
}

bool Client::drain() {
  const auto deadline = std::chrono::steady_clock::now() + kDeadline;
  while (left_ > 0) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    poll(100);
  }
  return true;
}

void Client::pause() {
  std::this_thread::sleep_for(std::chrono::microseconds(200));
}

void Client::broken(const ifab_event_t& event, const char* what) {
  violations_.push_back("request " + std::to_string(event.request_id) + ": " + what);
}

void Client::take(const ifab_event_t& event) {
  const auto found = outcomes_.find(event.request_id);
  if (found == outcomes_.end()) return broken(event, "an event of a request that was not accepted");
  Outcome& outcome = found->second;
  if (outcome.ended()) return broken(event, "an event after the end");
  if (event.kind == IFAB_EVENT_CONTEXT_DONE) {
    if (++outcome.contexts_done > 1) broken(event, "the context done twice");
    outcome.prompt_logprobs.assign(logprobs_.begin() + event.token_offset,
                                   logprobs_.begin() + event.token_offset + event.token_count);
    context_order_.push_back(event.request_id);
  }
  if (event.kind != IFAB_EVENT_TOKENS) {
    outcome.prompt_tokens = event.prompt_tokens;
    outcome.cached_tokens = event.cached_tokens;
    outcome.computed_tokens = event.computed_tokens;
  }
  if (event.kind == IFAB_EVENT_FAILED) {
    ++outcome.failures;
    outcome.status = event.status;
    outcome.text.assign(text_.data() + event.text_offset, event.text_size);
    --left_;
    return;
  }
  if (event.kind == IFAB_EVENT_CONTEXT_DONE) return;
  if (event.sample >= outcome.samples.size()) return broken(event, "a sample that was not asked for");
  Outcome::Sample& sample = outcome.samples[event.sample];
  if (sample.ends > 0) return broken(event, "an event of a sample that has ended");
  if (event.kind == IFAB_EVENT_TOKENS) {
    if (outcome.contexts_done == 0) broken(event, "tokens before the context was done");
    const auto begin = event.token_offset;
    sample.tokens.insert(sample.tokens.end(), tokens_.begin() + begin, tokens_.begin() + begin + event.token_count);
    if (event.has_logprobs != 0) {
      sample.logprobs.insert(sample.logprobs.end(), logprobs_.begin() + begin,
                             logprobs_.begin() + begin + event.token_count);
    }
    return;
  }
  ++sample.ends;
  sample.reason = event.reason;
  sample.stop_id = event.stop_id;
  sample.generated = event.generated_tokens;
  if (event.payload_size > 0) {
    ++outcome.payloads;
    const uint8_t* start = payload_.data() + payload_start_ + event.payload_offset;
    outcome.payload.assign(start, start + event.payload_size);
  }
  if (event.payload_missing != 0) {
    ++outcome.payloads_missing;
    outcome.text.assign(text_.data() + event.text_offset, event.text_size);
  }
  if (outcome.ended()) --left_;
}

}  // namespace ifab::test
