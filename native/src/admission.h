// SPDX-License-Identifier: Apache-2.0
//
// Admission: when a request may enter the batcher. This file is the specification; the rules come first.
//
// Why it cannot deadlock:
//  1. What not even an empty engine could hold is refused at submit (never_fits).
//  2. A request enters only when its whole need fits beside everything promised to those inside. So nobody inside waits
//     for room, and there is no hold-and-wait: 3. everything inside ends after finitely many steps that progress.
//  4. Steps that do not progress become progress-only, which moves what the batcher itself holds up; where even that
//  does
//     not help, the engine fails, and everything ends with it (engine_loop.cpp).
//  5. While the first in order lacks room nobody passes it, so what is given back adds up until it fits (1, 3).
//  6. It is passed at most kPasses times by higher priorities, and put off for at most kLeaderWaits rounds by a leader.
//  7. An empty batcher that says "no room" to it is asked kEmptyTries times; then it fails.
//  8. So the first in order enters or fails after finitely many steps, and by induction so does everybody.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "backend.h"
#include "request.h"
#include "status.h"

namespace ifab {

inline constexpr int32_t kLowestPriority = -100;
inline constexpr int32_t kHighestPriority = 100;

// Ok, or why a request can never run on an engine with these facts, with the figures.
Status never_fits(const EngineFacts& facts, const Request& request);

// A request that waits to enter. Owned by the caller of Admission, at a fixed address from enqueue() until a decision
// or withdraw() has let go of it.
struct Waiting {
  const Request* request = nullptr;
  Waiting* before = nullptr;  // in its lane, older first
  Waiting* behind = nullptr;
  uint32_t leader_waits = 0;  // rounds in which it was put off because a leader computes what they share
  uint32_t empty_tries = 0;   // times that an empty batcher had no room for it
  uint64_t leader_seen = 0;   // value of Admission's change counter when a leader was last seen
};

// Requests of one priority, oldest first.
struct Lane {
  int32_t priority = 0;
  Waiting* oldest = nullptr;
  Waiting* newest = nullptr;
  Waiting* next = nullptr;  // to be looked at in this round
  uint32_t passes = 0;      // requests of higher priority that entered since one of this lane last did
};

// Room that only the reader of events can make.
struct ReaderRoom {
  uint32_t payload_slots = 0;
  uint64_t prompt_scores = 0;
};

// The rules. The bounds are small where they cost throughput and generous where they only cut off a fault.
struct AdmissionRules {
  // Rounds in a row in which the first in order finds no room before steps become progress-only.
  static constexpr uint32_t kRetries = 4;
  // Steps in a row without progress before steps become progress-only.
  static constexpr uint32_t kStalledSteps = 4;
  // Requests of higher priority that may enter while a lane waits; then it is first.
  static constexpr uint32_t kPasses = 32;
  // Rounds that a request may wait for a leader.
  static constexpr uint32_t kLeaderWaits = 512;
  // Requests that one round passes by because they wait for leaders.
  static constexpr uint32_t kPassedByInRound = 64;
  // Times that an empty batcher is asked to take a request that should fit.
  static constexpr uint32_t kEmptyTries = 16;

  // A sequence for every sample.
  static bool slots_suffice(const Room& room, const Need& need) { return need.slots <= room.slots; }
  // The whole need, beside everything that those inside were promised.
  static bool blocks_suffice(const Room& room, const Need& need) { return room.promised + need.blocks <= room.blocks; }
  // The next step has tokens left: for the whole prompt where prompts cannot be split, else for a part of it.
  static bool budget_suffices(const EngineFacts& facts, const Room& room, const Need& need) {
    if (facts.splits_prompts) return room.step_tokens < facts.step_token_budget;
    return uint64_t{room.step_tokens} + need.prompt_tokens <= facts.step_token_budget;
  }
  // What the reader has to make room for: the payload, and the log-probabilities of the prompt.
  static bool reader_suffices(const ReaderRoom& room, const Request& request) {
    return (!request.want_payload || room.payload_slots > 0) &&
           (!request.prompt_logprobs || room.prompt_scores >= request.prompt.size());
  }
  // Better to wait: somebody inside computes what this request would share.
  static bool waits_for_leader(const Need& need, const Waiting& waiting) {
    return need.leader_computes && waiting.leader_waits < kLeaderWaits;
  }

  // A lane that was passed too often goes before all others.
  static bool aged(const Lane& lane) { return lane.passes >= kPasses; }
  // Whether requests of `left` go before those of `right`.
  static bool ahead(const Lane& left, const Lane& right, bool left_aged, bool right_aged) {
    if (left_aged != right_aged) return left_aged;
    if (left_aged && left.passes != right.passes) return left.passes > right.passes;
    return left.priority > right.priority;
  }
  // Within a lane, the oldest goes first.
  static Waiting* first(const Lane& lane) { return lane.oldest; }
  static Waiting* following(const Waiting& waiting) { return waiting.behind; }
  // The first in order had no room: nobody else is tried before the next step.
  static constexpr bool kOthersMayPass = false;

  // When steps become progress-only, and when an empty batcher is given up on.
  static bool retried_enough(uint32_t rounds_without_room) { return rounds_without_room > kRetries; }
  static bool stalled(uint32_t still_steps) { return still_steps >= kStalledSteps; }
  static bool tried_enough(const Waiting& waiting) { return waiting.empty_tries >= kEmptyTries; }
};

// What Admission decided about one request.
struct Decision {
  enum class Kind {
    kNone,      // nobody else enters before the next step
    kAdmitted,  // `waiting` is in the batcher
    kFailed,    // `waiting` can not run; `status` says why
  };
  Kind kind = Kind::kNone;
  Waiting* waiting = nullptr;
  Status status;
};

// The order of waiting requests and the decision who enters when. One thread; allocates nothing after construction.
//
// Before each step: begin_round(), then next() until it decides kNone, then step with mode(), then stepped().
template <class Rules>
class BasicAdmission {
 public:
  explicit BasicAdmission(const EngineFacts& facts);

  // From now on it waits.
  void enqueue(Waiting& waiting);
  // It waits no longer: it was cancelled.
  void withdraw(Waiting& waiting);

  void begin_round();
  // Decides about one request, and has let go of it unless the decision is kNone.
  Decision next(Backend& backend, const ReaderRoom& reader);
  StepMode mode() const { return no_room_ || stalled_ ? StepMode::kProgressOnly : StepMode::kNormal; }
  void stepped(const StepReport& report);

  // A prompt in the batcher is computed now, so that others can share it.
  void context_done() { ++changes_; }
  // A request left the batcher.
  void left() {
    ++changes_;
    --inside_;
  }

  uint64_t waiting() const { return waiting_; }
  uint32_t inside() const { return inside_; }
  uint64_t retries() const { return retries_; }            // times that a request was put off for lack of room
  uint64_t leader_waits() const { return leader_waits_; }  // times that one was put off because of a leader

 private:
  Lane* next_lane();
  bool room_may_have_come(const Backend& backend) const;
  bool put_off_for_leader(const Backend& backend, Lane& lane, Need& need);
  bool room_suffices(const Room& room, const Need& need) const {
    return Rules::slots_suffice(room, need) && Rules::blocks_suffice(room, need) &&
           Rules::budget_suffices(facts_, room, need);
  }
  Decision enter(Lane& lane);
  Decision fail(Lane& lane, Status status);
  void put_off(const Need& need, bool by_batcher);
  void unlink(Lane& lane, Waiting& waiting);
  Lane& lane_of(const Waiting& waiting) {
    return lanes_[static_cast<size_t>(waiting.request->priority - kLowestPriority)];
  }

  const EngineFacts& facts_;
  std::array<Lane, static_cast<size_t>(kHighestPriority - kLowestPriority + 1)> lanes_;
  std::vector<Lane*> busy_;  // lanes with requests, in no order

  uint64_t waiting_ = 0;
  uint32_t inside_ = 0;
  uint64_t changes_ = 1;  // grows with whatever may change a need: an end, a prompt that is computed now
  uint64_t retries_ = 0;
  uint64_t leader_waits_ = 0;

  uint32_t passed_by_ = 0;  // in this round
  bool round_over_ = false;

  // The first in order that found no room, and what has to change before it is tried again.
  uint32_t rounds_without_room_ = 0;  // in a row
  bool no_room_ = false;              // retried enough: progress-only until room may have come
  Need blocked_need_;
  uint64_t blocked_at_ = 0;          // value of changes_
  bool blocked_by_batcher_ = false;  // which said so although its figures suffice
  bool order_changed_ = false;       // since then somebody else may be first

  uint32_t still_steps_ = 0;  // steps in a row without progress
  bool stalled_ = false;
};

template <class Rules>
BasicAdmission<Rules>::BasicAdmission(const EngineFacts& facts) : facts_(facts) {
  for (size_t i = 0; i < lanes_.size(); ++i) lanes_[i].priority = kLowestPriority + static_cast<int32_t>(i);
  busy_.reserve(lanes_.size());
}

template <class Rules>
void BasicAdmission<Rules>::enqueue(Waiting& waiting) {
  Lane& lane = lane_of(waiting);
  if (lane.oldest == nullptr) {
    busy_.push_back(&lane);
    lane.oldest = &waiting;
    order_changed_ = true;
  } else {
    lane.newest->behind = &waiting;
    waiting.before = lane.newest;
  }
  lane.newest = &waiting;
  ++waiting_;
}

template <class Rules>
void BasicAdmission<Rules>::withdraw(Waiting& waiting) {
  unlink(lane_of(waiting), waiting);
  order_changed_ = true;
}

template <class Rules>
void BasicAdmission<Rules>::unlink(Lane& lane, Waiting& waiting) {
  (waiting.before == nullptr ? lane.oldest : waiting.before->behind) = waiting.behind;
  (waiting.behind == nullptr ? lane.newest : waiting.behind->before) = waiting.before;
  if (lane.next == &waiting) lane.next = Rules::following(waiting);
  waiting.before = waiting.behind = nullptr;
  if (lane.oldest == nullptr) {
    std::erase(busy_, &lane);
    lane.passes = 0;
  }
  if (--waiting_ == 0) {
    no_room_ = false;
    rounds_without_room_ = 0;
  }
}

template <class Rules>
void BasicAdmission<Rules>::begin_round() {
  for (Lane* lane : busy_) lane->next = Rules::first(*lane);
  passed_by_ = 0;
  round_over_ = false;
}

template <class Rules>
Decision BasicAdmission<Rules>::next(Backend& backend, const ReaderRoom& reader) {
  if (stalled_ || (no_room_ && inside_ > 0 && !room_may_have_come(backend))) return {};
  for (Lane* lane = nullptr; !round_over_ && (lane = next_lane()) != nullptr;) {
    Waiting& waiting = *lane->next;
    if (!Rules::reader_suffices(reader, *waiting.request)) return {};
    Need need;
    if (put_off_for_leader(backend, *lane, need)) continue;
    if (need.slots > facts_.slots || need.blocks_ever > facts_.kv_pool_blocks) {
      return fail(*lane, {IFAB_RESOURCE_EXHAUSTED, "needs " + std::to_string(need.slots) + " slots and " +
                                                       std::to_string(need.blocks_ever) +
                                                       " KV blocks; the engine has " + std::to_string(facts_.slots) +
                                                       " and " + std::to_string(facts_.kv_pool_blocks)});
    }
    AdmitResult asked;  // kNoRoom
    const bool suffices = room_suffices(backend.room(), need);
    if (suffices) asked = backend.admit(*waiting.request);
    if (asked.outcome == AdmitOutcome::kAdmitted) return enter(*lane);
    if (asked.outcome == AdmitOutcome::kRefused) return fail(*lane, std::move(asked.status));
    put_off(need, suffices);
    if (inside_ == 0) ++waiting.empty_tries;
    if (Rules::tried_enough(waiting)) {
      return fail(*lane, {IFAB_RESOURCE_EXHAUSTED, "the engine found no room, although it was empty, in " +
                                                       std::to_string(waiting.empty_tries) + " tries"});
    }
    lane->next = Rules::kOthersMayPass ? Rules::following(waiting) : nullptr;
    round_over_ = !Rules::kOthersMayPass;
  }
  return {};
}

template <class Rules>
Lane* BasicAdmission<Rules>::next_lane() {
  Lane* best = nullptr;
  for (Lane* lane : busy_) {
    if (lane->next == nullptr) continue;
    if (best == nullptr || Rules::ahead(*lane, *best, Rules::aged(*lane), Rules::aged(*best))) best = lane;
  }
  return best;
}

template <class Rules>
bool BasicAdmission<Rules>::room_may_have_come(const Backend& backend) const {
  if (order_changed_ || changes_ != blocked_at_) return true;
  return !blocked_by_batcher_ && room_suffices(backend.room(), blocked_need_);
}

// Looks at what the first of a lane needs. True where it is put off because of a leader: the round goes on behind it.
template <class Rules>
bool BasicAdmission<Rules>::put_off_for_leader(const Backend& backend, Lane& lane, Need& need) {
  Waiting& waiting = *lane.next;
  // Nothing has changed since a leader was seen: it is still there, and asking again would tell nothing new.
  const bool known = waiting.leader_seen == changes_;
  need.leader_computes = known;
  if (!known || !Rules::waits_for_leader(need, waiting)) need = backend.need(*waiting.request);
  if (inside_ == 0 || !Rules::waits_for_leader(need, waiting)) return false;
  waiting.leader_seen = changes_;
  ++waiting.leader_waits;
  ++leader_waits_;
  lane.next = Rules::following(waiting);
  round_over_ = ++passed_by_ >= Rules::kPassedByInRound;
  return true;
}

template <class Rules>
Decision BasicAdmission<Rules>::enter(Lane& lane) {
  Waiting& waiting = *lane.next;
  for (Lane* other : busy_) {
    if (other->priority < lane.priority) ++other->passes;
  }
  lane.passes = 0;
  unlink(lane, waiting);
  ++inside_;
  no_room_ = false;
  rounds_without_room_ = 0;
  return {Decision::Kind::kAdmitted, &waiting, {}};
}

template <class Rules>
Decision BasicAdmission<Rules>::fail(Lane& lane, Status status) {
  Waiting& waiting = *lane.next;
  unlink(lane, waiting);
  no_room_ = false;
  rounds_without_room_ = 0;
  return {Decision::Kind::kFailed, &waiting, std::move(status)};
}

template <class Rules>
void BasicAdmission<Rules>::put_off(const Need& need, bool by_batcher) {
  ++retries_;
  no_room_ = Rules::retried_enough(++rounds_without_room_);
  blocked_need_ = need;
  blocked_at_ = changes_;
  blocked_by_batcher_ = by_batcher;
  order_changed_ = false;
}

template <class Rules>
void BasicAdmission<Rules>::stepped(const StepReport& report) {
  still_steps_ = report.progressed || inside_ == 0 ? 0 : still_steps_ + 1;
  stalled_ = Rules::stalled(still_steps_);
}

extern template class BasicAdmission<AdmissionRules>;
using Admission = BasicAdmission<AdmissionRules>;

}  // namespace ifab
