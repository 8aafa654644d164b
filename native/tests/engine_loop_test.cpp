// SPDX-License-Identifier: Apache-2.0
// The loop against backends that misbehave in ways the simulated one does not.
#include "engine_loop.h"

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <functional>
#include <memory>
#include <stdexcept>
#include <thread>
#include <vector>

namespace ifab {
namespace {

using std::chrono::milliseconds;

StepReport moved() {
  StepReport report;
  report.progressed = true;
  return report;
}

// A backend that does what a test tells it to; by itself it takes everything in and does nothing with it.
class Scripted final : public Backend {
 public:
  Scripted() {
    facts_.slots = 4;
    facts_.step_token_budget = 8;
    facts_.vocab_size = 16;
  }
  const EngineFacts& facts() const override { return facts_; }
  Room room() const override { return {.slots = facts_.slots - inside_}; }
  Need need(const Request& request) const override { return {.slots = request.samples}; }
  AdmitResult admit(const Request& request) override {
    const AdmitResult result = on_admit(request);
    if (result.outcome == AdmitOutcome::kAdmitted) ++inside_;
    return result;
  }
  StepReport step(StepMode, Sink& sink) override { return on_step(sink); }
  void cancel(uint64_t id) override {
    --inside_;
    cancelled.push_back(id);
  }
  uint64_t kv_blocks_used() const override { return 0; }
  void note_waiting(const Request& request) override { on_waiting(request); }
  void ended() { --inside_; }

  std::function<AdmitResult(const Request&)> on_admit = [](const Request&) {
    return AdmitResult{AdmitOutcome::kAdmitted, {}};
  };
  std::function<StepReport(Sink&)> on_step = [](Sink&) { return moved(); };
  std::function<void(const Request&)> on_waiting = [](const Request&) {};
  std::vector<uint64_t> cancelled;

 private:
  EngineFacts facts_;
  uint32_t inside_ = 0;
};

class LoopWith : public ::testing::Test {
 protected:
  void start(Clock::duration still_limit = std::chrono::hours(1)) {
    loop_.emplace(backend_, LoopSeams{intake_, events_, payloads_, board_, bell_, stop_, still_limit});
    thread_ = std::thread([this] { loop_->run(); });
  }
  void TearDown() override {
    stop_.store(true);
    bell_.ring();
    if (thread_.joinable()) thread_.join();
  }

  Status submit(uint64_t id, uint32_t max_tokens = 4, uint32_t samples = 1) {
    std::array<std::unique_ptr<Entry>, 1> entries = {std::make_unique<Entry>()};
    Entry& entry = *entries[0];
    entry.request.id = id;
    entry.request.prompt = {1, 2, 3};
    entry.request.max_tokens = max_tokens;
    entry.request.samples = samples;
    entry.samples.resize(samples);
    entry.samples_left = samples;
    std::array<Status, 1> statuses;
    intake_.submit(entries, statuses);
    return statuses[0];
  }

  // The next event, with its text; fails the test where none comes.
  ifab_event_t next() {
    ifab_event_t event{};
    const ifab_poll_buffers_t buffers{
        sizeof buffers, &event, tokens_.data(), logprobs_.data(), nullptr, text_.data(), 1, 16, 0, 512};
    EXPECT_EQ(events_.poll(buffers, Clock::now() + std::chrono::seconds(60)), 1u);
    text_end_ = event.text_size;
    return event;
  }
  std::string text() const { return {text_.data(), text_end_}; }

  Scripted backend_;
  Doorbell bell_;
  Intake intake_{bell_};
  PayloadRing payloads_{8, 0};
  EventStore events_{
      {.step_tokens = 12, .step_token_events = 8, .step_others = 8, .event_tokens = 8}, payloads_, bell_};
  StatsBoard board_;
  std::atomic<bool> stop_{false};
  std::optional<EngineLoop> loop_;
  std::thread thread_;
  std::array<int32_t, 16> tokens_{};
  std::array<float, 16> logprobs_{};
  std::array<char, 512> text_{};
  size_t text_end_ = 0;
};

TEST_F(LoopWith, ABackendThatRefusesARequestFailsThatOne) {
  backend_.on_admit = [](const Request& request) {
    return request.id == 1 ? AdmitResult{AdmitOutcome::kRefused, {IFAB_UNIMPLEMENTED, "not this one"}}
                           : AdmitResult{AdmitOutcome::kAdmitted, {}};
  };
  backend_.on_step = [&](Sink& sink) {
    sink.context_done(2, 0, 3, {});
    sink.finished(2, 0, IFAB_FINISH_LENGTH, -1, {});
    return moved();
  };
  start();
  ASSERT_TRUE(submit(1).ok());
  ifab_event_t event = next();
  EXPECT_EQ(event.status, IFAB_UNIMPLEMENTED);
  EXPECT_EQ(text(), "not this one");
  ASSERT_TRUE(submit(2).ok());
  EXPECT_EQ(next().kind, IFAB_EVENT_CONTEXT_DONE);
  EXPECT_EQ(next().kind, IFAB_EVENT_FINISHED);
}

TEST_F(LoopWith, ABackendThatReportsItsFailureIsNotCalledAgain) {
  int steps = 0;
  backend_.on_step = [&](Sink&) {
    ++steps;
    StepReport report;
    report.engine_failure = {IFAB_INTERNAL, "device lost"};
    return report;
  };
  start();
  ASSERT_TRUE(submit(1).ok());
  EXPECT_EQ(next().status, IFAB_UNAVAILABLE);
  EXPECT_EQ(text(), "the engine has failed: device lost");
  EXPECT_EQ(submit(2).code(), IFAB_UNAVAILABLE);
  TearDown();
  EXPECT_EQ(steps, 1);
  EXPECT_TRUE(backend_.cancelled.empty());
  EXPECT_EQ(board_.read().stats.engine_failed, 1u);
}

TEST_F(LoopWith, ABackendThatThrowsAnywhereLosesNoRequest) {
  backend_.on_waiting = [](const Request& request) {
    if (request.id == 2) throw std::runtime_error("on a notice");
  };
  std::atomic<bool> entered{false};
  backend_.on_step = [&](Sink&) {
    entered.store(true);
    return moved();
  };
  start();
  ASSERT_TRUE(submit(1).ok());
  while (!entered.load()) std::this_thread::yield();
  ASSERT_TRUE(submit(2).ok());
  std::array<uint64_t, 2> ids = {next().request_id, next().request_id};
  std::sort(ids.begin(), ids.end());
  EXPECT_EQ(ids, (std::array<uint64_t, 2>{1, 2}));
  EXPECT_EQ(text(), "the engine has failed: on a notice");
}

TEST_F(LoopWith, ABackendThatBreaksTheOrderLosesThatRequest) {
  using Step = std::function<void(Sink&)>;
  const std::vector<std::pair<Step, const char*>> cases = {
      {[](Sink& sink) { sink.finished(1, 0, IFAB_FINISH_LENGTH, -1, {}); }, "an end before the context was done"},
      {[](Sink& sink) {
         sink.context_done(1, 0, 3, {});
         sink.context_done(1, 0, 3, {});
       },
       "the context done twice"},
      {[](Sink& sink) {
         const std::array<int32_t, 1> token = {1};
         sink.context_done(1, 0, 3, {});
         sink.tokens(1, 7, token, {});
       },
       "tokens of a sample that was not asked for"},
      {[](Sink& sink) {
         const std::array<int32_t, 5> tokens = {1, 2, 3, 4, 5};
         sink.context_done(1, 0, 3, {});
         sink.tokens(1, 0, tokens, {});
       },
       "more tokens than max_tokens"},
      {[](Sink& sink) {
         sink.context_done(1, 0, 3, {});
         sink.finished(1, 0, IFAB_FINISH_LENGTH, -1, {});
         sink.finished(1, 0, IFAB_FINISH_LENGTH, -1, {});
       },
       "the end of a sample twice"},
      {[](Sink& sink) {
         const std::array<int32_t, 1> token = {1};
         sink.context_done(1, 0, 3, {});
         for (int i = 0; i < 9; ++i) sink.tokens(1, i % 2 == 0 ? 0 : 1, token, {});
       },
       "more tokens than max_tokens"},
      {[](Sink& sink) {
         const std::array<float, 2> scores = {};
         sink.context_done(1, 0, 3, scores);
       },
       "log-probabilities of another number than the prompt's tokens"},
  };
  const Step* now = nullptr;
  bool told = false;
  backend_.on_step = [&](Sink& sink) {
    if (!told) (*now)(sink);
    told = true;
    return moved();
  };
  bool started = false;
  for (const auto& [step, what] : cases) {
    now = &step;
    told = false;
    if (!started) start();
    started = true;
    ASSERT_TRUE(submit(1, 4, 2).ok());
    ifab_event_t event = next();
    while (event.kind != IFAB_EVENT_FAILED) event = next();
    EXPECT_EQ(event.status, IFAB_INTERNAL);
    EXPECT_EQ(text(), std::string("the engine broke the order of its events: ") + what);
  }
  TearDown();
  EXPECT_EQ(backend_.cancelled, std::vector<uint64_t>(cases.size(), 1));  // each was taken out of the batcher
}

TEST_F(LoopWith, ABackendThatStandsStillForTooLongHasFailed) {
  int progress_only = 0;
  backend_.on_step = [&](Sink&) {
    ++progress_only;
    return StepReport{};
  };
  start(milliseconds(100));
  const auto begin = Clock::now();
  ASSERT_TRUE(submit(1).ok());
  EXPECT_EQ(next().status, IFAB_UNAVAILABLE);
  EXPECT_GE(Clock::now() - begin, milliseconds(100));
  EXPECT_EQ(text().substr(0, 37), "the engine has failed: no progress in");
  TearDown();
  EXPECT_LT(progress_only, 200);  // and did not take a core meanwhile
}

// To end a request that still waits would leave its place in the order to nobody.
TEST_F(LoopWith, AWordAboutARequestThatStillWaitsIsIgnored) {
  std::atomic<int> steps{0};
  std::atomic<bool> room{false};
  backend_.on_admit = [&](const Request& request) {
    const bool enters = request.id == 1 || room.load();
    return AdmitResult{enters ? AdmitOutcome::kAdmitted : AdmitOutcome::kNoRoom, {}};
  };
  backend_.on_step = [&](Sink& sink) {
    if (!room.load()) {
      sink.failed(2, {IFAB_INTERNAL, "of somebody who is not here"});
      EXPECT_EQ(sink.payload(2), nullptr);
    }
    sink.context_done(2, 0, 3, {});
    if (room.load()) {
      sink.finished(2, 0, IFAB_FINISH_LENGTH, -1, {});
    }
    ++steps;
    return moved();
  };
  start();
  ASSERT_TRUE(submit(1).ok());
  ASSERT_TRUE(submit(2).ok());
  const int before = steps.load();
  while (steps.load() < before + 20) std::this_thread::yield();
  room.store(true);
  EXPECT_EQ(intake_.cancel(std::array<uint64_t, 1>{1}), 1u);  // a place comes free, so that the other is tried again
  std::array<int32_t, 3> kinds{};
  for (int32_t& kind : kinds) {
    const ifab_event_t event = next();
    kind = event.kind;
    EXPECT_TRUE(event.kind == IFAB_EVENT_FINISHED || event.request_id == 2);
  }
  std::sort(kinds.begin(), kinds.end());
  EXPECT_EQ(kinds, (std::array<int32_t, 3>{IFAB_EVENT_CONTEXT_DONE, IFAB_EVENT_FINISHED, IFAB_EVENT_FINISHED}));
}

TEST_F(LoopWith, AWordAboutARequestThatHasEndedIsIgnored) {
  int steps = 0;
  backend_.on_step = [&](Sink& sink) {
    const std::array<int32_t, 1> token = {1};
    if (++steps == 1) {
      sink.context_done(1, 1, 2, {});
      sink.failed(1, {IFAB_INTERNAL, "by itself"});
      backend_.ended();
    }
    sink.prompt_computed(1, 1);
    sink.tokens(1, 0, token, {});
    sink.finished(1, 0, IFAB_FINISH_LENGTH, -1, {});
    sink.failed(1, {IFAB_INTERNAL, "again"});
    EXPECT_EQ(sink.payload(1), nullptr);
    return moved();
  };
  start();
  ASSERT_TRUE(submit(1).ok());
  EXPECT_EQ(next().kind, IFAB_EVENT_CONTEXT_DONE);
  const ifab_event_t event = next();
  EXPECT_EQ(event.status, IFAB_INTERNAL);
  EXPECT_EQ(text(), "by itself");
  EXPECT_EQ(event.cached_tokens, 1u);
  EXPECT_EQ(event.computed_tokens, 2u);
  TearDown();
  EXPECT_EQ(events_.pending(), 0u);
  EXPECT_TRUE(backend_.cancelled.empty());
}

TEST(Intake, BoundsWhatItHolds) {
  Doorbell bell;
  Intake intake(bell);
  const auto submit = [&](uint64_t id, size_t tokens) {
    std::array<std::unique_ptr<Entry>, 1> entries = {std::make_unique<Entry>()};
    entries[0]->request.id = id;
    entries[0]->request.prompt.resize(tokens);
    std::array<Status, 1> statuses;
    intake.submit(entries, statuses);
    return statuses[0];
  };
  EXPECT_TRUE(submit(0, Intake::kMaxHeldTokens - 1).ok());
  EXPECT_EQ(submit(1, 2).code(), IFAB_RESOURCE_EXHAUSTED);
  for (uint64_t id = 1; id < Intake::kMaxRequests; ++id) ASSERT_TRUE(submit(id, 0).ok());
  EXPECT_EQ(submit(Intake::kMaxRequests, 0).code(), IFAB_RESOURCE_EXHAUSTED);
  EXPECT_EQ(intake.counts().submitted, Intake::kMaxRequests);
  EXPECT_EQ(intake.counts().refused, 2u);
  const std::array<uint64_t, 3> ids = {5, 5, Intake::kMaxRequests};
  EXPECT_EQ(intake.cancel(ids), 2u);
  std::vector<std::unique_ptr<Entry>> entries;
  std::vector<Intake::Cancel> cancels;
  intake.take(entries, cancels);
  EXPECT_EQ(entries.size(), Intake::kMaxRequests);
  EXPECT_EQ(cancels.size(), 1u);  // handed on once
}

}  // namespace
}  // namespace ifab
