// SPDX-License-Identifier: Apache-2.0
// The life of requests through the whole library: submit, step, poll; cancel, failures, readers that do not read.
#include <gtest/gtest.h>

#include <chrono>
#include <set>
#include <string>

#include "client.h"
#include "expected.h"
#include "simulated_directory.h"

namespace ifab::test {
namespace {

using std::chrono::steady_clock;

// An engine whose steps take a millisecond, so that what a test does happens while requests run.
SimulatedEngine slow() {
  SimulatedEngine engine;
  engine.time_scale = 1;
  engine.step_us = 1000;
  return engine;
}

// Answers that last until a test has done with them, whatever else the machine does.
constexpr uint32_t kLong = 4000;
SimulatedEngine with_long_answers() {
  SimulatedEngine engine = slow();
  engine.max_output_tokens = kLong;
  engine.max_sequence_tokens = engine.max_input_tokens + kLong;
  return engine;
}

void expect_answer(const SimulatedEngine& engine, const Ask& ask, const Outcome& outcome) {
  ASSERT_EQ(outcome.failures, 0u) << outcome.text;
  EXPECT_EQ(outcome.contexts_done, 1u);
  EXPECT_EQ(outcome.prompt_tokens, ask.prompt.size());
  EXPECT_EQ(outcome.cached_tokens + outcome.computed_tokens, ask.prompt.size());
  for (uint32_t sample = 0; sample < ask.samples; ++sample) {
    const Outcome::Sample& found = outcome.samples[sample];
    const std::vector<int32_t> tokens = expected_tokens(engine, ask, sample);
    EXPECT_EQ(found.ends, 1u);
    EXPECT_EQ(found.tokens, tokens);
    const bool stopped = tokens.size() < ask.max_tokens;
    EXPECT_EQ(found.reason, stopped ? IFAB_FINISH_STOP : IFAB_FINISH_LENGTH);
    EXPECT_EQ(found.stop_id < 0, !stopped);
    EXPECT_EQ(found.generated, tokens.size() + (stopped ? 1 : 0));
  }
}

TEST(Loop, AnswersWhatThePromptGives) {
  SimulatedEngine engine;
  engine.end_one_in = 20;
  Client client(engine);
  std::vector<Ask> asks;
  for (uint64_t id = 0; id < 200; ++id) {
    asks.push_back({.id = id,
                    .prompt = prompt_of(1 + id * 5, id / 2),  // pairs that share all of the shorter one
                    .max_tokens = static_cast<uint32_t>(1 + id % 40),
                    .samples = static_cast<uint32_t>(1 + id % 8),
                    .flags = id % 5 == 0 ? IFAB_REQUEST_IGNORE_END : 0,
                    .priority = static_cast<int32_t>(id % 3),
                    .seed = id * 7,
                    .stop_ids = {static_cast<int32_t>(id)}});
  }
  for (const Verdict& verdict : client.submit(asks)) EXPECT_EQ(verdict.status, IFAB_OK) << verdict.text;
  ASSERT_TRUE(client.drain());
  for (const Ask& ask : asks) expect_answer(engine, ask, client.outcome(ask.id));
  EXPECT_TRUE(client.violations().empty()) << client.violations().front();
  const ifab_stats_t stats = client.stats();
  EXPECT_EQ(stats.requests_submitted, 200u);
  EXPECT_EQ(stats.requests_finished, 200u);
  EXPECT_EQ(stats.queued, 0u);
  EXPECT_EQ(stats.active, 0u);
  EXPECT_EQ(stats.events_pending, 0u);
}

TEST(Loop, GivesLogProbabilitiesWhereAsked) {
  SimulatedEngine engine;
  Client client(engine);
  Ask ask{
      .id = 1, .prompt = prompt_of(50, 3), .flags = IFAB_REQUEST_LOGPROBS | IFAB_REQUEST_PROMPT_LOGPROBS, .seed = 9};
  client.submit({.id = 0, .prompt = ask.prompt});
  ASSERT_TRUE(client.drain());
  client.submit(ask);
  ASSERT_TRUE(client.drain());
  EXPECT_TRUE(client.outcome(0).prompt_logprobs.empty());
  const Outcome& outcome = client.outcome(1);
  EXPECT_EQ(outcome.cached_tokens, 0u);  // all of it had to be computed
  ASSERT_EQ(outcome.prompt_logprobs.size(), 50u);
  EXPECT_EQ(outcome.prompt_logprobs[0], 0.0F);
  const std::vector<int32_t> head(ask.prompt.begin(), ask.prompt.begin() + 21);
  EXPECT_EQ(outcome.prompt_logprobs[20], simulated::logprob_of(chain_of(engine, head)));
  ASSERT_EQ(outcome.samples[0].logprobs.size(), outcome.samples[0].tokens.size());
  const uint64_t key = simulated::sample_key(chain_of(engine, ask.prompt), 9, 0);
  EXPECT_EQ(outcome.samples[0].logprobs[3], simulated::logprob_of(simulated::token_word(key, 3)));
}

TEST(Loop, ComputesASharedHeadOnce) {
  SimulatedEngine engine;
  engine.slots = 32;
  Client client(engine);
  const std::vector<int32_t> head = prompt_of(400, 1);
  std::vector<Ask> asks;
  for (uint64_t id = 0; id < 32; ++id) {
    Ask ask{.id = id, .prompt = head};
    const std::vector<int32_t> tail = prompt_of(30, 100 + id);
    ask.prompt.insert(ask.prompt.end(), tail.begin(), tail.end());
    asks.push_back(ask);
  }
  client.submit(asks);
  ASSERT_TRUE(client.drain());
  uint64_t computed = 0;
  for (const Ask& ask : asks) {
    expect_answer(engine, ask, client.outcome(ask.id));
    computed += client.outcome(ask.id).computed_tokens;
  }
  EXPECT_EQ(computed, 430u + 31 * 30);
  const ifab_stats_t stats = client.stats();
  EXPECT_EQ(stats.prompt_tokens_computed, computed);
  EXPECT_EQ(stats.prompt_tokens_cached, 31u * 400);
  EXPECT_GT(stats.leader_waits, 0u);
  EXPECT_EQ(stats.progress_only_steps, 0u);  // waiting for a leader is no stall
}

TEST(Loop, SharesHeadsWithinASaltOnly) {
  Client client({});
  const std::vector<int32_t> prompt = prompt_of(100, 1);
  for (uint64_t salt = 0; salt < 3; ++salt) client.submit({.id = salt, .prompt = prompt, .salt = salt / 2});
  ASSERT_TRUE(client.drain());
  EXPECT_EQ(client.outcome(0).cached_tokens, 0u);
  EXPECT_EQ(client.outcome(1).cached_tokens, 96u);
  EXPECT_EQ(client.outcome(2).cached_tokens, 0u);
}

TEST(Loop, TakesHigherPriorityFirst) {
  SimulatedEngine engine = slow();
  engine.slots = 1;
  Client client(engine);
  client.submit({.id = 0, .prompt = prompt_of(5, 0), .max_tokens = 20});
  ASSERT_TRUE(client.wait_for([](const ifab_stats_t& stats) { return stats.active == 1; }));
  client.submit({{.id = 1, .prompt = prompt_of(5, 1), .priority = -1},
                 {.id = 2, .prompt = prompt_of(5, 2)},
                 {.id = 3, .prompt = prompt_of(5, 3), .priority = 7},
                 {.id = 4, .prompt = prompt_of(5, 4)}});
  ASSERT_TRUE(client.drain());
  EXPECT_EQ(client.context_order(), (std::vector<uint64_t>{0, 3, 2, 4, 1}));
}

// ---- cancel ----

TEST(Cancel, EndsEachSampleOnceAtEveryStage) {
  SimulatedEngine engine = with_long_answers();
  engine.slots = 4;
  Client client(engine);
  client.submit({{.id = 1, .prompt = prompt_of(5, 1), .max_tokens = kLong, .samples = 4},
                 {.id = 2, .prompt = prompt_of(5, 2), .max_tokens = 3}});
  while (client.outcome(1).samples[3].tokens.size() < 2) client.poll(1000);  // between tokens
  EXPECT_EQ(client.cancel({2, 1, 1, 99}), 3u);                               // 2 waits for a slot
  ASSERT_TRUE(client.drain());
  for (const Outcome::Sample& sample : client.outcome(1).samples) {
    EXPECT_EQ(sample.ends, 1u);
    EXPECT_EQ(sample.reason, IFAB_FINISH_CANCELLED);
    EXPECT_EQ(sample.generated, sample.tokens.size());
  }
  EXPECT_EQ(client.outcome(2).samples[0].reason, IFAB_FINISH_CANCELLED);
  EXPECT_EQ(client.outcome(2).contexts_done, 0u);
  EXPECT_EQ(client.cancel({1, 2}), 0u);  // after the end
  ASSERT_TRUE(client.wait_for([](const ifab_stats_t& stats) { return stats.active == 0; }));
  EXPECT_EQ(client.stats().requests_cancelled, 2u);
  EXPECT_TRUE(client.violations().empty()) << client.violations().front();
}

TEST(Cancel, ReachesAPromptThatIsBeingComputed) {
  SimulatedEngine engine = slow();
  engine.step_token_budget = engine.slots = 1;  // 1,000 tokens take a second
  Client client(engine);
  client.submit({.id = 1, .prompt = prompt_of(1000, 1)});
  ASSERT_TRUE(client.wait_for([](const ifab_stats_t& stats) { return stats.prompt_tokens_computed > 0; }));
  EXPECT_EQ(client.cancel({1}), 1u);
  ASSERT_TRUE(client.drain());
  const Outcome& outcome = client.outcome(1);
  EXPECT_EQ(outcome.samples[0].reason, IFAB_FINISH_CANCELLED);
  EXPECT_GT(outcome.computed_tokens, 0u);
  EXPECT_LT(outcome.computed_tokens, 1000u);
  EXPECT_EQ(client.stats().prompt_tokens_computed, outcome.computed_tokens);
}

TEST(Cancel, FreesTheSlotForTheNext) {
  SimulatedEngine engine = with_long_answers();
  engine.slots = 1;
  Client client(engine);
  client.submit({{.id = 1, .prompt = prompt_of(5, 1), .max_tokens = kLong},
                 {.id = 2, .prompt = prompt_of(5, 2), .max_tokens = 1}});
  while (client.outcome(1).samples[0].tokens.empty()) client.poll(1000);
  const uint64_t steps = client.stats().steps;
  client.cancel({1});
  ASSERT_TRUE(client.drain());
  expect_answer(engine, {.id = 2, .prompt = prompt_of(5, 2), .max_tokens = 1}, client.outcome(2));
  // The step in progress, one for the prompt, one for the token, and what passed before the cancel was heard.
  EXPECT_LE(client.stats().steps - steps, kLong / 4);
}

TEST(Cancel, LeavesOthersAlone) {
  SimulatedEngine engine = slow();
  engine.step_us = 100;
  Client client(engine);
  std::vector<Ask> asks;
  for (uint64_t id = 0; id < 64; ++id) asks.push_back({.id = id, .prompt = prompt_of(40, id / 8), .max_tokens = 20});
  client.submit(asks);
  for (uint64_t id = 1; id < 64; id += 2) {
    client.cancel({id});
    client.poll(0);
  }
  ASSERT_TRUE(client.drain());
  for (uint64_t id = 0; id < 64; id += 2) expect_answer(engine, asks[id], client.outcome(id));
  EXPECT_TRUE(client.violations().empty()) << client.violations().front();
}

// ---- ids ----

TEST(Ids, AreUniqueWhileTheirRequestsLive) {
  SimulatedEngine engine = with_long_answers();
  Client client(engine);
  const Ask ask{.id = 7, .prompt = prompt_of(5, 1), .max_tokens = kLong};
  const std::vector<Verdict> verdicts = client.submit({ask, {.id = 8, .prompt = ask.prompt, .max_tokens = 1}});
  EXPECT_EQ(verdicts[0].status, IFAB_OK);
  const ifab_request_t twice[] = {ask.request(), ask.request()};
  ifab_submit_result_t results[2];
  ASSERT_EQ(ifab_engine_submit(client.engine(), twice, 2, results, nullptr, 0), IFAB_OK);
  EXPECT_EQ(results[0].status, IFAB_ALREADY_EXISTS);
  EXPECT_EQ(results[1].status, IFAB_ALREADY_EXISTS);
  EXPECT_EQ(client.cancel({7}), 1u);
  ASSERT_TRUE(client.drain());
  const Verdict again = client.submit({.id = 7, .prompt = prompt_of(9, 2), .max_tokens = 2});
  EXPECT_EQ(again.status, IFAB_OK) << again.text;
  ASSERT_TRUE(client.drain());
  expect_answer(engine, {.id = 7, .prompt = prompt_of(9, 2), .max_tokens = 2}, client.outcome(7));
}

TEST(Ids, ComeFreeWithTheEndOfACancelledRequestAndNotBefore) {
  SimulatedEngine engine;
  engine.slots = 1;
  Client client(engine);
  for (uint64_t round = 0; round < 500; ++round) {
    const Ask first{.id = 1, .prompt = prompt_of(3, round), .max_tokens = 30};
    const Ask second{.id = 1, .prompt = prompt_of(4, round), .max_tokens = 2};
    ASSERT_EQ(client.submit(first).status, IFAB_OK);
    client.cancel({1});
    ASSERT_TRUE(client.drain());
    ASSERT_EQ(client.submit(second).status, IFAB_OK);  // the late cancel must not touch it
    ASSERT_TRUE(client.drain());
    expect_answer(engine, second, client.outcome(1));
  }
}

// ---- readers ----

TEST(Reader, WhoNeverPollsStopsTheEngineAndLosesNothing) {
  SimulatedEngine engine;
  Client client(engine);
  std::vector<Ask> asks;
  for (uint64_t id = 0; id < 2000; ++id) {
    asks.push_back({.id = id, .prompt = prompt_of(8, id), .max_tokens = 40, .flags = IFAB_REQUEST_LOGPROBS});
  }
  client.submit(asks);
  ASSERT_TRUE(client.wait_for([](const ifab_stats_t& stats) { return stats.held_back == 1; }));
  const ifab_stats_t held = client.stats();
  EXPECT_GT(held.events_pending, 0u);
  EXPECT_LT(held.events_pending, 8192u);  // some steps' worth, whatever is in flight
  EXPECT_EQ(client.cancel({1999}), 1u);   // heard, although nothing moves
  client.submit({.id = 5000, .prompt = prompt_of(8, 1)});
  EXPECT_EQ(client.stats().steps, held.steps);
  ASSERT_TRUE(client.drain());
  for (uint64_t id = 0; id < 1999; ++id) expect_answer(engine, asks[id], client.outcome(id));
  EXPECT_EQ(client.outcome(1999).samples[0].reason, IFAB_FINISH_CANCELLED);
  EXPECT_EQ(client.stats().held_back, 0u);
  EXPECT_TRUE(client.violations().empty()) << client.violations().front();
}

TEST(Reader, IsToldThatEndsWaitForHimToo) {
  SimulatedEngine engine;
  Client client(engine);
  std::vector<Ask> asks;
  std::vector<uint64_t> ids;
  for (uint64_t id = 0; id < 3000; ++id) {
    asks.push_back({.id = id, .prompt = prompt_of(8, id), .max_tokens = 40});
    ids.push_back(id);
  }
  client.submit(asks);
  ASSERT_TRUE(client.wait_for([](const ifab_stats_t& stats) { return stats.held_back == 1; }));
  client.cancel(ids);
  // One more round of the loop, at least: the cancelled ones that found a place have ended.
  ASSERT_TRUE(client.wait_for([](const ifab_stats_t& stats) { return stats.requests_cancelled > 0; }));
  ASSERT_TRUE(client.wait_for([](const ifab_stats_t& stats) { return stats.held_back == 1; }));
  ASSERT_TRUE(client.drain());
  EXPECT_EQ(client.stats().held_back, 0u);
  EXPECT_TRUE(client.violations().empty()) << client.violations().front();
}

TEST(Stats, NoCounterFallsWhileOthersComeAndGo) {
  SimulatedEngine engine;
  Client client(engine);
  uint64_t last = 0;
  for (uint64_t id = 0; id < 400; ++id) {
    client.submit({.id = id, .prompt = prompt_of(8, id), .max_tokens = 1});
    for (int i = 0; i < 50; ++i) {
      const uint64_t idle = client.stats().idle_us;
      ASSERT_GE(idle, last);
      last = idle;
    }
    ASSERT_TRUE(client.drain());
  }
}

TEST(Reader, HoldsBackPromptScoresByTheirRoom) {
  SimulatedEngine engine;
  Client client(engine);
  std::vector<Ask> asks;
  for (uint64_t id = 0; id < 64; ++id) {
    asks.push_back({.id = id, .prompt = prompt_of(1000, id), .max_tokens = 1, .flags = IFAB_REQUEST_PROMPT_LOGPROBS});
  }
  client.submit(asks);
  ASSERT_TRUE(client.wait_for([](const ifab_stats_t& stats) { return stats.events_pending >= 12; }));
  EXPECT_GT(client.stats().queued, 0u);
  ASSERT_TRUE(client.drain());
  for (const Ask& ask : asks) EXPECT_EQ(client.outcome(ask.id).prompt_logprobs.size(), 1000u);
}

TEST(Reader, IsWokenWithoutAnEvent) {
  Client client({});
  ifab_engine_wake(client.engine());
  const auto start = steady_clock::now();
  EXPECT_EQ(client.poll(60'000), 0u);
  EXPECT_LT(steady_clock::now() - start, std::chrono::seconds(30));
}

// ---- payloads ----

TEST(Payload, ComesWithTheEndAndNoTokens) {
  for (const char* dtype : {"float32", "float16", "bfloat16"}) {
    SimulatedEngine engine = SimulatedEngine::mining(96);
    engine.payload_dtype = dtype;
    Client client(engine);
    std::vector<Ask> asks;
    for (uint64_t id = 0; id < 300; ++id)
      asks.push_back({.id = id, .prompt = prompt_of(1 + id % 128, id), .max_tokens = 0});
    client.submit(asks);
    ASSERT_TRUE(client.drain());
    for (const Ask& ask : asks) {
      const Outcome& outcome = client.outcome(ask.id);
      ASSERT_EQ(outcome.payload, expected_payload(engine, ask.prompt)) << dtype;
      EXPECT_EQ(outcome.samples[0].reason, IFAB_FINISH_COMPLETE);
      EXPECT_TRUE(outcome.samples[0].tokens.empty());
      EXPECT_EQ(outcome.computed_tokens, ask.prompt.size());
    }
    const ifab_stats_t stats = client.stats();
    EXPECT_EQ(stats.payload_bytes, 300u * expected_payload(engine, {0}).size());
    EXPECT_EQ(stats.payload_slots_used, 0u);
    EXPECT_EQ(stats.kv_blocks_total, 0u);
  }
}

TEST(Payload, WhoseExtractionFailsHarmsNobody) {
  SimulatedEngine engine = SimulatedEngine::mining(64);
  engine.request_faults.push_back({"payload_fails", "prompt_token", 300});
  Client client(engine);
  std::vector<Ask> asks;
  for (uint64_t id = 0; id < 100; ++id) {
    asks.push_back({.id = id, .prompt = prompt_of(20, id), .max_tokens = 0});
    if (id % 10 == 3) asks.back().prompt[5] = 300;
  }
  client.submit(asks);
  ASSERT_TRUE(client.drain());
  for (const Ask& ask : asks) {
    const Outcome& outcome = client.outcome(ask.id);
    EXPECT_EQ(outcome.samples[0].reason, IFAB_FINISH_COMPLETE);
    if (ask.id % 10 == 3) {
      EXPECT_TRUE(outcome.payload.empty());
      EXPECT_EQ(outcome.payloads_missing, 1u);
      EXPECT_EQ(outcome.text, "simulated failure of the extraction");
    } else {
      EXPECT_EQ(outcome.payload, expected_payload(engine, ask.prompt));
    }
  }
  EXPECT_EQ(client.stats().payload_failures, 10u);
  EXPECT_EQ(client.stats().payload_slots_used, 0u);
}

TEST(Payload, ThatIsNotWantedTakesNoRoom) {
  Client client(SimulatedEngine::mining(64));
  client.submit({.id = 1, .prompt = prompt_of(20, 1), .max_tokens = 0, .flags = IFAB_REQUEST_NO_PAYLOAD});
  ASSERT_TRUE(client.drain());
  EXPECT_EQ(client.outcome(1).payloads, 0u);
  EXPECT_EQ(client.outcome(1).payloads_missing, 0u);
  EXPECT_EQ(client.stats().payload_bytes, 0u);
}

TEST(Payload, OfASlowReaderHoldsBackAdmissionOnly) {
  SimulatedEngine engine = SimulatedEngine::mining(64);
  Client client(engine);
  std::vector<Ask> asks;
  for (uint64_t id = 0; id < 200; ++id) asks.push_back({.id = id, .prompt = prompt_of(20, id), .max_tokens = 0});
  client.submit(asks);
  ASSERT_TRUE(
      client.wait_for([](const ifab_stats_t& stats) { return stats.payload_slots_used == stats.payload_slots_total; }));
  EXPECT_EQ(client.stats().payload_slots_total, 2u * engine.slots);
  EXPECT_EQ(client.cancel({199}), 1u);
  ASSERT_TRUE(client.drain());
  for (uint64_t id = 0; id < 199; ++id)
    EXPECT_EQ(client.outcome(id).payload, expected_payload(engine, asks[id].prompt));
  EXPECT_EQ(client.stats().progress_only_steps, 0u);  // a reader that is slow is no lack of room in the batcher
}

TEST(Payload, OfAGeneratingEngineGoesWithTheFirstSample) {
  SimulatedEngine engine;
  engine.payload_dtype = "float32";
  Client client(engine);
  const Ask ask{.id = 1, .prompt = prompt_of(20, 1), .max_tokens = 5, .samples = 3};
  client.submit(ask);
  ASSERT_TRUE(client.drain());
  expect_answer(engine, ask, client.outcome(1));
  EXPECT_EQ(client.outcome(1).payloads, 1u);
  EXPECT_EQ(client.outcome(1).payload, expected_payload(engine, ask.prompt));
}

// ---- faults of the engine ----

TEST(Fault, StallsEndByProgressOnlySteps) {
  SimulatedEngine engine;
  engine.step_faults = {{"stall", 3, 0}, {"stall", 9, 10}, {"stall", 30, 0}};
  Client client(engine);
  std::vector<Ask> asks;
  for (uint64_t id = 0; id < 40; ++id) asks.push_back({.id = id, .prompt = prompt_of(30, id), .max_tokens = 30});
  client.submit(asks);
  ASSERT_TRUE(client.drain());
  for (const Ask& ask : asks) expect_answer(engine, ask, client.outcome(ask.id));
  EXPECT_GT(client.stats().progress_only_steps, 0u);
  EXPECT_LT(client.stats().progress_tick, client.stats().steps + 40);  // steps that stood still did not count
}

TEST(Fault, ABatcherWithoutRoomForOneFailsThatOne) {
  SimulatedEngine engine;
  engine.request_faults = {{"no_room", "prompt_token", 300, 1'000'000}, {"no_room", "prompt_token", 301, 0}};
  Client client(engine);
  std::vector<Ask> asks;
  for (uint64_t id = 0; id < 40; ++id) asks.push_back({.id = id, .prompt = prompt_of(30, id), .max_tokens = 30});
  asks[11].prompt[0] = 300;
  asks[12].prompt[0] = 301;
  client.submit(asks);
  ASSERT_TRUE(client.drain());
  for (const Ask& ask : asks) {
    if (ask.id != 11) expect_answer(engine, ask, client.outcome(ask.id));
  }
  EXPECT_EQ(client.outcome(11).status, IFAB_RESOURCE_EXHAUSTED);
  EXPECT_EQ(client.outcome(11).text, "the engine found no room, although it was empty, in 16 tries");
}

TEST(Fault, OfOneRequestIsItsOwn) {
  SimulatedEngine engine;
  engine.request_faults = {{"fail_request", "prompt_token", 300}, {"wrong_order", "prompt_token", 301}};
  Client client(engine);
  std::vector<Ask> asks;
  for (uint64_t id = 0; id < 40; ++id)
    asks.push_back({.id = id, .prompt = prompt_of(30, id), .max_tokens = 30, .samples = 2});
  asks[5].prompt[29] = 300;
  asks[6].prompt[29] = 301;
  client.submit(asks);
  ASSERT_TRUE(client.drain());
  for (const Ask& ask : asks) {
    if (ask.id != 5 && ask.id != 6) expect_answer(engine, ask, client.outcome(ask.id));
  }
  EXPECT_EQ(client.outcome(5).status, IFAB_INTERNAL);
  EXPECT_EQ(client.outcome(5).text, "simulated failure of this request");
  EXPECT_EQ(client.outcome(6).status, IFAB_INTERNAL);
  EXPECT_EQ(client.outcome(6).text, "the engine broke the order of its events: tokens before the context was done");
  ASSERT_TRUE(client.wait_for([](const ifab_stats_t& stats) { return stats.active == 0; }));
  EXPECT_EQ(client.stats().requests_failed, 2u);
}

TEST(Fault, AnExceptionInAStepFailsEverythingInFlightAndTheEngine) {
  SimulatedEngine engine;
  engine.step_faults = {{"throw", 20, 0}};
  Client client(engine);
  std::vector<Ask> asks;
  for (uint64_t id = 0; id < 3000; ++id)
    asks.push_back({.id = id, .prompt = prompt_of(30, id), .max_tokens = 100, .samples = 2});
  client.submit(asks);
  ASSERT_TRUE(client.drain());
  for (const Ask& ask : asks) {
    const Outcome& outcome = client.outcome(ask.id);
    ASSERT_EQ(outcome.failures, 1u);
    EXPECT_EQ(outcome.status, IFAB_UNAVAILABLE);
    EXPECT_EQ(outcome.text, "the engine has failed: simulated exception in a step");
  }
  const ifab_stats_t stats = client.stats();
  EXPECT_EQ(stats.engine_failed, 1u);
  EXPECT_EQ(stats.requests_failed, 3000u);
  EXPECT_EQ(stats.queued, 0u);
  const Verdict verdict = client.submit({.id = 1, .prompt = prompt_of(30, 1)});
  EXPECT_EQ(verdict.status, IFAB_UNAVAILABLE);
  EXPECT_EQ(client.cancel({1}), 0u);
  EXPECT_TRUE(client.violations().empty()) << client.violations().front();
}

// ---- the end ----

TEST(Destroy, DropsWhatIsInFlightWithinAStep) {
  SimulatedEngine engine = slow();
  engine.step_faults = {{"slow_step", 5, 3'600'000}};
  const auto client = std::make_unique<Client>(engine);
  std::vector<Ask> asks;
  for (uint64_t id = 0; id < 1000; ++id) asks.push_back({.id = id, .prompt = prompt_of(30, id), .max_tokens = 200});
  client->submit(asks);
  while (client->poll(1000) == 0) {
  }
  ifab_engine_t* destroyed = client->engine();
  const auto start = steady_clock::now();
  client->destroy();
  EXPECT_LT(steady_clock::now() - start, std::chrono::seconds(30));
  EXPECT_NE(destroyed, nullptr);
  EXPECT_EQ(client->engine(), nullptr);
}

TEST(Destroy, OfAnIdleEngineIsPrompt) {
  const auto start = steady_clock::now();
  {
    Client client({});
  }
  EXPECT_LT(steady_clock::now() - start, std::chrono::seconds(30));
}

}  // namespace
}  // namespace ifab::test
