// SPDX-License-Identifier: Apache-2.0
#include "publisher.h"

#include <memory>
#include <string>

#include "log.h"

namespace ifab {

Publisher::Publisher(EventStore& events, PayloadRing& payloads, int32_t payload_dtype, ifab_stats_t& counters)
    : events_(events), payloads_(payloads), payload_dtype_(payload_dtype), counters_(counters) {}

Publisher::~Publisher() {
  release();
  for_each([](Entry& entry) { delete &entry; });
}

void Publisher::add(Entry& entry) {
  entries_.insert(entry.request.id, &entry);
}

Entry* Publisher::find(uint64_t request_id) {
  Entry** entry = entries_.find(request_id);
  return entry == nullptr || (*entry)->ended ? nullptr : *entry;
}

ReaderRoom Publisher::reader_room() {
  return {.payload_slots = payloads_.available(), .prompt_scores = events_.scores_available()};
}

void Publisher::reserve(Entry& entry) {
  if (entry.request.want_payload) entry.payload_slot = payloads_.take();
  if (entry.request.prompt_logprobs) {
    entry.scores_reserved = static_cast<uint32_t>(entry.request.prompt.size());
    events_.reserve_scores(entry.scores_reserved);
  }
}

void Publisher::fail(Entry& entry, const Status& status) {
  ifab_event_t event = event_of(entry, IFAB_EVENT_FAILED);
  event.status = status.code();
  push(event, {}, status.message());
  ++counters_.requests_failed;
  end(entry);
}

void Publisher::cancel(Entry& entry) {
  for (uint32_t sample = 0; sample < entry.samples.size(); ++sample) {
    if (!entry.samples[sample].ended) end_sample(entry, sample, IFAB_FINISH_CANCELLED, -1, {});
  }
  ++counters_.requests_cancelled;
  end(entry);
}

void Publisher::release() {
  while (Entry* entry = ended_.pop()) {
    entries_.erase(entry->request.id);
    const std::unique_ptr<Entry> owned(entry);
  }
}

void Publisher::prompt_computed(uint64_t request_id, uint32_t tokens) {
  if (Entry* entry = inside(request_id)) entry->computed_tokens += tokens;
}

void Publisher::tokens(uint64_t request_id, uint32_t sample, std::span<const int32_t> tokens,
                       std::span<const float> logprobs) {
  Entry* entry = inside(request_id);
  if (entry == nullptr || tokens.empty()) return;
  if (!entry->context_done) return out_of_order(*entry, "tokens before the context was done");
  if (sample >= entry->samples.size()) return out_of_order(*entry, "tokens of a sample that was not asked for");
  Entry::Sample& state = entry->samples[sample];
  if (state.ended) return out_of_order(*entry, "tokens of a sample that has ended");
  if (tokens.size() > entry->request.max_tokens - state.generated) {
    return out_of_order(*entry, "more tokens than max_tokens");
  }
  if (!logprobs.empty() && logprobs.size() != tokens.size()) {
    return out_of_order(*entry, "log-probabilities of another number than tokens");
  }
  if (!events_.push_tokens(request_id, sample, tokens, entry->request.logprobs ? logprobs : std::span<const float>())) {
    return out_of_order(*entry, "more tokens in a step than the step budget allows");
  }
  state.generated += static_cast<uint32_t>(tokens.size());
}

void Publisher::context_done(uint64_t request_id, uint32_t cached_tokens, uint32_t computed_tokens,
                             std::span<const float> prompt_logprobs) {
  Entry* entry = inside(request_id);
  if (entry == nullptr) return;
  if (entry->context_done) return out_of_order(*entry, "the context done twice");
  if (!prompt_logprobs.empty() && prompt_logprobs.size() != entry->scores_reserved) {
    return out_of_order(*entry, "log-probabilities of another number than the prompt's tokens");
  }
  entry->context_done = true;
  entry->cached_tokens = cached_tokens;
  entry->computed_tokens = computed_tokens;
  counters_.prompt_tokens_cached += cached_tokens;
  ++contexts_done_;
  push(event_of(*entry, IFAB_EVENT_CONTEXT_DONE), prompt_logprobs, {});
  if (!prompt_logprobs.empty()) entry->scores_reserved = 0;
}

uint8_t* Publisher::payload(uint64_t request_id) {
  Entry* entry = inside(request_id);
  if (entry == nullptr || entry->payload_slot == PayloadRing::kNone) return nullptr;
  return payloads_.data(entry->payload_slot);
}

void Publisher::finished(uint64_t request_id, uint32_t sample, int32_t reason, int32_t stop_id,
                         std::string_view payload_failure) {
  Entry* entry = inside(request_id);
  if (entry == nullptr) return;
  if (!entry->context_done) return out_of_order(*entry, "an end before the context was done");
  if (sample >= entry->samples.size()) return out_of_order(*entry, "the end of a sample that was not asked for");
  if (entry->samples[sample].ended) return out_of_order(*entry, "the end of a sample twice");
  end_sample(*entry, sample, reason, stop_id, payload_failure);
  if (entry->samples_left > 0) return;
  ++counters_.requests_finished;
  entry->backend_holds = false;
  end(*entry);
}

void Publisher::failed(uint64_t request_id, const Status& status) {
  Entry* entry = inside(request_id);
  if (entry == nullptr) return;
  entry->backend_holds = false;
  fail(*entry, status);
}

Entry* Publisher::inside(uint64_t request_id) {
  Entry* entry = find(request_id);
  return entry == nullptr || !entry->backend_holds ? nullptr : entry;
}

ifab_event_t Publisher::event_of(const Entry& entry, int32_t kind) const {
  ifab_event_t event{};
  event.request_id = entry.request.id;
  event.kind = kind;
  event.prompt_tokens = static_cast<uint32_t>(entry.request.prompt.size());
  event.cached_tokens = entry.cached_tokens;
  event.computed_tokens = entry.computed_tokens;
  return event;
}

void Publisher::end_sample(Entry& entry, uint32_t sample, int32_t reason, int32_t stop_id,
                           std::string_view payload_failure) {
  Entry::Sample& state = entry.samples[sample];
  if (reason == IFAB_FINISH_STOP && stop_id >= 0) ++state.generated;
  ifab_event_t event = event_of(entry, IFAB_EVENT_FINISHED);
  event.sample = sample;
  event.reason = reason;
  event.stop_id = reason == IFAB_FINISH_STOP ? stop_id : -1;
  event.generated_tokens = state.generated;
  uint32_t payload_slot = PayloadRing::kNone;
  // The payload goes with sample 0; one that was cancelled before its end has none, and none is missing.
  if (sample == 0 && reason != IFAB_FINISH_CANCELLED && entry.payload_slot != PayloadRing::kNone) {
    if (payload_failure.empty()) {
      payload_slot = std::exchange(entry.payload_slot, PayloadRing::kNone);
      event.payload_dtype = payload_dtype_;
      counters_.payload_bytes += payloads_.payload_bytes();
    } else {
      event.payload_missing = 1;
      ++counters_.payload_failures;
    }
  }
  push(event, {}, event.payload_missing != 0 ? payload_failure : std::string_view(), payload_slot);
  state.ended = true;
  --entry.samples_left;
}

void Publisher::end(Entry& entry) {
  if (entry.payload_slot != PayloadRing::kNone) payloads_.give_back(entry.payload_slot);
  entry.payload_slot = PayloadRing::kNone;
  events_.give_back_scores(entry.scores_reserved);
  entry.scores_reserved = 0;
  entry.ended = true;
  ended_.push(entry);
}

void Publisher::out_of_order(Entry& entry, const char* what) {
  const std::string message = std::string("the engine broke the order of its events: ") + what;
  log(IFAB_LOG_ERROR, "publisher", "request " + std::to_string(entry.request.id) + ": " + message);
  fail(entry, {IFAB_INTERNAL, message});
}

void Publisher::push(const ifab_event_t& event, std::span<const float> scores, std::string_view text,
                     uint32_t payload_slot) {
  if (!events_.push(event, scores, text, payload_slot)) {
    overflow_ = {IFAB_INTERNAL, "the engine published more in one step than its limits allow"};
  }
}

}  // namespace ifab
