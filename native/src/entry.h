// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "admission.h"
#include "payload_ring.h"
#include "request.h"
#include "status.h"

namespace ifab {

// Everything the library holds of one accepted request, from submit until its last event is staged. Made and filled on
// the caller's thread, so that the owner thread allocates nothing for it.
struct Entry {
  struct Sample {
    uint32_t generated = 0;
    bool ended = false;
  };

  Request request;
  uint64_t serial = 0;  // of this acceptance: tells it from an earlier request with the same id
  Waiting waiting;
  bool queued = false;         // Admission has it
  bool admitted = false;       // in the batcher, as Admission counts
  bool backend_holds = false;  // and the backend has not told its end
  bool cancelled = false;      // its caller wants its end
  bool ending = false;         // ends without the backend as soon as its events fit: with `failure`, or cancelled
  bool ended = false;          // every sample's end is staged; a later word of the backend about it is ignored
  Status failure;
  std::vector<Sample> samples;
  uint32_t samples_left = 0;
  bool context_done = false;
  uint32_t cached_tokens = 0;    // of the prompt, known once the context is done
  uint32_t computed_tokens = 0;  // of the prompt, as counted step by step
  uint32_t scores_reserved = 0;  // prompt log-probabilities that its CONTEXT_DONE may carry
  uint32_t payload_slot = PayloadRing::kNone;
  Entry* next = nullptr;  // in one of the owner thread's lists: see EntryList
};

// A list of entries, first in first out, that needs no memory of its own. An entry is in at most one.
class EntryList {
 public:
  bool empty() const { return front_ == nullptr; }
  Entry* front() const { return front_; }
  void push(Entry& entry) {
    entry.next = nullptr;
    (front_ == nullptr ? front_ : back_->next) = &entry;
    back_ = &entry;
  }
  Entry* pop() {
    Entry* entry = front_;
    if (entry != nullptr) front_ = entry->next;
    return entry;
  }

 private:
  Entry* front_ = nullptr;
  Entry* back_ = nullptr;
};

}  // namespace ifab
