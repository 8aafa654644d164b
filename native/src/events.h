// SPDX-License-Identifier: Apache-2.0
//
// Events on their way from the owner thread to the one that polls.
//
// Every buffer is allocated at load, from what the engine's limits say that one step can publish. The owner stages
// events during a step and commits them at its end; a poll copies what is committed into the caller's buffers. The
// lock is held to exchange positions, never to copy. When there is no room for another step the owner takes none:
// nothing is dropped, and a caller that never polls costs the memory that was there from the start.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <span>
#include <string_view>

#include "doorbell.h"
#include "ifab/engine.h"
#include "payload_ring.h"
#include "ring.h"
#include "status.h"

namespace ifab {

// Longest text of one event, in bytes; longer ones are cut between characters.
inline constexpr uint32_t kEventTextBytes = 512;

// What one step can publish, and the smallest buffers of a poll that can hold any one event.
struct EventLimits {
  uint32_t step_tokens = 0;        // generated tokens
  uint32_t step_token_events = 0;  // events that carry them
  uint32_t step_others = 0;        // events of other kinds, each of which may have a text
  uint32_t event_tokens = 0;       // longest run of generated tokens in one event
  uint32_t prompt_scores = 0;      // longest run of prompt log-probabilities; 0 where the engine gives none
  uint32_t payload_bytes = 0;

  uint32_t poll_tokens() const { return event_tokens > prompt_scores ? event_tokens : prompt_scores; }
};

class EventStore {
 public:
  // `payloads` and `owner` outlive the store; `owner` is rung when a poll has made the room it waits for.
  EventStore(const EventLimits& limits, PayloadRing& payloads, Doorbell& owner);

  // ---- owner thread ----

  // Whether everything that one more step can publish fits. Called before each step.
  bool room_for_step();
  // Whether `events` events with a text each fit.
  bool room_for(uint32_t events);
  // Prompt log-probabilities are kept apart, since a single prompt may have thousands: their room is reserved when the
  // request is admitted, and either used by its CONTEXT_DONE or given back.
  uint64_t scores_available();
  void reserve_scores(uint32_t count) { scores_reserved_ += count; }
  void give_back_scores(uint32_t count) { scores_reserved_ -= count; }

  // Stages one event. False where it does not fit, which a backend that keeps to its step budget never sees; tokens
  // beyond the budget are refused before they take the room that ends of samples need.
  bool push_tokens(uint64_t request_id, uint32_t sample, std::span<const int32_t> tokens,
                   std::span<const float> logprobs);
  // `event` is complete but for offsets and sizes of text, scores and payload. `payload_slot` goes with the event.
  // Scores must have been reserved. False where it does not fit.
  bool push(const ifab_event_t& event, std::span<const float> scores, std::string_view text,
            uint32_t payload_slot = PayloadRing::kNone);
  // Makes staged events visible to poll().
  void commit();

  // ---- polling thread ----

  // See ifab_engine_poll(); the buffers have been checked. Returns the number of events written.
  uint32_t poll(const ifab_poll_buffers_t& buffers, Clock::time_point deadline);

  // ---- any thread ----

  // See ifab_engine_wake().
  void wake();
  // Events committed and not polled.
  uint64_t pending() const;

 private:
  struct Stored {
    ifab_event_t event{};
    uint32_t payload_slot = PayloadRing::kNone;
  };
  struct Positions {
    uint64_t events = 0;
    uint64_t tokens = 0;  // of tokens and, beside them, their log-probabilities
    uint64_t scores = 0;
    uint64_t text = 0;
  };

  void see_consumed();
  // Whether so much more can be staged, beside what was consumed when that was last looked at.
  bool fits(const Positions& more) const;
  // As fits(), and looks again; where there is no room, the poll that makes it, and half of the store free, rings the
  // owner, and none before it.
  bool room_for(const Positions& more);
  // The positions that staging may reach once so much is consumed. Scores have a room of their own.
  Positions end_of_room(const Positions& consumed) const;
  // Copies one event out; false where it does not fit behind what `used` counts.
  bool copy(const Stored& stored, const ifab_poll_buffers_t& buffers, uint32_t index, Positions& used,
            uint64_t& payload_used);

  const EventLimits limits_;
  PayloadRing& payloads_;
  Doorbell& owner_;
  Ring<Stored> events_;
  Ring<int32_t> tokens_;
  Ring<float> logprobs_;
  Ring<float> scores_;
  Ring<char> text_;

  // Owner thread only.
  Positions staged_;
  Positions seen_consumed_;
  uint64_t scores_reserved_ = 0;
  uint32_t step_tokens_left_ = 0;
  uint32_t step_token_events_left_ = 0;
  // Polling thread only.
  Positions reading_;

  mutable std::mutex mutex_;
  std::condition_variable polled_;
  Positions committed_;
  Positions consumed_;
  Positions awaited_;  // up to where the owner wants to be able to stage; zeros: any room will do
  bool waiting_ = false;
  bool woken_ = false;
};

}  // namespace ifab
