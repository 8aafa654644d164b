// SPDX-License-Identifier: Apache-2.0
//
// The stand-in behaves as the vendor's Executor is known to, and each of these facts is noticed: with the switch of a
// fact turned, and nothing else, its check fails.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "client.h"
#include "control.h"
#include "executor_directory.h"
#include "tensorrt_llm/plugins/api/tllmPlugin.h"

namespace ifab::standin {
namespace {

namespace trt = tensorrt_llm::executor;

using test::prompt_of;
using test::SimulatedEngine;

constexpr std::chrono::seconds kDeadline{60};

// An Executor as a caller without our backend would use it.
class Bench {
 public:
  explicit Bench(const Semantics& semantics, SimulatedEngine engine = small(), Patches patches = {})
      : engine_(std::move(engine)), patches_(std::move(patches)) {
    Control& process = control();
    process.gate.open();
    process.world_size = 1;
    process.semantics = semantics;
    process.card_fails = false;
    process.most_active = 0;
    initTrtLlmPlugins();
    config.setMaxBatchSize(static_cast<int32_t>(engine_.slots));
    config.setMaxNumTokens(static_cast<int32_t>(engine_.step_token_budget));
    cache.setMaxTokens(static_cast<int32_t>(engine_.kv_pool_blocks * engine_.kv_block_tokens));
  }

  static SimulatedEngine small() {
    SimulatedEngine engine;
    engine.slots = 4;
    engine.step_token_budget = 64;
    engine.samples_max = 4;
    engine.kv_pool_blocks = 64;
    return engine;
  }

  trt::Executor& executor() {
    if (executor_ == nullptr) {
      config.setKvCacheConfig(cache);
      write_executor_directory(directory_.path(), engine_, patches_);
      executor_ = std::make_unique<trt::Executor>(directory_.path(), trt::ModelType::kDECODER_ONLY, config);
    }
    return *executor_;
  }
  bool is_refused() {
    try {
      executor();
    } catch (const std::exception&) {
      return true;
    }
    return false;
  }

  trt::IdType ask(const trt::Request& request) { return executor().enqueueRequest(request); }
  trt::IdType ask(size_t prompt, uint64_t salt, int32_t max_tokens) {
    return ask(trt::Request(prompt_of(prompt, salt), max_tokens));
  }

  // Takes what comes until `count` requests are over, or a minute has passed, or the runtime ends.
  const std::vector<trt::Response>& hear(size_t count) {
    const auto deadline = std::chrono::steady_clock::now() + kDeadline;
    size_t over = 0;
    while (over < count && std::chrono::steady_clock::now() < deadline) {
      try {
        for (trt::Response& response : executor().awaitResponses(std::chrono::milliseconds(100))) {
          over += response.hasError() || response.getResult().isFinal ? 1 : 0;
          heard_.push_back(std::move(response));
        }
      } catch (const std::exception&) {
        break;
      }
    }
    return heard_;
  }
  // Everything of one request so far.
  std::vector<trt::Response> of(trt::IdType id) const {
    std::vector<trt::Response> responses;
    for (const trt::Response& response : heard_) {
      if (response.getRequestId() == id) responses.push_back(response);
    }
    return responses;
  }
  bool has_error(trt::IdType id) const {
    const auto responses = of(id);
    return !responses.empty() && responses.back().hasError();
  }
  std::vector<int32_t> tokens(trt::IdType id) const {
    std::vector<int32_t> tokens;
    for (const trt::Response& response : of(id)) {
      const auto& more = response.getResult().outputTokenIds.front();
      tokens.insert(tokens.end(), more.begin(), more.end());
    }
    return tokens;
  }
  trt::IterationStats last_iteration() { return executor().getLatestIterationStats().back(); }

  trt::ExecutorConfig config;
  trt::KvCacheConfig cache;

 private:
  SimulatedEngine engine_;
  Patches patches_;
  test::TemporaryDirectory directory_;
  std::unique_ptr<trt::Executor> executor_;
  std::vector<trt::Response> heard_;
};

trt::Request request_of(size_t prompt, uint64_t salt, int32_t max_tokens) {
  trt::Request request(prompt_of(prompt, salt), max_tokens);
  trt::OutputConfig output;
  output.excludeInputFromOutput = true;
  output.returnPerfMetrics = true;
  request.setOutputConfig(output);
  return request;
}

bool pass(uint32_t iterations) {
  return control().gate.let_pass(iterations);
}

// ---- construction ----

bool plugins_come_first(const Semantics& semantics) {
  Bench bench(semantics);
  control().plugins_registered = false;
  return bench.is_refused();
}

bool world_must_match(const Semantics& semantics) {
  Bench bench(semantics);
  control().world_size = 2;
  return bench.is_refused();
}

bool batch_beyond_engine_throws(const Semantics& semantics) {
  Bench bench(semantics);
  bench.config.setMaxBatchSize(5);
  return bench.is_refused();
}

bool paged_attention_needs_onboarding(const Semantics& semantics) {
  Bench bench(semantics);
  bench.cache.setOnboardBlocks(false);
  return bench.is_refused();
}

bool padded_engines_are_refused(const Semantics& semantics) {
  Bench bench(semantics, Bench::small(),
              {.config = R"({"build_config": {"plugin_config": {"remove_input_padding": false}}})"});
  return bench.is_refused();
}

bool setters_check_values(const Semantics& semantics) {
  const Bench bench(semantics);
  const std::function<void(trt::KvCacheConfig&)> refused[] = {
      [](trt::KvCacheConfig& cache) { cache.setSinkTokenLength(0); },
      [](trt::KvCacheConfig& cache) { cache.setFreeGpuMemoryFraction(1); },
      [](trt::KvCacheConfig& cache) { cache.setMaxTokens(0); },
      [](trt::KvCacheConfig& cache) { cache.setMaxAttentionWindowVec({16, 0}); },
      [](trt::KvCacheConfig& cache) { cache.setAttentionDpEventsGatherPeriodMs(0); },
  };
  return std::all_of(std::begin(refused), std::end(refused), [](const auto& set) {
    trt::KvCacheConfig cache;
    try {
      set(cache);
    } catch (const std::exception&) {
      return true;
    }
    return false;
  });
}

trt::GuidedDecodingConfig guides(trt::GuidedDecodingConfig::GuidedDecodingBackend backend) {
  trt::GuidedDecodingConfig guides(backend);
  guides.setEncodedVocab({"a"});
  guides.setTokenizerStr("{}");
  guides.setStopTokenIds({0});
  return guides;
}

bool llguidance_is_refused(const Semantics& semantics) {
  Bench bench(semantics);
  bench.config.setGuidedDecodingConfig(guides(trt::GuidedDecodingConfig::GuidedDecodingBackend::kLLGUIDANCE));
  return bench.is_refused();
}

bool reuse_needs_paged_attention(const Semantics& semantics) {
  Bench bench(semantics, Bench::small(),
              {.config = R"({"build_config": {"plugin_config": {"use_paged_context_fmha": false}}})"});
  for (int turn = 1; turn <= 2; ++turn) {
    bench.ask(request_of(48, 1, 2));
    bench.hear(1);
  }
  return bench.of(2).back().getResult().requestPerfMetrics->kvCacheMetrics.numReusedBlocks == 0;
}

// ---- taking requests ----

bool validates_in_the_loop(const Semantics& semantics) {
  Bench bench(semantics);
  try {
    const trt::IdType id = bench.ask(2000, 1, 4);
    bench.hear(1);
    return bench.of(id).front().getErrorMsg().starts_with("Encountered an error when fetching new request:");
  } catch (const std::exception&) {
    return false;
  }
}

bool guides_need_configuration(const Semantics& semantics) {
  Bench bench(semantics);
  trt::Request request = request_of(8, 1, 4);
  request.setGuidedDecodingParams(trt::GuidedDecodingParams(trt::GuidedDecodingParams::GuideType::kREGEX, "[a-z]+"));
  const trt::IdType id = bench.ask(request);
  bench.hear(1);
  return bench.has_error(id);
}

bool guides_are_read_in_the_pass(const Semantics& semantics) {
  Bench bench(semantics);
  bench.config.setGuidedDecodingConfig(guides(trt::GuidedDecodingConfig::GuidedDecodingBackend::kXGRAMMAR));
  control().gate.close();
  bench.executor();
  const trt::IdType innocent = bench.ask(request_of(8, 1, 8));
  trt::Request request = request_of(8, 2, 4);
  request.setGuidedDecodingParams(trt::GuidedDecodingParams(trt::GuidedDecodingParams::GuideType::kJSON_SCHEMA, "{"));
  const trt::IdType guilty = bench.ask(request);
  control().gate.open();
  bench.hear(2);
  return bench.has_error(guilty) && bench.has_error(innocent);
}

bool queue_limit_throws(const Semantics& semantics) {
  Bench bench(semantics);
  bench.config.setMaxQueueSize(2);
  control().gate.close();
  bench.executor();
  for (int i = 0; i < 2; ++i) bench.ask(8, 1, 1);
  try {
    bench.ask(8, 1, 1);
  } catch (const std::exception& error) {
    return std::string(error.what()).find("Maximum queue size of 2") != std::string::npos;
  }
  return false;
}

bool output_has_input(const Semantics& semantics) {
  Bench bench(semantics);
  const trt::IdType id = bench.ask(8, 1, 4);
  bench.hear(1);
  return bench.tokens(id).size() == 12;
}

bool end_unset_runs_on(const Semantics& semantics) {
  SimulatedEngine engine = Bench::small();
  engine.end_one_in = 2;
  Bench bench(semantics, engine);
  const trt::IdType id = bench.ask(request_of(8, 1, 64));
  bench.hear(1);
  return bench.tokens(id).size() == 64;
}

bool seed_unset_is_zero(const Semantics& semantics) {
  Bench bench(semantics);
  const trt::IdType first = bench.ask(request_of(8, 1, 8));
  const trt::IdType second = bench.ask(request_of(8, 1, 8));
  bench.hear(2);
  return bench.tokens(first) == bench.tokens(second);
}

// ---- the batch ----

bool takes_at_most_a_batch(const Semantics& semantics) {
  Bench bench(semantics);
  control().gate.close();
  bench.executor();
  for (uint64_t i = 0; i < 6; ++i) bench.ask(8, i, 4);
  return pass(2) && control().most_active == 4;
}

bool holds_back_followers(const Semantics& semantics) {
  Bench bench(semantics);
  control().gate.close();
  bench.executor();
  // Four iterations for the head, which both share to the last block.
  for (int i = 0; i < 2; ++i) bench.ask(request_of(256, 1, 2));
  if (!pass(2)) return false;
  const trt::IterationStats stats = bench.last_iteration();
  return stats.numActiveRequests == 2 && stats.inflightBatchingStats->numScheduledRequests == 1;
}

bool first_blocks_others(const Semantics& semantics) {
  SimulatedEngine engine = Bench::small();
  engine.kv_pool_blocks = 10;
  Bench bench(semantics, engine);
  control().gate.close();
  bench.executor();
  bench.ask(request_of(16, 1, 80));  // 6 of 10 blocks, and its full length counts
  bench.ask(request_of(16, 2, 80));
  bench.ask(request_of(8, 3, 8));  // one block
  if (!pass(3)) return false;
  const trt::IterationStats stats = bench.last_iteration();
  return stats.numActiveRequests == 3 && stats.inflightBatchingStats->numScheduledRequests == 1;
}

bool no_room_is_no_error(const Semantics& semantics) {
  SimulatedEngine engine = Bench::small();
  engine.kv_pool_blocks = 2;
  Bench bench(semantics, engine);
  bench.config.setSchedulerConfig(trt::SchedulerConfig(trt::CapacitySchedulerPolicy::kMAX_UTILIZATION));
  control().gate.close();
  bench.executor();
  const trt::IdType id = bench.ask(request_of(64, 1, 4));
  if (!pass(1)) return false;
  bench.executor().cancelRequest(id);  // the end would wait for it
  const trt::IterationStats stats = bench.last_iteration();
  return stats.numActiveRequests == 1 && stats.inflightBatchingStats->numScheduledRequests == 0 &&
         bench.executor().awaitResponses(std::chrono::milliseconds(0)).empty();
}

SimulatedEngine that_throws() {
  SimulatedEngine engine = Bench::small();
  engine.request_faults = {{"throw", "prompt_token", 300, 0}};
  return engine;
}

trt::Request poison() {
  trt::Request request({1, 300, 2}, 4);
  return request;
}

bool forward_fails_everybody(const Semantics& semantics) {
  Bench bench(semantics, that_throws());
  control().gate.close();
  bench.executor();
  const trt::IdType innocent = bench.ask(request_of(8, 1, 8));
  const trt::IdType guilty = bench.ask(poison());
  control().gate.open();
  bench.hear(2);
  return bench.has_error(innocent) && bench.has_error(guilty) &&
         bench.of(guilty).back().getErrorMsg().starts_with("Encountered an error in forwardAsync function:");
}

bool forward_goes_on(const Semantics& semantics) {
  Bench bench(semantics, that_throws());
  bench.ask(poison());
  bench.hear(1);
  try {
    const trt::IdType next = bench.ask(request_of(8, 1, 4));
    bench.hear(1);
    return bench.of(next).size() == 1 && !bench.has_error(next);
  } catch (const std::exception&) {
    return false;
  }
}

bool misspelt_output_fails_everybody(const Semantics& semantics) {
  Bench bench(semantics);
  control().gate.close();
  bench.executor();
  const trt::IdType innocent = bench.ask(request_of(8, 1, 8));
  trt::Request request = request_of(8, 2, 8);
  trt::OutputConfig output = request.getOutputConfig();
  output.additionalModelOutputs = {trt::AdditionalModelOutput("hidden_0")};
  request.setOutputConfig(output);
  bench.ask(request);
  control().gate.open();
  bench.hear(2);
  return bench.has_error(innocent);
}

bool ungathered_output_fails_everybody(const Semantics& semantics) {
  Bench bench(semantics, Bench::small(), {.plan = R"({"outputs": [
      {"name": "hidden", "extents": [-1, 64], "dtype": "float32", "rows": "tokens"}]})"});
  const auto fails = [&](size_t prompt) {
    trt::Request request = request_of(prompt, 2, 1);
    trt::OutputConfig output = request.getOutputConfig();
    output.additionalModelOutputs = {trt::AdditionalModelOutput("hidden")};
    request.setOutputConfig(output);
    const trt::IdType id = bench.ask(request);
    bench.hear(1);
    return bench.has_error(id);
  };
  return !fails(1) && fails(2);
}

// ---- answers and ends ----

bool cancel_reaches_active_only(const Semantics& semantics) {
  SimulatedEngine engine = Bench::small();
  engine.slots = 1;
  Bench bench(semantics, engine);
  control().gate.close();
  bench.executor();
  bench.ask(request_of(8, 1, 200));
  const trt::IdType queued = bench.ask(request_of(8, 2, 8));
  bench.executor().cancelRequest(queued);
  const bool passed = pass(3);
  const bool unheard = bench.executor().awaitResponses(std::chrono::milliseconds(0)).empty();
  return passed && unheard && bench.last_iteration().numQueuedRequests == 1;
}

bool cancelled_has_no_tokens(const Semantics& semantics) {
  Bench bench(semantics, Bench::small(), {.plan = R"({"tokens_an_answer": 100})"});
  control().gate.close();
  bench.executor();
  trt::Request request = request_of(8, 1, 64);
  request.setStreaming(true);
  const trt::IdType id = bench.ask(request);
  if (!pass(5)) return false;
  bench.executor().cancelRequest(id);
  control().gate.open();
  bench.hear(1);
  const trt::Result result = bench.of(id).back().getResult();
  return result.finishReasons.front() == trt::FinishReason::kCANCELLED && result.outputTokenIds.front().empty();
}

bool cancelling_log_probs_aborts(const Semantics& semantics) {
  const pid_t child = fork();
  if (child == 0) {
    signal(SIGABRT, SIG_DFL);  // no report of a sanitizer
    Bench bench(semantics);
    control().gate.close();
    bench.executor();
    trt::Request request = request_of(8, 1, 64);
    request.setStreaming(true);
    trt::OutputConfig output = request.getOutputConfig();
    output.returnLogProbs = true;
    request.setOutputConfig(output);
    const trt::IdType id = bench.ask(request);
    if (!pass(2)) _exit(1);
    bench.executor().cancelRequest(id);
    _exit(pass(1) ? 0 : 1);
  }
  int status = 0;
  return waitpid(child, &status, 0) == child && WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT;
}

bool log_probs_are_cumulative(const Semantics& semantics) {
  Bench bench(semantics);
  trt::Request request = request_of(8, 1, 5);
  request.setStreaming(true);
  trt::OutputConfig output = request.getOutputConfig();
  output.returnLogProbs = true;
  request.setOutputConfig(output);
  const trt::IdType id = bench.ask(request);
  bench.hear(1);
  return bench.of(id).back().getResult().logProbs->front().size() == 5;
}

bool siblings_fail_under_own_ids(const Semantics& semantics) {
  Bench bench(semantics, that_throws());
  trt::Request request = poison();
  trt::SamplingConfig sampling;
  sampling.setNumReturnSequences(2);
  request.setSamplingConfig(sampling);
  const trt::IdType id = bench.ask(request);
  bench.hear(2);
  return bench.of(id).size() == 1;
}

bool statistics_are_drained(const Semantics& semantics) {
  Bench bench(semantics);
  control().gate.close();
  bench.executor();
  bench.ask(8, 1, 8);
  return pass(4) && bench.executor().getLatestIterationStats().size() == 4 &&
         bench.executor().getLatestIterationStats().empty();
}

bool statistics_are_bounded(const Semantics& semantics) {
  Bench bench(semantics);
  bench.config.setIterStatsMaxIterations(2);
  control().gate.close();
  bench.executor();
  bench.ask(8, 1, 8);
  return pass(4) && bench.executor().getLatestIterationStats().size() == 2;
}

bool shutdown_waits(const Semantics& semantics) {
  Bench bench(semantics);
  control().gate.close();
  bench.executor();
  const trt::IdType id = bench.ask(request_of(8, 1, 64));
  if (!pass(1)) return false;
  bench.executor().shutdown();
  bench.hear(1);
  return bench.of(id).size() == 1 && bench.of(id).front().getResult().isFinal;
}

bool awaits_throw_after_shutdown(const Semantics& semantics) {
  Bench bench(semantics);
  bench.executor().shutdown();
  try {
    (void)bench.executor().awaitResponses(std::chrono::milliseconds(0));
  } catch (const std::exception&) {
    return true;
  }
  return false;
}

const std::map<std::string_view, std::function<bool(const Semantics&)>>& checks() {
  static const std::map<std::string_view, std::function<bool(const Semantics&)>> all = {
      {"plugins_come_first", plugins_come_first},
      {"world_must_match", world_must_match},
      {"batch_beyond_engine_throws", batch_beyond_engine_throws},
      {"paged_attention_needs_onboarding", paged_attention_needs_onboarding},
      {"padded_engines_are_refused", padded_engines_are_refused},
      {"reuse_needs_paged_attention", reuse_needs_paged_attention},
      {"setters_check_values", setters_check_values},
      {"llguidance_is_refused", llguidance_is_refused},
      {"guides_are_read_in_the_pass", guides_are_read_in_the_pass},
      {"ungathered_output_fails_everybody", ungathered_output_fails_everybody},
      {"validates_in_the_loop", validates_in_the_loop},
      {"guides_need_configuration", guides_need_configuration},
      {"queue_limit_throws", queue_limit_throws},
      {"output_has_input", output_has_input},
      {"end_unset_runs_on", end_unset_runs_on},
      {"seed_unset_is_zero", seed_unset_is_zero},
      {"takes_at_most_a_batch", takes_at_most_a_batch},
      {"holds_back_followers", holds_back_followers},
      {"first_blocks_others", first_blocks_others},
      {"no_room_is_no_error", no_room_is_no_error},
      {"forward_fails_everybody", forward_fails_everybody},
      {"forward_goes_on", forward_goes_on},
      {"misspelt_output_fails_everybody", misspelt_output_fails_everybody},
      {"cancel_reaches_active_only", cancel_reaches_active_only},
      {"cancelled_has_no_tokens", cancelled_has_no_tokens},
      {"cancelling_log_probs_aborts", cancelling_log_probs_aborts},
      {"log_probs_are_cumulative", log_probs_are_cumulative},
      {"siblings_fail_under_own_ids", siblings_fail_under_own_ids},
      {"statistics_are_drained", statistics_are_drained},
      {"statistics_are_bounded", statistics_are_bounded},
      {"shutdown_waits", shutdown_waits},
      {"awaits_throw_after_shutdown", awaits_throw_after_shutdown},
  };
  return all;
}

class Fact : public ::testing::TestWithParam<Switch> {
 protected:
  void TearDown() override {
    control().gate.open();
    control().world_size = 1;
    control().semantics.reset();
  }
};

TEST_P(Fact, HoldsAndIsNoticedWhereItDoesNot) {
  const auto check = checks().at(GetParam().name);
  Semantics semantics;
  EXPECT_TRUE(check(semantics)) << "as it is known";
  semantics.*(GetParam().value) = false;
  EXPECT_FALSE(check(semantics)) << "turned";
}

INSTANTIATE_TEST_SUITE_P(Executor, Fact, ::testing::ValuesIn(kFacts),
                         [](const auto& tested) { return std::string(tested.param.name); });

}  // namespace
}  // namespace ifab::standin
