// SPDX-License-Identifier: Apache-2.0
#include "events.h"

#include <algorithm>

#include "crc32.h"
#include "text.h"

namespace ifab {
namespace {

// Steps' worth of events that may wait for the reader before steps are held back.
constexpr size_t kStepsAhead = 4;
constexpr size_t kScoresAhead = 4;
constexpr uint64_t kPayloadAlignment = 64;

uint64_t aligned(uint64_t offset) {
  return (offset + kPayloadAlignment - 1) / kPayloadAlignment * kPayloadAlignment;
}

}  // namespace

EventStore::EventStore(const EventLimits& limits, PayloadRing& payloads, Doorbell& owner)
    : limits_(limits),
      payloads_(payloads),
      owner_(owner),
      events_(kStepsAhead * (size_t{limits.step_token_events} + limits.step_others)),
      tokens_(kStepsAhead * limits.step_tokens),
      logprobs_(tokens_.capacity()),
      scores_(kScoresAhead * limits.prompt_scores),
      text_(2 * size_t{limits.step_others} * kEventTextBytes) {}

void EventStore::see_consumed() {
  const std::lock_guard lock(mutex_);
  seen_consumed_ = consumed_;
}

bool EventStore::fits(const Positions& more) const {
  const Positions end = end_of_room(seen_consumed_);
  return staged_.events + more.events <= end.events && staged_.tokens + more.tokens <= end.tokens &&
         staged_.text + more.text <= end.text;
}

EventStore::Positions EventStore::end_of_room(const Positions& consumed) const {
  return {.events = consumed.events + events_.capacity(),
          .tokens = consumed.tokens + tokens_.capacity(),
          .text = consumed.text + text_.capacity()};
}

bool EventStore::room_for(const Positions& more) {
  if (fits(more)) return true;
  const std::lock_guard lock(mutex_);
  seen_consumed_ = consumed_;
  const bool room = fits(more);
  // Under the same lock as consumed_, so that a poll that makes the room either is seen here or sees this. Half of the
  // store at least: who woke for every step's room would cost a reader that lags a wake in each of its polls.
  awaited_ = {};
  if (!room) {
    awaited_.events = staged_.events + std::max<uint64_t>(more.events, events_.capacity() / 2);
    awaited_.tokens = staged_.tokens + std::max<uint64_t>(more.tokens, tokens_.capacity() / 2);
    awaited_.text = staged_.text + std::max<uint64_t>(more.text, text_.capacity() / 2);
  }
  return room;
}

bool EventStore::room_for_step() {
  step_tokens_left_ = limits_.step_tokens;
  step_token_events_left_ = limits_.step_token_events;
  return room_for({.events = uint64_t{limits_.step_token_events} + limits_.step_others,
                   .tokens = limits_.step_tokens,
                   .text = uint64_t{limits_.step_others} * kEventTextBytes});
}

bool EventStore::room_for(uint32_t events) {
  return room_for(Positions{.events = events, .text = uint64_t{events} * kEventTextBytes});
}

uint64_t EventStore::scores_available() {
  see_consumed();
  if (limits_.prompt_scores == 0) return 0;
  return scores_.capacity() - (staged_.scores - seen_consumed_.scores) - scores_reserved_;
}

bool EventStore::push_tokens(uint64_t request_id, uint32_t sample, std::span<const int32_t> tokens,
                             std::span<const float> logprobs) {
  if (tokens.size() > limits_.event_tokens || tokens.size() > step_tokens_left_ || step_token_events_left_ == 0) {
    return false;
  }
  --step_token_events_left_;
  step_tokens_left_ -= static_cast<uint32_t>(tokens.size());
  Stored& stored = events_.at(staged_.events);
  stored = {};
  stored.event.request_id = request_id;
  stored.event.kind = IFAB_EVENT_TOKENS;
  stored.event.sample = sample;
  stored.event.token_count = static_cast<uint32_t>(tokens.size());
  stored.event.has_logprobs = logprobs.empty() ? 0 : 1;
  tokens_.write(staged_.tokens, tokens);
  logprobs_.write(staged_.tokens, logprobs);
  staged_.tokens += tokens.size();
  ++staged_.events;
  return true;
}

bool EventStore::push(const ifab_event_t& event, std::span<const float> scores, std::string_view text,
                      uint32_t payload_slot) {
  text = cut_text(text, kEventTextBytes);
  if (!fits({.events = 1, .text = text.size()})) return false;
  Stored& stored = events_.at(staged_.events);
  stored = {event, payload_slot};
  stored.event.text_size = static_cast<uint32_t>(text.size());
  if (!scores.empty()) {
    stored.event.token_count = static_cast<uint32_t>(scores.size());
    stored.event.has_logprobs = 1;
    scores_.write(staged_.scores, scores);
    staged_.scores += scores.size();
    scores_reserved_ -= scores.size();
  }
  text_.write(staged_.text, text);
  staged_.text += text.size();
  ++staged_.events;
  return true;
}

void EventStore::commit() {
  bool notify = false;
  {
    const std::lock_guard lock(mutex_);
    notify = waiting_ && committed_.events != staged_.events;
    committed_ = staged_;
    seen_consumed_ = consumed_;
  }
  if (notify) polled_.notify_one();
}

void EventStore::wake() {
  {
    const std::lock_guard lock(mutex_);
    woken_ = true;
  }
  polled_.notify_one();
}

uint64_t EventStore::pending() const {
  const std::lock_guard lock(mutex_);
  return committed_.events - consumed_.events;
}

uint32_t EventStore::poll(const ifab_poll_buffers_t& buffers, Clock::time_point deadline) {
  uint64_t end = 0;
  {
    std::unique_lock lock(mutex_);
    if (committed_.events == consumed_.events) {
      // A wait for a time that has passed still goes through the kernel's timers, which takes it tens of microseconds.
      if (!woken_ && deadline > Clock::now()) {
        waiting_ = true;
        polled_.wait_until(lock, deadline, [this] { return committed_.events != consumed_.events || woken_; });
        waiting_ = false;
      }
      woken_ = false;
    }
    end = committed_.events;
  }
  uint32_t count = 0;
  uint64_t payload_used = 0;
  Positions used;
  while (reading_.events != end && count < buffers.events_cap &&
         copy(events_.at(reading_.events), buffers, count, used, payload_used)) {
    ++reading_.events;
    ++count;
  }
  if (count == 0) return 0;
  bool enough = false;
  {
    const std::lock_guard lock(mutex_);
    consumed_ = reading_;
    const Positions room = end_of_room(consumed_);
    enough = awaited_.events <= room.events && awaited_.tokens <= room.tokens && awaited_.text <= room.text;
  }
  if (enough) owner_.ring();
  return count;
}

bool EventStore::copy(const Stored& stored, const ifab_poll_buffers_t& buffers, uint32_t index, Positions& used,
                      uint64_t& payload_used) {
  const ifab_event_t& from = stored.event;
  const bool has_payload = stored.payload_slot != PayloadRing::kNone;
  const uint64_t payload_at = aligned(payload_used);
  // Tokens and prompt log-probabilities share the caller's arena, so that one offset serves both.
  if (used.tokens + from.token_count > buffers.tokens_cap || used.text + from.text_size > buffers.text_cap ||
      (has_payload && payload_at + payloads_.payload_bytes() > buffers.payload_cap)) {
    return false;
  }
  ifab_event_t& event = buffers.events[index];
  event = from;
  if (event.token_count > 0) {
    event.token_offset = static_cast<uint32_t>(used.tokens);
    if (event.kind == IFAB_EVENT_TOKENS) {
      tokens_.read(reading_.tokens, event.token_count, buffers.tokens + used.tokens);
      if (event.has_logprobs != 0) {
        logprobs_.read(reading_.tokens, event.token_count, buffers.logprobs + used.tokens);
      }
      reading_.tokens += event.token_count;
    } else {
      scores_.read(reading_.scores, event.token_count, buffers.logprobs + used.tokens);
      reading_.scores += event.token_count;
    }
    used.tokens += event.token_count;
  }
  if (event.text_size > 0) {
    event.text_offset = static_cast<uint32_t>(used.text);
    text_.read(reading_.text, event.text_size, buffers.text + used.text);
    reading_.text += event.text_size;
    used.text += event.text_size;
  }
  if (has_payload) {
    event.payload_offset = static_cast<uint32_t>(payload_at);
    event.payload_size = payloads_.payload_bytes();
    uint8_t* out = buffers.payload + payload_at;
    std::copy_n(payloads_.data(stored.payload_slot), event.payload_size, out);
    event.payload_crc32 = crc32(out, event.payload_size);
    payload_used = payload_at + event.payload_size;
    payloads_.release(stored.payload_slot);
  }
  return true;
}

}  // namespace ifab
