// SPDX-License-Identifier: Apache-2.0
#include "engine_loop.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <string>
#include <utility>

#include "log.h"

namespace ifab {
namespace {

using std::chrono::duration_cast;
using std::chrono::microseconds;
using std::chrono::milliseconds;

constexpr Clock::duration kIdleRest = std::chrono::seconds(1);  // every ring ends it earlier
constexpr Clock::duration kFirstStillRest = microseconds(50);
constexpr Clock::duration kLongestStillRest = milliseconds(20);

uint64_t us(Clock::duration duration) {
  return static_cast<uint64_t>(duration_cast<microseconds>(duration).count());
}

}  // namespace

EngineLoop::EngineLoop(Backend& backend, const LoopSeams& seams)
    : backend_(backend),
      intake_(seams.intake),
      events_(seams.events),
      board_(seams.board),
      doorbell_(seams.doorbell),
      stop_(seams.stop),
      still_limit_(seams.still_limit),
      publisher_(seams.events, seams.payloads, backend.facts().payload_dtype, now_.stats),
      admission_(backend.facts()) {
  publish_stats();
}

void EngineLoop::run() {
  while (!stop_.load(std::memory_order_acquire)) {
    // Beside the guard of the C interface this is the one place that catches everything: a backend that throws, which
    // it may not, must not take the process down. What state it is in is unknown, so it is not called again.
    try {
      turn();
    } catch (const std::exception& error) {
      fail_engine(error.what());
    } catch (...) {
      fail_engine("unknown exception");
    }
  }
}

void EngineLoop::turn() {
  take_in();
  const bool published = publish_ends();
  if (failed() || (published && !work_left())) {
    settle();
    rest(kIdleRest);
    return;
  }
  // Ends that find no place in the store hold the loop back like steps that would.
  if (!published || !events_.room_for_step()) {
    now_.stats.held_back = 1;
    settle();
    rest(kIdleRest);
    now_.stats.held_back = 0;
    return;
  }
  admit();
  step();
  settle();
  if (still_rest_ > Clock::duration::zero()) rest_after_still_step();
}

void EngineLoop::take_in() {
  // What is handed in is under the publisher's wing before the backend hears of any of it, so that a backend that
  // throws loses nothing.
  intake_.take(entries_, cancels_);
  for (std::unique_ptr<Entry>& owned : entries_) {
    Entry& entry = *owned.release();
    publisher_.add(entry);
    arrived_.push(entry);
  }
  entries_.clear();
  for (const Intake::Cancel& cancel : cancels_) {
    Entry* entry = publisher_.find(cancel.id);
    if (entry == nullptr || entry->serial != cancel.serial) continue;  // it has ended meanwhile
    entry->cancelled = true;
    if (entry->queued || entry->admitted) end(*entry, {});
  }
  cancels_.clear();
  while (Entry* entry = arrived_.pop()) {
    if (entry->cancelled || failed()) {
      end(*entry, entry->cancelled ? Status() : failure_);
    } else {
      enqueue(*entry);
    }
  }
}

void EngineLoop::enqueue(Entry& entry) {
  entry.waiting.request = &entry.request;
  entry.queued = true;
  admission_.enqueue(entry.waiting);
  backend_.note_waiting(entry.request);
}

void EngineLoop::end(Entry& entry, Status failure) {
  if (entry.ending || entry.ended) return;
  entry.ending = true;
  entry.failure = std::move(failure);
  ending_.push(entry);
}

bool EngineLoop::publish_ends() {
  while (Entry* entry = ending_.front()) {
    if (!events_.room_for(entry->failure.ok() ? entry->samples_left : 1)) return false;
    ending_.pop();
    if (entry->queued && !failed()) {
      entry->queued = false;
      admission_.withdraw(entry->waiting);
      backend_.forget_waiting(entry->request);
    }
    if (entry->failure.ok()) {
      publisher_.cancel(*entry);
    } else {
      publisher_.fail(*entry, entry->failure);
    }
    let_go(*entry);
  }
  return true;
}

void EngineLoop::let_go(Entry& entry) {
  if (!entry.admitted || failed()) return;
  entry.admitted = false;
  if (std::exchange(entry.backend_holds, false)) backend_.cancel(entry.request.id);
  admission_.left();
}

void EngineLoop::admit() {
  admission_.begin_round();
  for (;;) {
    Decision decision = admission_.next(backend_, publisher_.reader_room());
    if (decision.kind == Decision::Kind::kNone) break;
    Entry& entry = *publisher_.find(decision.waiting->request->id);
    entry.queued = false;
    if (decision.kind == Decision::Kind::kAdmitted) {
      entry.admitted = true;
      entry.backend_holds = true;
      publisher_.reserve(entry);
      ++now_.stats.progress_tick;
      last_progress_ = Clock::now();
    } else {
      backend_.forget_waiting(entry.request);
      end(entry, std::move(decision.status));
    }
  }
  now_.stats.admission_retries = admission_.retries();
  now_.stats.leader_waits = admission_.leader_waits();
}

void EngineLoop::step() {
  const StepMode mode = admission_.mode();
  const Clock::time_point start = Clock::now();
  const StepReport report = backend_.step(mode, publisher_);
  const Clock::time_point end = Clock::now();
  count(report, mode, report.clock_us > 0 ? report.clock_us : us(end - start));
  if (!report.engine_failure.ok()) return fail_engine(report.engine_failure.message());
  if (!publisher_.overflow().ok()) return fail_engine(publisher_.overflow().message());
  admission_.stepped(report);
  if (report.progressed) {
    last_progress_ = end;
    still_rest_ = Clock::duration::zero();
  } else {
    still_rest_ = std::clamp(still_rest_ * 2, kFirstStillRest, kLongestStillRest);
    if (admission_.inside() > 0 && end - last_progress_ > still_limit_) {
      fail_engine("no progress in " + std::to_string(duration_cast<milliseconds>(end - last_progress_).count()) +
                  " ms, progress-only steps included");
    }
  }
}

void EngineLoop::count(const StepReport& report, StepMode mode, uint64_t microseconds) {
  ifab_stats_t& stats = now_.stats;
  ++stats.steps;
  stats.progress_only_steps += mode == StepMode::kProgressOnly ? 1 : 0;
  stats.progress_tick += report.progressed ? 1 : 0;
  stats.prompt_tokens_computed += report.prompt_tokens;
  stats.generated_tokens += report.generated_tokens;
  stats.busy_us += microseconds;
  ++stats.step_us[duration_bucket(microseconds)];
  const uint64_t used = uint64_t{report.prompt_tokens} + report.generated_tokens;
  ++stats.step_fill[fill_bucket(used, backend_.facts().step_token_budget)];
}

void EngineLoop::settle() {
  for (Entry* entry = publisher_.ended().front(); entry != nullptr; entry = entry->next) let_go(*entry);
  if (publisher_.take_contexts_done() > 0) admission_.context_done();
  // Ids are free, and counters up to date, before anybody can see that their requests have ended.
  intake_.ended(publisher_.ended());
  publish_stats();
  events_.commit();
  publisher_.release();
}

void EngineLoop::publish_stats() {
  ifab_stats_t& stats = now_.stats;
  if (!failed()) {
    stats.active = backend_.facts().slots - backend_.room().slots;
    stats.kv_blocks_used = backend_.kv_blocks_used();
  }
  stats.kv_blocks_total = backend_.facts().kv_pool_blocks;
  now_.requests_inside = failed() ? 0 : admission_.inside();
  board_.publish(now_);
}

void EngineLoop::rest(Clock::duration limit) {
  const Clock::time_point start = Clock::now();
  const bool idle = !failed() && !work_left() && ending_.empty();
  if (idle) {
    now_.idle = true;
    now_.idle_since = start;
    board_.publish(now_);
  }
  doorbell_.wait_until(start + limit);
  if (idle) now_.stats.idle_us += us(Clock::now() - start);
  now_.idle = false;
}

void EngineLoop::rest_after_still_step() {
  doorbell_.wait_until(Clock::now() + still_rest_);
}

void EngineLoop::fail_engine(const std::string& why) {
  log(IFAB_LOG_ERROR, "loop", "the engine has failed: " + why);
  failure_ = {IFAB_UNAVAILABLE, "the engine has failed: " + why};
  now_.stats.engine_failed = 1;
  now_.stats.active = 0;
  intake_.close(failure_);
  arrived_ = {};
  ending_ = {};
  publisher_.for_each([this](Entry& entry) {
    if (entry.ended) return;
    entry.ending = true;
    if (!entry.cancelled && entry.failure.ok()) entry.failure = failure_;
    ending_.push(entry);
  });
}

}  // namespace ifab
