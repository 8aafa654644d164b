// SPDX-License-Identifier: Apache-2.0
//
// Facts of construction, and of taking requests.
#include <algorithm>
#include <iterator>

#include "bench.h"

namespace ifab::standin {
namespace {

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
  return bench.reused_blocks([](trt::Request&) {}) == 0;
}

bool budget_beyond_engine_is_ignored(const Semantics& semantics) {
  Bench bench(semantics);
  bench.config.setMaxNumTokens(128);
  control().gate.close();
  bench.executor();
  bench.ask(request_of(128, 1, 1));
  return pass(1) && bench.last_iteration().inflightBatchingStats->numCtxTokens == 64;
}

bool pool_has_max_tokens(const Semantics& semantics) {
  Bench bench(semantics);
  bench.cache.setMaxTokens(16 * 10 + 15);
  control().gate.close();
  bench.executor();
  bench.ask(request_of(8, 1, 1));
  return pass(1) && bench.last_iteration().kvCacheStats->maxNumBlocks == 10;
}

bool context_logits_switch_reuse_off(const Semantics& semantics) {
  Bench bench(semantics, Bench::small(), {.config = R"({"build_config": {"gather_context_logits": true}})"});
  return bench.reused_blocks([](trt::Request&) {}) == 0;
}

bool outputs_need_dynamic_rows(const Semantics& semantics) {
  Bench bench(semantics, Bench::small(), {.plan = R"({"outputs": [
      {"name": "hidden", "extents": [4, 64], "dtype": "float32", "rows": "sequences"}]})"});
  bench.config.setAdditionalModelOutputs({trt::AdditionalModelOutput("hidden")});
  return bench.is_refused();
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

bool salts_part_reuse(const Semantics& semantics) {
  Bench bench(semantics);
  return bench.reused_blocks([salt = uint64_t{0}](trt::Request& request) mutable { request.setCacheSaltID(++salt); }) ==
         0;
}

bool samples_count_in_the_queue(const Semantics& semantics) {
  Bench bench(semantics);
  bench.config.setMaxQueueSize(3);
  control().gate.close();
  bench.executor();
  try {
    bench.ask(sampled(request_of(8, 1, 1), 4));
  } catch (const std::exception&) {
    return true;
  }
  return false;
}

bool enqueue_throws_after_shutdown(const Semantics& semantics) {
  Bench bench(semantics);
  bench.executor().shutdown();
  try {
    bench.ask(8, 1, 1);
  } catch (const std::exception&) {
    return true;
  }
  return false;
}

// Whether a prompt is refused when it is fetched. What is not refused is cancelled: it may never end.
bool is_refused(Bench& bench, size_t prompt) {
  control().gate.close();
  bench.executor();
  const trt::IdType id = bench.ask(request_of(prompt, 1, 1));
  if (!pass(1)) return false;
  const auto responses = bench.executor().awaitResponses(std::chrono::milliseconds(0));
  if (responses.empty()) bench.executor().cancelRequest(id);
  return !responses.empty() && responses.front().hasError();
}

bool longest_prompt_leaves_a_token(const Semantics& semantics) {
  SimulatedEngine engine = Bench::small();
  engine.max_sequence_tokens = 60;  // and built for one more
  const auto refused = [&](size_t prompt) {
    Bench bench(semantics, engine);
    return is_refused(bench, prompt);
  };
  return !refused(60) && refused(61);
}

bool whole_prompts_fit_a_pass(const Semantics& semantics) {
  Bench bench(semantics);
  bench.config.setEnableChunkedContext(false);
  return is_refused(bench, 65);
}

bool long_outputs_are_cut(const Semantics& semantics) {
  SimulatedEngine engine = Bench::small();
  engine.max_sequence_tokens = 60;
  Bench bench(semantics, engine);
  const trt::IdType id = bench.ask(request_of(8, 1, 100));
  bench.hear(1);
  return bench.tokens(id).size() == 61 - 8;
}

}  // namespace

const Checks& checks_of_loading() {
  static const Checks all = {
      {"plugins_come_first", plugins_come_first},
      {"world_must_match", world_must_match},
      {"batch_beyond_engine_throws", batch_beyond_engine_throws},
      {"paged_attention_needs_onboarding", paged_attention_needs_onboarding},
      {"padded_engines_are_refused", padded_engines_are_refused},
      {"setters_check_values", setters_check_values},
      {"llguidance_is_refused", llguidance_is_refused},
      {"reuse_needs_paged_attention", reuse_needs_paged_attention},
      {"budget_beyond_engine_is_ignored", budget_beyond_engine_is_ignored},
      {"pool_has_max_tokens", pool_has_max_tokens},
      {"context_logits_switch_reuse_off", context_logits_switch_reuse_off},
      {"outputs_need_dynamic_rows", outputs_need_dynamic_rows},
      {"validates_in_the_loop", validates_in_the_loop},
      {"guides_need_configuration", guides_need_configuration},
      {"guides_are_read_in_the_pass", guides_are_read_in_the_pass},
      {"queue_limit_throws", queue_limit_throws},
      {"output_has_input", output_has_input},
      {"end_unset_runs_on", end_unset_runs_on},
      {"seed_unset_is_zero", seed_unset_is_zero},
      {"salts_part_reuse", salts_part_reuse},
      {"samples_count_in_the_queue", samples_count_in_the_queue},
      {"enqueue_throws_after_shutdown", enqueue_throws_after_shutdown},
      {"longest_prompt_leaves_a_token", longest_prompt_leaves_a_token},
      {"whole_prompts_fit_a_pass", whole_prompts_fit_a_pass},
      {"long_outputs_are_cut", long_outputs_are_cut},
  };
  return all;
}

}  // namespace ifab::standin
