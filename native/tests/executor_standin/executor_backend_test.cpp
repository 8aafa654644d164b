// SPDX-License-Identifier: Apache-2.0
//
// The executor backend on the stand-in: what of the runtime's awkwardness reaches those above, and in which form.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>

#include "client.h"
#include "control.h"
#include "driver.h"
#include "expected.h"

namespace ifab::standin {
namespace {

using executor::Activity;
using test::Ask;
using test::prompt_of;
using test::SimulatedEngine;

SimulatedEngine small() {
  SimulatedEngine engine;
  engine.slots = 8;
  engine.samples_max = 4;
  engine.step_token_budget = 64;
  engine.kv_pool_blocks = 256;
  engine.end_one_in = 40;
  return engine;
}

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

class ExecutorBackendTest : public ::testing::Test {
 protected:
  void SetUp() override { reset(); }
  void TearDown() override { reset(); }
  static void reset() {
    Control& process = control();
    process.gate.open();
    process.world_size = 1;
    process.register_plugins = true;
    process.semantics.reset();
    process.card_fails = false;
    process.requests.clear();
    process.calls.clear();
  }
  // Loads, and expects to be refused; returns why.
  static std::string refusal(const SimulatedEngine& engine, const Patches& patches) {
    try {
      const Driver driver(engine, patches);
    } catch (const std::runtime_error& error) {
      return error.what();
    }
    return "loaded";
  }
};

#define EXPECT_SAYS(text, words) EXPECT_NE((text).find(words), std::string::npos) << (text)

// ---- load ----

TEST_F(ExecutorBackendTest, BringsTheRuntimeUpInOrder) {
  SimulatedEngine engine = small();
  engine.payload_dtype = "float16";
  const Driver driver(engine);
  std::vector<std::string> calls = control().calls;
  std::erase(calls, "plugins");  // once a process: an earlier test may have had it
  EXPECT_EQ(calls, (std::vector<std::string>{"tensors", "mpi", "executor"}));
  if (control().calls.size() > calls.size()) {
    EXPECT_EQ(control().calls.front(), "plugins");
  }
}

TEST_F(ExecutorBackendTest, StatesEveryFieldOfTheConfiguration) {
  const Driver plain(small());
  // Parts that are stated by leaving them out, as executor.json says of each.
  const std::vector<std::string> absent = {"peftCache", "logitsPostProcessor", "debug",
                                           "specDec",   "cacheTransceiver",    "kvCache.crossKvCacheFraction"};
  std::vector<std::string> expected = absent;
  expected.insert(expected.end(), {"kvCache.sinkTokenLength", "guidedDecoding"});
  EXPECT_EQ(control().configuration->unstated(), expected);
}

TEST_F(ExecutorBackendTest, StatesOfAnAbsentCacheWhatTheRuntimeLetsOneState) {
  const Driver mining(SimulatedEngine::mining(64));
  const std::vector<std::string> unstated = control().configuration->kvCache.value.unstated();
  EXPECT_EQ(unstated, (std::vector<std::string>{"crossKvCacheFraction", "maxAttentionWindowVec", "sinkTokenLength",
                                                "freeGpuMemoryFraction"}));
}

TEST_F(ExecutorBackendTest, ListsTheTensorsOnTheCardThatRunsTheEngine) {
  SimulatedEngine engine = small();
  engine.payload_dtype = "float16";
  const Driver driver(engine, {.executor = R"({"devices": [3]})"});
  EXPECT_EQ(control().listed_on, 3);
}

TEST_F(ExecutorBackendTest, StatesWhatContractAndSettingsSay) {
  const Driver driver(small(), {.executor = R"({"guided_decoding": "xgrammar", "trt_overlap": true,
      "scheduler": {"chunking_policy": "equal_progress"}, "devices": [3], "max_idle_us": 7000000,
      "kv_cache": {"offload_priority": 12, "sink_tokens": 4, "max_attention_window": [512, 1280]},
      "performance": {"cuda_graph_cache": 9}, "weights": {"gpu_percent": 0.75}})"});
  const tensorrt_llm::executor::ExecutorConfig& config = *control().configuration;
  for (const std::string& name : config.unstated()) {
    EXPECT_TRUE(name != "guidedDecoding" && name != "kvCache.sinkTokenLength") << name;
  }
  EXPECT_EQ(config.maxBatchSize.value, 8);
  EXPECT_EQ(config.maxNumTokens.value, 64);
  EXPECT_EQ(config.maxQueueSize.value, 32);
  EXPECT_EQ(config.scheduler.value.getContextChunkingPolicy(),
            tensorrt_llm::executor::ContextChunkingPolicy::kEQUAL_PROGRESS);
  EXPECT_FALSE(config.scheduler.value.getDynamicBatchConfig().has_value());
  EXPECT_TRUE(config.enableTrtOverlap.value);
  EXPECT_EQ(config.parallel.value->deviceIds.value, std::vector<int32_t>{3});
  EXPECT_EQ(config.maxSeqIdleMicroseconds.value, 7'000'000u);
  EXPECT_EQ(config.kvCache.value.secondaryOffloadMinPriority.value, 12);
  EXPECT_EQ(config.kvCache.value.sinkTokenLength.value, 4);
  EXPECT_EQ(config.kvCache.value.maxAttentionWindowVec.value, (std::vector<int32_t>{512, 1280}));
  EXPECT_EQ(config.kvCache.value.maxTokens.value, 256 * 16);
  EXPECT_FLOAT_EQ(config.kvCache.value.freeGpuMemoryFraction.value, 0.5f);
  EXPECT_EQ(config.perfKnobs.value.cudaGraphCacheSize.value, 9);
  EXPECT_FLOAT_EQ(config.gpuWeightsPercent.value, 0.75f);
}

TEST_F(ExecutorBackendTest, TakesThePoolFromTheRuntime) {
  Driver driver(small());
  EXPECT_EQ(driver.backend().facts().kv_pool_blocks, 256u);
  EXPECT_EQ(driver.backend().facts().samples_max, 8u);
  EXPECT_FALSE(driver.backend().facts().scoring);
}

TEST_F(ExecutorBackendTest, IsOneInAProcess) {
  {
    const Driver first(small());
    EXPECT_SAYS(refusal(small(), {}), "one process an engine");
  }
  EXPECT_EQ(refusal(small(), {}), "loaded");
}

TEST_F(ExecutorBackendTest, SaysWhatTheRuntimeRefuses) {
  EXPECT_SAYS(refusal(small(), {.contract = R"({"runtime": {"version": "1.2.2"}})"}),
              "runtime.version: 1.2.2, and this is TensorRT-LLM 1.2.1");
  control().world_size = 2;
  EXPECT_SAYS(refusal(small(), {}), "the runtime refuses the engine: the world has another size");
  control().world_size = 1;
  EXPECT_SAYS(refusal(small(), {.plan = R"({"tokens_an_answer": "x"})"}), "the runtime refuses the engine");
  EXPECT_EQ(refusal(small(), {}), "loaded") << "what was refused has left the process free";
}

TEST_F(ExecutorBackendTest, LooksUpOutputsBeforeTheyAreUsed) {
  SimulatedEngine engine = small();
  engine.payload_dtype = "float16";
  EXPECT_SAYS(refusal(engine, {.executor = R"({"payload_outputs": ["hidden_0"]})"}),
              "\"hidden_0\", expected an output of the engine: hidden, logits");
  const std::string other_type =
      R"({"outputs": [{"name": "hidden", "extents": [-1, 64], "dtype": "float32", "rows": "sequences"}]})";
  EXPECT_SAYS(refusal(engine, {.plan = other_type}), "hidden is float32, expected float16");
  const std::string whole =
      R"({"outputs": [{"name": "hidden", "extents": [-1, -1, 64], "dtype": "float16", "rows": "sequences"}]})";
  EXPECT_SAYS(refusal(engine, {.plan = whole}), "hidden is [-1, -1, 64], expected [-1, 64]");
  const std::vector<std::string>& calls = control().calls;
  EXPECT_EQ(std::count(calls.begin(), calls.end(), "executor"), 0) << "none of them reached the runtime";
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

TEST_F(ExecutorBackendTest, ARuntimeThatWantsACacheSaysSoAtLoad) {
  const SimulatedEngine engine = SimulatedEngine::mining(64);
  EXPECT_SAYS(refusal(engine, {.plan = R"({"semantics": {"accepts_engines_without_cache": false}})"}),
              "the runtime refuses the engine: the engine has no cache");
  const std::string paged = R"({"build_config": {"plugin_config": {"use_paged_context_fmha": true}}})";
  EXPECT_EQ(refusal(engine, {.config = paged}), "loaded");
  EXPECT_SAYS(
      refusal(engine, {.config = paged, .plan = R"({"semantics": {"accepts_paged_attention_without_cache": false}})"}),
      "the runtime refuses the engine");
}

TEST_F(ExecutorBackendTest, AnOutputWithARowForEachTokenIsFoundAtLoad) {
  const SimulatedEngine engine = SimulatedEngine::mining(64);
  EXPECT_SAYS(refusal(engine, {.plan = R"({"outputs": [
      {"name": "hidden", "extents": [-1, 64], "dtype": "float16", "rows": "tokens"}]})"}),
              "the proving step: a forward pass failed, and with it all requests in it: Encountered an error in "
              "forwardAsync function: final index mismatch");
}

TEST_F(ExecutorBackendTest, APayloadThatIsNotTheContractsIsFoundAtLoad) {
  const SimulatedEngine engine = SimulatedEngine::mining(64);
  EXPECT_SAYS(refusal(engine, {.plan = R"({"simulated": {"hidden_size": 8}})"}),
              "the proving step: the runtime returned output hidden in another form than the contract's");
}

}  // namespace
}  // namespace ifab::standin
