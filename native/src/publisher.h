// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <utility>

#include "backend.h"
#include "entry.h"
#include "events.h"
#include "id_map.h"
#include "ifab/engine.h"
#include "intake.h"
#include "payload_ring.h"
#include "status.h"

namespace ifab {

// Turns what a backend tells into events, and holds the backend to its word: a request whose events come out of order
// is failed by itself. Knows every request that has not ended. Owner thread only; allocates nothing after construction.
class Publisher final : public Sink {
 public:
  // `counters` receives what is counted by events. All references outlive the publisher.
  Publisher(EventStore& events, PayloadRing& payloads, int32_t payload_dtype, ifab_stats_t& counters);
  ~Publisher() override;

  // Takes an accepted request under its wing; it stays until release().
  void add(Entry& entry);
  // Null where the id is unknown or its request has ended.
  Entry* find(uint64_t request_id);
  uint64_t held() const { return entries_.size(); }

  // Room that only the reader makes, and taking it for a request that enters.
  ReaderRoom reader_room();
  void reserve(Entry& entry);

  // Ends a request with an error, or its remaining samples with CANCELLED. The caller has seen to it that one event a
  // sample fits.
  void fail(Entry& entry, const Status& status);
  void cancel(Entry& entry);

  // Requests that ended since the last release(), oldest first.
  const EntryList& ended() const { return ended_; }
  // Frees them. Their last events may be committed before or after.
  void release();
  // Prompts that became computed since the last call.
  uint32_t take_contexts_done() { return std::exchange(contexts_done_, 0); }
  // Not ok once the backend has published more in a step than its limits allow: events were lost.
  const Status& overflow() const { return overflow_; }

  template <class Visit>
  void for_each(Visit visit) {
    entries_.for_each([&](uint64_t, Entry* entry) { visit(*entry); });
  }

  // ---- Sink ----
  void prompt_computed(uint64_t request_id, uint32_t tokens) override;
  void tokens(uint64_t request_id, uint32_t sample, std::span<const int32_t> tokens,
              std::span<const float> logprobs) override;
  void context_done(uint64_t request_id, uint32_t cached_tokens, uint32_t computed_tokens,
                    std::span<const float> prompt_logprobs) override;
  uint8_t* payload(uint64_t request_id) override;
  void finished(uint64_t request_id, uint32_t sample, int32_t reason, int32_t stop_id,
                std::string_view payload_failure) override;
  void failed(uint64_t request_id, const Status& status) override;

 private:
  // Null where the backend does not hold the request: what it says of one that waits, or has ended, is no event.
  Entry* inside(uint64_t request_id);
  ifab_event_t event_of(const Entry& entry, int32_t kind) const;
  void end_sample(Entry& entry, uint32_t sample, int32_t reason, int32_t stop_id, std::string_view payload_failure);
  void end(Entry& entry);
  // The backend said what it may not say about a request: that request fails, and the backend shall let go of it.
  void out_of_order(Entry& entry, const char* what);
  void push(const ifab_event_t& event, std::span<const float> scores, std::string_view text,
            uint32_t payload_slot = PayloadRing::kNone);

  EventStore& events_;
  PayloadRing& payloads_;
  const int32_t payload_dtype_;
  ifab_stats_t& counters_;
  IdMap<Entry*> entries_{Intake::kMaxRequests};
  EntryList ended_;
  uint32_t contexts_done_ = 0;
  Status overflow_;
};

}  // namespace ifab
