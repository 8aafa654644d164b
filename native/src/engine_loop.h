// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "admission.h"
#include "backend.h"
#include "doorbell.h"
#include "entry.h"
#include "events.h"
#include "intake.h"
#include "publisher.h"
#include "stats.h"

namespace ifab {

// What the loop shares with callers' threads. All of it outlives the loop.
struct LoopSeams {
  Intake& intake;
  EventStore& events;
  PayloadRing& payloads;
  StatsBoard& board;
  Doorbell& doorbell;
  const std::atomic<bool>& stop;
  // Time in which steps may move nothing, progress-only ones included, before the engine counts as failed.
  Clock::duration still_limit;
};

// The life of the owner thread after load: take in, admit, step, publish, until told to stop. Owns every request
// between take-in and its end. One turn does one step; between steps nothing is allocated.
class EngineLoop {
 public:
  EngineLoop(Backend& backend, const LoopSeams& seams);

  void run();

 private:
  void turn();
  // Requests and cancellations that callers have handed in.
  void take_in();
  void enqueue(Entry& entry);
  // Ends that do not come from the backend. False where some still wait for room in the event store.
  bool publish_ends();
  // A request that has ended is out of the batcher now.
  void let_go(Entry& entry);
  bool work_left() const { return admission_.waiting() > 0 || admission_.inside() > 0; }
  void admit();
  void step();
  void count(const StepReport& report, StepMode mode, uint64_t microseconds);
  // After a step, or instead of one: lets go of what has ended, and shows callers what is new.
  void settle();
  void publish_stats();
  // Nothing can be done before the doorbell rings, or the time is up.
  void rest(Clock::duration limit);
  // Nothing moved: a short rest, longer each time, so that a batcher that stands still does not take a core.
  void rest_after_still_step();
  // The engine cannot go on: everything in flight fails, and nothing is accepted any more.
  void fail_engine(const std::string& why);
  // Has a request end without the backend: with that failure, or cancelled where it is ok.
  void end(Entry& entry, Status failure);
  bool failed() const { return !failure_.ok(); }

  Backend& backend_;
  Intake& intake_;
  EventStore& events_;
  StatsBoard& board_;
  Doorbell& doorbell_;
  const std::atomic<bool>& stop_;
  const Clock::duration still_limit_;

  Snapshot now_;
  Publisher publisher_;
  Admission admission_;
  EntryList arrived_;  // taken in, not yet shown to the backend
  EntryList ending_;   // end without the backend, once their events fit
  std::vector<std::unique_ptr<Entry>> entries_;
  std::vector<Intake::Cancel> cancels_;
  Clock::time_point last_progress_ = Clock::now();
  Clock::duration still_rest_{};
  Status failure_;  // of the engine
};

}  // namespace ifab
