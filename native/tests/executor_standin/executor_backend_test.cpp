// SPDX-License-Identifier: Apache-2.0
//
// The executor backend on the stand-in: what of the runtime's awkwardness reaches those above, and in which form.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>

#include "backend_fixture.h"
#include "client.h"
#include "expected.h"

namespace ifab::standin {
namespace {

using executor::Activity;
using test::Ask;
using test::prompt_of;

std::vector<int32_t> expected(const SimulatedEngine& engine, const Request& request, uint32_t sample = 0) {
  Ask ask;
  ask.prompt = request.prompt;
  ask.max_tokens = request.max_tokens;
  ask.seed = request.sampling.seed + sample;  // the runtime adds the sample's number
  ask.stop_ids = request.stop_ids;
  ask.flags = IFAB_REQUEST_IGNORE_END;  // the stop ids have the end tokens where they count
  return test::expected_tokens(engine, ask, 0);
}

bool let_pass(uint32_t iterations) {
  return control().gate.let_pass(iterations);
}

// ---- answers ----

TEST_F(ExecutorBackendTest, AnswersAreTheEnginesOwn) {
  const SimulatedEngine engine = small();
  Driver driver(engine);
  std::vector<Request> requests;
  for (uint64_t i = 0; i < 8; ++i) {
    Request request = driver.request_of(prompt_of(20 + 7 * i, i), 48);
    request.sampling.seed = i / 2;
    if (i % 3 == 0) request.stop_ids.clear();  // ends are ignored
    requests.push_back(request);
    driver.ask(std::move(request));
  }
  ASSERT_TRUE(driver.run());
  bool stopped = false;
  for (uint64_t i = 0; i < 8; ++i) {
    const Told::Sample& sample = driver.told(i).samples[0];
    EXPECT_EQ(sample.tokens, expected(engine, requests[i])) << i;
    EXPECT_EQ(sample.reason, sample.tokens.size() < 48 ? IFAB_FINISH_STOP : IFAB_FINISH_LENGTH);
    EXPECT_EQ(sample.stop_id, sample.reason == IFAB_FINISH_STOP ? 256 : -1);
    EXPECT_EQ(driver.told(i).computed, 20 + 7 * i);
    stopped = stopped || sample.reason == IFAB_FINISH_STOP;
  }
  EXPECT_TRUE(stopped);
  EXPECT_TRUE(driver.violations().empty());
  EXPECT_EQ(driver.prompt_tokens, 8 * 20 + 7 * 28u) << "counted iteration by iteration";
}

TEST_F(ExecutorBackendTest, StopIdsEndAndAreNotAmongTheTokens) {
  const SimulatedEngine engine = small();
  Driver driver(engine);
  Request request = driver.request_of(prompt_of(20, 1), 48);
  request.stop_ids.clear();
  const std::vector<int32_t> free = expected(engine, request);
  request.stop_ids = {free[9], 256};
  std::sort(request.stop_ids.begin(), request.stop_ids.end());
  driver.ask(request);
  ASSERT_TRUE(driver.run());
  const std::vector<int32_t> before(free.begin(), std::find(free.begin(), free.end(), free[9]));
  EXPECT_EQ(driver.told(0).samples[0].tokens, before);
  EXPECT_EQ(driver.told(0).samples[0].stop_id, free[9]);
}

TEST_F(ExecutorBackendTest, SamplesHaveSeedsOfTheirOwn) {
  const SimulatedEngine engine = small();
  Driver driver(engine);
  Request request = driver.request_of(prompt_of(40, 1), 16);
  request.samples = 4;
  driver.ask(request);
  EXPECT_EQ(driver.backend().room().slots, 4u);
  ASSERT_TRUE(driver.run());
  for (uint32_t sample = 0; sample < 4; ++sample) {
    EXPECT_EQ(driver.told(0).samples[sample].tokens, expected(engine, request, sample)) << sample;
  }
  EXPECT_EQ(driver.backend().room().slots, 8u);
}

TEST_F(ExecutorBackendTest, LogProbabilitiesComeWithoutStreaming) {
  const SimulatedEngine engine = small();
  Driver driver(engine);
  Request request = driver.request_of(prompt_of(20, 1), 12);
  request.logprobs = true;
  driver.ask(request);
  ASSERT_TRUE(driver.run());
  const Told::Sample& sample = driver.told(0).samples[0];
  ASSERT_EQ(sample.tokens, expected(engine, request));
  ASSERT_EQ(sample.log_probs.size(), sample.tokens.size());
  const uint64_t key = simulated::sample_key(test::chain_of(engine, request.prompt), 0, 0);
  EXPECT_FLOAT_EQ(sample.log_probs[3], simulated::logprob_of(simulated::token_word(key, 3)));
  EXPECT_FALSE(control().requests.back().getStreaming());
}

TEST_F(ExecutorBackendTest, SaysEverythingThatARequestAsksFor) {
  Driver driver(small(), {.contract = R"({"capabilities": {"guided_decoding": ["regex"]}})",
                          .executor = R"({"guided_decoding": "xgrammar"})"});
  Request request = driver.request_of(prompt_of(40, 1), 16);
  request.sampling.temperature = 0.5f;
  request.sampling.top_k = 7;
  request.sampling.top_p = 0.9f;
  request.sampling.min_p = 0.1f;
  request.sampling.presence_penalty = 0.25f;
  request.sampling.frequency_penalty = 0.75f;
  request.sampling.repetition_penalty = 1.5f;
  request.sampling.seed = 99;
  request.priority = 50;
  request.salt = 17;
  request.head_ends = {16, 32};
  request.guide_kind = IFAB_GUIDE_REGEX;
  request.guide = "yes|no";
  driver.ask(request);
  const tensorrt_llm::executor::Request& made = control().requests.back();
  EXPECT_EQ(made.getSamplingConfig().getTemperature(), 0.5f);
  EXPECT_EQ(made.getSamplingConfig().getTopK(), 7);
  EXPECT_EQ(made.getSamplingConfig().getTopP(), 0.9f);
  EXPECT_EQ(made.getSamplingConfig().getMinP(), 0.1f);
  EXPECT_EQ(made.getSamplingConfig().getPresencePenalty(), 0.25f);
  EXPECT_EQ(made.getSamplingConfig().getFrequencyPenalty(), 0.75f);
  EXPECT_EQ(made.getSamplingConfig().getRepetitionPenalty(), 1.5f);
  EXPECT_EQ(made.getSamplingConfig().getNumReturnSequences(), 1);
  EXPECT_EQ(made.getClientId(), request.id);
  EXPECT_FALSE(made.getReturnAllGeneratedTokens());
  EXPECT_EQ(made.getSamplingConfig().getSeed(), 99u);
  EXPECT_FLOAT_EQ(made.getPriority(), 0.75f);
  EXPECT_EQ(made.getCacheSaltID(), 17u);
  EXPECT_EQ(made.getEndId(), 256);
  EXPECT_TRUE(made.getOutputConfig().excludeInputFromOutput);
  EXPECT_EQ(made.getKvCacheRetentionConfig()->getTokenRangeRetentionConfigs().front().tokenEnd, 32);
  EXPECT_EQ(made.getGuidedDecodingParams()->getGuideType(),
            tensorrt_llm::executor::GuidedDecodingParams::GuideType::kREGEX);
  ASSERT_TRUE(driver.run());
  EXPECT_EQ(driver.told(0).samples[0].tokens, (std::vector<int32_t>{'y', 'e', 's', '|', 'n', 'o'}));
  EXPECT_EQ(driver.told(0).samples[0].reason, IFAB_FINISH_STOP);
}

TEST_F(ExecutorBackendTest, GreedyIsTheOneLikeliestToken) {
  Driver driver(small());
  Request request = driver.request_of(prompt_of(8, 1), 2);
  request.sampling.top_p = 0.5f;
  driver.ask(request);
  const tensorrt_llm::executor::SamplingConfig made = control().requests.back().getSamplingConfig();
  EXPECT_EQ(made.getTopK(), 1);
  EXPECT_FALSE(made.getTemperature().has_value()) << "0 is none for the runtime";
}

// Ways in which releases differ, or in which nobody knows what they do: the same comes out.
struct Variant {
  const char* name;
  const char* plan;
};

class ExecutorVariant : public ExecutorBackendTest, public ::testing::WithParamInterface<Variant> {};

TEST_P(ExecutorVariant, ComesOutTheSame) {
  SimulatedEngine engine = small();
  engine.payload_dtype = "bfloat16";
  Driver driver(engine, {.plan = GetParam().plan});
  std::vector<Request> requests;
  for (uint64_t i = 0; i < 6; ++i) {
    Request request = driver.request_of(prompt_of(12 + i, i), 24);
    request.want_payload = i != 3;
    request.logprobs = i == 2;
    requests.push_back(request);
    driver.ask(std::move(request));
  }
  ASSERT_TRUE(driver.run());
  for (uint64_t i = 0; i < 6; ++i) {
    const Told::Sample& sample = driver.told(i).samples[0];
    EXPECT_EQ(sample.tokens, expected(engine, requests[i])) << i;
    EXPECT_EQ(sample.reason, sample.tokens.size() < 24 ? IFAB_FINISH_STOP : IFAB_FINISH_LENGTH);
    EXPECT_EQ(sample.payload_failure, "");
    if (i == 3) continue;
    EXPECT_EQ(driver.told(i).payload, test::expected_payload(engine, requests[i].prompt)) << i;
  }
  EXPECT_TRUE(driver.violations().empty());
}

INSTANTIATE_TEST_SUITE_P(
    Executor, ExecutorVariant,
    ::testing::Values(Variant{"AsKnown", ""}, Variant{"EndIdInOutput", R"({"semantics": {"end_id_in_output": true}})"},
                      Variant{"BareOutputNames", R"({"semantics": {"outputs_say_their_phase": false}})"},
                      Variant{"OutputsAtTheEnd", R"({"semantics": {"outputs_with_first_answer": false}})"},
                      Variant{"OutputsOnTheCard", R"({"semantics": {"outputs_on_card": true}})"},
                      Variant{"NoReasons", R"({"semantics": {"reasons_are_given": false}})"},
                      Variant{"SeveralTokensAnAnswer", R"({"tokens_an_answer": 5})"}),
    [](const auto& tested) { return std::string(tested.param.name); });

TEST_F(ExecutorBackendTest, SeveralTokensOfASampleInAStepStayWithinItsLimits) {
  SimulatedEngine engine = small();
  engine.end_one_in = 0;
  engine.step_token_budget = 8;
  engine.max_input_tokens = 64;
  Driver driver(engine, {.plan = R"({"tokens_an_answer": 40})"});
  driver.ask(prompt_of(8, 1), 100);
  driver.ask(prompt_of(8, 2), 100);
  ASSERT_TRUE(driver.run());
  for (uint64_t id = 0; id < 2; ++id) {
    EXPECT_EQ(driver.told(id).samples[0].tokens.size(), 100u);
    EXPECT_GT(driver.told(id).most_tokens_at_once, 1u);
    EXPECT_LE(driver.told(id).most_tokens_at_once, 16u) << "the budget and a token a slot";
  }
}

// ---- heads, room, stalls ----

TEST_F(ExecutorBackendTest, AHeadIsComputedOnceAndAdmissionIsTold) {
  const SimulatedEngine engine = small();
  Driver driver(engine);
  control().gate.close();
  std::vector<int32_t> head = prompt_of(160, 1);
  const auto prompt = [&](uint64_t salt) {
    std::vector<int32_t> whole = head;
    const std::vector<int32_t> tail = prompt_of(10, 100 + salt);
    whole.insert(whole.end(), tail.begin(), tail.end());
    return whole;
  };
  driver.ask(prompt(0), 60);
  const Request follower = driver.request_of(prompt(1), 4);
  EXPECT_TRUE(driver.backend().need(follower).leader_computes);
  control().gate.open();
  ASSERT_TRUE(driver.run_until([&] { return driver.told(0).contexts_done == 1; }));
  const Need need = driver.backend().need(follower);
  if (!driver.told(0).ended()) {
    EXPECT_FALSE(need.leader_computes);
    EXPECT_EQ(need.blocks_ever - need.blocks, 10u) << "the head's full blocks";
    EXPECT_EQ(need.prompt_tokens, 10u);
  }
  for (uint64_t i = 1; i < 4; ++i) driver.ask(prompt(i), 4);
  ASSERT_TRUE(driver.run());
  for (uint64_t i = 1; i < 4; ++i) EXPECT_EQ(driver.told(i).cached, 160u);
  EXPECT_EQ(driver.prompt_tokens, 170 + 3 * 10u);
}

TEST_F(ExecutorBackendTest, RoomComesBackWholeHoweverRequestsEnd) {
  SimulatedEngine engine = small();
  engine.request_faults = {{"fail_request", "prompt_token", 300, 0}};
  Driver driver(engine);
  const Room empty = driver.backend().room();
  EXPECT_EQ(empty.blocks, 256u);
  driver.ask(prompt_of(33, 1), 15);
  EXPECT_EQ(driver.backend().room().blocks, 256u - 3);
  driver.ask(prompt_of(33, 1), 15);
  EXPECT_EQ(driver.backend().room().blocks, 256u - 4) << "two full blocks of the prompt are shared";
  driver.ask({1, 2, 300}, 4);
  const uint64_t cancelled = driver.ask(prompt_of(60, 3), 200);
  driver.cancel(cancelled);
  ASSERT_TRUE(driver.run());
  EXPECT_TRUE(driver.told(2).failed);
  EXPECT_EQ(driver.told(2).status.code(), IFAB_INTERNAL);
  EXPECT_EQ(driver.backend().room().blocks, empty.blocks);
  EXPECT_EQ(driver.backend().room().slots, empty.slots);
}

TEST_F(ExecutorBackendTest, AWaitForALeadersBlockIsNoStall) {
  Driver driver(small());
  control().gate.close();
  // Both go to the runtime, which holds the second one back for as long as the head is computed: four iterations, in
  // which nothing comes back.
  driver.ask(prompt_of(256, 1), 2);
  driver.ask(prompt_of(256, 1), 2);
  driver.step();
  for (int i = 0; i < 3; ++i) {
    ASSERT_TRUE(let_pass(1));
    const StepReport report = driver.step();
    EXPECT_TRUE(report.progressed);
    EXPECT_EQ(report.prompt_tokens, 64u);
    EXPECT_EQ(driver.backend().activity(), Activity::kHoldingBack);
    EXPECT_EQ(driver.told(0).contexts_done + driver.told(1).contexts_done, 0u);
  }
  control().gate.open();
  ASSERT_TRUE(driver.run());
  EXPECT_EQ(driver.told(0).cached + driver.told(1).cached, 240u) << "its full blocks but the last token's";
}

TEST_F(ExecutorBackendTest, IterationsThatScheduleNothingAreAStall) {
  SimulatedEngine engine = small();
  engine.request_faults = {{"stall", "prompt_token", 300, 5}};
  Driver driver(engine);
  control().gate.close();
  driver.ask({1, 300, 2}, 4);
  ASSERT_TRUE(let_pass(1));
  driver.step();
  ASSERT_TRUE(let_pass(2));
  const StepReport still = driver.step();
  EXPECT_FALSE(still.progressed);
  EXPECT_EQ(driver.backend().activity(), Activity::kStandingStill);
  const StepReport quiet = driver.step();
  EXPECT_FALSE(quiet.progressed);
  EXPECT_EQ(driver.backend().activity(), Activity::kQuiet) << "no iteration at all";
  control().gate.open();
  EXPECT_TRUE(driver.run());
}

// ---- faults ----

TEST_F(ExecutorBackendTest, AGuideThatCannotBeReadDoesNotGetIn) {
  const Driver driver(small(), {.contract = R"({"capabilities": {"guided_decoding": ["json_schema"]}})",
                                .executor = R"({"guided_decoding": "xgrammar"})"});
  const auto compiled = [&](int32_t kind, std::string_view text) {
    std::shared_ptr<const CompiledGuide> guide;
    const Status status = const_cast<Driver&>(driver).backend().compile_guide(kind, text, guide);
    EXPECT_EQ(status.ok(), guide != nullptr);
    return status.code();
  };
  for (const auto& [kind, text] : {std::pair{IFAB_GUIDE_JSON_SCHEMA, R"({"type": "object"})"},
                                   {IFAB_GUIDE_REGEX, "yes|no"},
                                   {IFAB_GUIDE_GRAMMAR, "root ::= \"yes\" | \"no\""}}) {
    EXPECT_EQ(compiled(kind, text), IFAB_OK) << text;
  }
  for (const auto& [kind, text] : {std::pair{IFAB_GUIDE_JSON_SCHEMA, "{"},
                                   {IFAB_GUIDE_JSON_SCHEMA, R"({"type": 5})"},
                                   {IFAB_GUIDE_REGEX, "(yes"},
                                   {IFAB_GUIDE_GRAMMAR, "root ::= other"}}) {
    EXPECT_EQ(compiled(kind, text), IFAB_INVALID_ARGUMENT) << text;
  }
  EXPECT_EQ(compiled(IFAB_GUIDE_JSON_SCHEMA, R"({"not": {"type": "null"}})"), IFAB_UNIMPLEMENTED);
}

TEST_F(ExecutorBackendTest, AGuideThatOnlyTheRuntimeRefusesFailsItsPass) {
  Driver driver(small(), {.contract = R"({"capabilities": {"guided_decoding": ["json_schema"]}})",
                          .executor = R"({"guided_decoding": "xgrammar"})"});
  control().gate.close();
  Request wrong = driver.request_of(prompt_of(8, 1), 4);
  wrong.guide_kind = IFAB_GUIDE_JSON_SCHEMA;
  wrong.guide = "{";
  driver.ask(prompt_of(8, 2), 4);
  driver.ask(wrong);
  control().gate.open();
  ASSERT_TRUE(driver.run());
  for (uint64_t id = 0; id < 2; ++id) EXPECT_EQ(driver.told(id).status.code(), IFAB_INTERNAL) << id;
  EXPECT_TRUE(driver.failure.ok());
}

TEST_F(ExecutorBackendTest, AnErrorThatArrivesAsAnAnswerIsTheRequestsOwn) {
  Driver driver(small(), {.contract = R"({"capabilities": {"guided_decoding": ["json_schema"]}})",
                          .executor = R"({"guided_decoding": "xgrammar"})",
                          .plan = R"({"semantics": {"guides_are_read_in_the_pass": false}})"});
  Request wrong = driver.request_of(prompt_of(8, 1), 4);
  wrong.guide_kind = IFAB_GUIDE_JSON_SCHEMA;
  wrong.guide = "{";
  driver.ask(prompt_of(8, 2), 4);
  driver.ask(wrong);
  driver.ask(prompt_of(8, 3), 4);
  ASSERT_TRUE(driver.run());
  EXPECT_TRUE(driver.told(1).failed);
  EXPECT_EQ(driver.told(1).status.code(), IFAB_INVALID_ARGUMENT);
  EXPECT_EQ(driver.told(1).status.message(), "guide: the runtime does not take it: the JSON schema cannot be parsed");
  EXPECT_FALSE(driver.told(0).failed || driver.told(2).failed);
}

TEST_F(ExecutorBackendTest, AForwardPassThatThrowsFailsItsBatchAndNoMore) {
  SimulatedEngine engine = small();
  engine.request_faults = {{"throw", "prompt_token", 300, 0}};
  Driver driver(engine);
  control().gate.close();
  driver.ask(prompt_of(8, 1), 16);
  Request several = driver.request_of({1, 300, 2}, 4);
  several.samples = 3;
  driver.ask(several);
  control().gate.open();
  ASSERT_TRUE(driver.run());
  for (uint64_t id = 0; id < 2; ++id) {
    ASSERT_TRUE(driver.told(id).failed) << id;
    EXPECT_EQ(driver.told(id).status.code(), IFAB_INTERNAL) << "which brokers run again, apart from each other";
    EXPECT_SAYS(driver.told(id).status.message(), "a forward pass failed, and with it all requests in it");
  }
  driver.ask(prompt_of(8, 1), 16);
  ASSERT_TRUE(driver.run());
  EXPECT_FALSE(driver.told(2).failed);
  EXPECT_TRUE(driver.failure.ok());
  EXPECT_EQ(driver.backend().room().slots, 8u);
}

TEST_F(ExecutorBackendTest, ARequestThatFailsEveryPassDoesNotEndTheEngine) {
  SimulatedEngine engine = small();
  engine.request_faults = {{"throw", "prompt_token", 300, 0}};
  Driver driver(engine);
  // As brokers run it again, alone.
  for (uint64_t turn = 0; turn < 7; ++turn) {
    driver.ask({1, 300, 2}, 4);
    ASSERT_TRUE(driver.run()) << turn;
    EXPECT_EQ(driver.told(turn).status.code(), IFAB_INTERNAL) << turn;
  }
  driver.ask(prompt_of(8, 1), 4);
  ASSERT_TRUE(driver.run());
  EXPECT_EQ(driver.told(7).samples[0].tokens.size(), 4u);
  EXPECT_EQ(driver.backend().room().slots, 8u);
  EXPECT_TRUE(driver.violations().empty());
}

TEST_F(ExecutorBackendTest, FailuresWithSuccessesBetweenAskForNoPromptOfOurOwn) {
  SimulatedEngine engine = small();
  engine.request_faults = {{"throw", "prompt_token", 300, 0}};
  Driver driver(engine);
  control().requests.clear();
  for (int turn = 0; turn < 4; ++turn) {
    driver.ask({1, 300, 2}, 4);
    ASSERT_TRUE(driver.run());
    driver.ask(prompt_of(8, 1), 4);
    ASSERT_TRUE(driver.run());
  }
  EXPECT_EQ(control().requests.size(), 8u);
}

TEST_F(ExecutorBackendTest, ACardThatFailsEveryPassIsGivenUp) {
  Driver driver(small());
  control().card_fails = true;
  for (int turn = 0; turn < 2; ++turn) {
    driver.ask(prompt_of(8, 1), 4);
    ASSERT_TRUE(driver.run()) << turn;
  }
  driver.ask(prompt_of(8, 1), 4);
  EXPECT_FALSE(driver.run());
  EXPECT_EQ(driver.failure.code(), IFAB_UNAVAILABLE);
  EXPECT_SAYS(driver.failure.message(), "3 forward passes in a row failed, and one of a prompt of our own");
}

TEST_F(ExecutorBackendTest, AFullQueueSaysNothingOfTheCard) {
  Driver driver(small(), {.executor = R"({"max_queue_size": 8})"});
  control().card_fails = true;
  control().gate.close();
  for (uint64_t turn = 0; turn < 2; ++turn) {
    driver.ask(prompt_of(8, 1), 4);
    ASSERT_TRUE(let_pass(1));
    while (!driver.told(turn).ended()) (void)driver.step();
  }
  driver.ask(prompt_of(8, 1), 4);
  ASSERT_TRUE(let_pass(1));
  for (int i = 0; i < 8; ++i) driver.cancel(driver.ask(prompt_of(8, 1), 4));
  (void)driver.step();
  EXPECT_TRUE(driver.told(2).failed);
  EXPECT_TRUE(driver.failure.ok()) << driver.failure.message();
  control().card_fails = false;
  control().gate.open();
}

TEST_F(ExecutorBackendTest, ACardThatHangsAfterFailuresIsGivenUpInTime) {
  SimulatedEngine engine = small();
  engine.longest_step_ms = 300;
  Driver driver(engine);
  control().card_fails = true;
  control().gate.close();
  for (int turn = 0; turn < 3; ++turn) {
    driver.ask(prompt_of(8, 1), 4);
    ASSERT_TRUE(let_pass(1));
    while (!driver.told(static_cast<uint64_t>(turn)).ended()) (void)driver.step();
  }
  EXPECT_EQ(driver.failure.code(), IFAB_UNAVAILABLE) << "no pass more, and so no word of our own prompt";
  control().gate.open();
}

TEST_F(ExecutorBackendTest, ARuntimeThatEndsIsAnEngineFailure) {
  SimulatedEngine engine = small();
  engine.request_faults = {{"throw", "prompt_token", 300, 0}};
  Semantics ends;
  ends.forward_goes_on = false;
  control().semantics = ends;
  Driver driver(engine);
  driver.ask({1, 300, 2}, 4);
  EXPECT_FALSE(driver.run_until([] { return false; }));
  EXPECT_EQ(driver.failure.code(), IFAB_UNAVAILABLE);
}

// ---- cancel ----

TEST_F(ExecutorBackendTest, CancelFreesAtOnceAndReachesTheRuntimeInTime) {
  Driver driver(small());
  control().gate.close();
  const uint64_t active = driver.ask(prompt_of(20, 1), 200);
  ASSERT_TRUE(let_pass(3));
  driver.step();
  const uint64_t queued = driver.ask(prompt_of(20, 2), 200);
  EXPECT_EQ(driver.backend().room().slots, 6u);
  driver.cancel(active);
  driver.cancel(queued);
  driver.cancel(queued);
  EXPECT_EQ(driver.backend().room().slots, 8u);
  control().gate.open();
  driver.ask(prompt_of(20, 1), 4);
  ASSERT_TRUE(driver.run());
  EXPECT_EQ(driver.told(2).samples[0].tokens.size(), 4u);
  driver.cancel(2);  // after its end: nothing
  EXPECT_TRUE(driver.violations().empty());
}

TEST_F(ExecutorBackendTest, WhatHasEndedThereIsNotCancelledThere) {
  SimulatedEngine engine = small();
  engine.end_one_in = 0;
  engine.step_token_budget = 8;
  engine.max_input_tokens = 64;
  Driver driver(engine, {.plan = R"({"tokens_an_answer": 200})"});
  const uint64_t id = driver.ask(prompt_of(8, 1), 100);
  ASSERT_TRUE(driver.run_until([&] { return !driver.told(id).samples[0].tokens.empty(); }));
  ASSERT_FALSE(driver.told(id).ended()) << "it is over there, and has more to tell than fits a step";
  driver.cancel(id);
  EXPECT_TRUE(control().cancels.empty()) << "the runtime would remember the id for ever";
  EXPECT_EQ(driver.backend().room().slots, 8u);
}

TEST_F(ExecutorBackendTest, TheEndCancelsWhatIsLeft) {
  {
    Driver driver(small());
    control().gate.close();
    driver.ask(prompt_of(8, 1), 200);
    ASSERT_TRUE(let_pass(2));
  }
  EXPECT_EQ(control().cancels.size(), 1u) << "the runtime's end would wait for it";
}

TEST_F(ExecutorBackendTest, BlocksInUseAreTheRuntimesOwn) {
  Driver driver(small());
  control().gate.close();
  driver.ask(prompt_of(64, 1), 200);
  ASSERT_TRUE(let_pass(2));
  driver.step();
  EXPECT_GE(driver.backend().kv_blocks_used(), 4u);
}

TEST_F(ExecutorBackendTest, CancellingLogProbabilitiesDoesNotEndTheProcess) {
  Driver driver(small());
  control().gate.close();
  Request request = driver.request_of(prompt_of(20, 1), 200);
  request.logprobs = true;
  const uint64_t id = driver.ask(request);
  ASSERT_TRUE(let_pass(3));
  driver.cancel(id);
  control().gate.open();
  driver.ask(prompt_of(20, 2), 4);
  EXPECT_TRUE(driver.run());
}

TEST_F(ExecutorBackendTest, AFullQueueIsNoRoom) {
  Driver driver(small(), {.executor = R"({"max_queue_size": 8})"});
  control().gate.close();
  for (int i = 0; i < 8; ++i) driver.cancel(driver.ask(prompt_of(8, 1), 4));
  EXPECT_EQ(driver.backend().room().slots, 8u);
  EXPECT_EQ(driver.try_to_ask(driver.request_of(prompt_of(8, 1), 4)), AdmitOutcome::kNoRoom);
  control().gate.open();
  EXPECT_TRUE(driver.run_until(
      [&] { return driver.try_to_ask(driver.request_of(prompt_of(8, 1), 4)) == AdmitOutcome::kAdmitted; }));
}

TEST_F(ExecutorBackendTest, ARuntimeThatDoesNotEndIsLeftBehind) {
  SimulatedEngine engine = small();
  engine.longest_step_ms = 1;
  const auto start = std::chrono::steady_clock::now();
  {
    Driver driver(engine);
    control().gate.jam();
    driver.ask(prompt_of(8, 1), 4);
  }
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(30)) << "an end has a limit";
  EXPECT_SAYS(refusal(engine, {}), "one process an engine");
  control().gate.open();
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::minutes(1);
  while (refusal(engine, {}) != "loaded") ASSERT_LT(std::chrono::steady_clock::now(), deadline);
}

// ---- engines without a cache ----

TEST_F(ExecutorBackendTest, AnEngineWithoutACacheGivesPayloads) {
  const SimulatedEngine engine = SimulatedEngine::mining(64);
  Driver driver(engine);
  EXPECT_EQ(driver.backend().facts().kv_pool_blocks, 0u);
  EXPECT_FALSE(driver.backend().facts().splits_prompts);
  EXPECT_EQ(control().configuration->kvCache.value.enableBlockReuse.value, false);
  for (uint64_t i = 0; i < 12; ++i) driver.ask(prompt_of(10 * i + 1, i), 0);
  ASSERT_TRUE(driver.run());
  for (uint64_t i = 0; i < 12; ++i) {
    EXPECT_EQ(driver.told(i).samples[0].reason, IFAB_FINISH_COMPLETE);
    EXPECT_TRUE(driver.told(i).samples[0].tokens.empty());
    EXPECT_EQ(driver.told(i).payload, test::expected_payload(engine, prompt_of(10 * i + 1, i)));
  }
}

}  // namespace
}  // namespace ifab::standin
