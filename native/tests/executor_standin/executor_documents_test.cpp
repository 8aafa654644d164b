// SPDX-License-Identifier: Apache-2.0
//
// What an engine directory for the Executor may say: everything that is missing, or that the runtime would default,
// override, ignore or switch off, is named; and the books that the backend keeps.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "client.h"
#include "control.h"
#include "driver.h"
#include "executor_directory.h"
#include "guides.h"
#include "live_blocks.h"
#include "pulse.h"
#include "translate.h"
#include "vocabulary.h"

namespace ifab::executor {
namespace {

using Json = nlohmann::json;

using standin::Patches;
using test::prompt_of;
using test::SimulatedEngine;
using test::TemporaryDirectory;

std::vector<Finding> findings_of(const Patches& patches, const SimulatedEngine& engine = {}) {
  const TemporaryDirectory directory;
  standin::write_executor_directory(directory.path(), engine, patches);
  return standin::inspect(directory.path());
}

std::vector<std::string> paths_of(const std::vector<Finding>& findings) {
  std::vector<std::string> paths;
  for (const Finding& finding : findings) paths.push_back(finding.path);
  return paths;
}

Json read(const std::filesystem::path& path) {
  std::ifstream file(path);
  return Json::parse(file);
}

// The merge patch that takes a field, given by its keys, out.
std::string without(const std::vector<std::string>& keys) {
  Json patch = nullptr;
  for (auto key = keys.rbegin(); key != keys.rend(); ++key) patch = Json{{*key, patch}};
  return patch.dump();
}

// The keys of every field of a document that is no object itself, and of every object.
void collect(const Json& document, const std::vector<std::string>& at, std::vector<std::vector<std::string>>& out) {
  for (const auto& [key, value] : document.items()) {
    std::vector<std::string> keys = at;
    keys.push_back(key);
    out.push_back(keys);
    if (value.is_object()) collect(value, keys, out);
  }
}

std::string joined(const std::vector<std::string>& keys) {
  std::string path;
  for (const std::string& key : keys) path += (path.empty() ? "" : ".") + key;
  return path;
}

TEST(ExecutorDocuments, AGoodDirectoryHasNoFindings) {
  EXPECT_EQ(paths_of(findings_of({})), std::vector<std::string>{});
  EXPECT_EQ(paths_of(findings_of({}, SimulatedEngine::mining(64))), std::vector<std::string>{});
}

TEST(ExecutorDocuments, EveryFieldOfTheSettingsIsRequiredByName) {
  const TemporaryDirectory directory;
  standin::write_executor_directory(directory.path(), {});
  std::vector<std::vector<std::string>> fields;
  collect(read(directory.path() / "executor.json"), {}, fields);
  EXPECT_GT(fields.size(), 40u);
  for (const std::vector<std::string>& keys : fields) {
    const std::vector<Finding> findings = findings_of({.executor = without(keys)});
    ASSERT_FALSE(findings.empty()) << joined(keys);
    for (const Finding& finding : findings) {  // of an object that is gone, each field
      EXPECT_TRUE(finding.path.starts_with("executor.json:" + joined(keys))) << finding.path;
      EXPECT_EQ(finding.found, "absent");
    }
  }
}

TEST(ExecutorDocuments, AnAbsentSettingsFileIsRefusedFieldByField) {
  const std::vector<std::string> paths = paths_of(findings_of({.executor = "null"}));
  for (const char* path : {"executor.json", "executor.json:scheduler.capacity_policy", "executor.json:kv_cache",
                           "executor.json:devices", "executor.json:max_queue_size", "executor.json:debug"}) {
    EXPECT_NE(std::find(paths.begin(), paths.end(), path), paths.end()) << path;
  }
}

TEST(ExecutorDocuments, EveryFieldOfTheBuildersThatCountsIsRequiredByName) {
  const TemporaryDirectory directory;
  standin::write_executor_directory(directory.path(), {});
  std::vector<std::vector<std::string>> fields;
  collect(read(directory.path() / "config.json"), {}, fields);
  for (const std::vector<std::string>& keys : fields) {
    if (keys.back() == "quant_algo" || joined(keys) == "pretrained_config") continue;  // not read; not ours without it
    const std::vector<Finding> findings = findings_of({.config = without(keys)});
    ASSERT_FALSE(findings.empty()) << joined(keys);
    EXPECT_TRUE(findings[0].path.starts_with("config.json:" + joined(keys))) << findings[0].path;
  }
  EXPECT_EQ(paths_of(findings_of({.config = R"({"build_config": {"weight_sparsity": false}, "other": 1})"})),
            std::vector<std::string>{})
      << "the builder's own fields are its own";
}

TEST(ExecutorDocuments, AConfigurationOfSomebodyElseIsNotOurs) {
  const TemporaryDirectory directory;
  standin::write_executor_directory(directory.path(), {}, {.config = R"({"pretrained_config": null})"});
  std::unique_ptr<const EngineDirectory> opened;
  ASSERT_TRUE(EngineDirectory::open(directory.path(), opened).ok());
  EXPECT_FALSE(is_engine_config(*opened));
}

struct Wrong {
  const char* name;
  const char* path;
  Patches patches;
  bool mining = false;
};

class ExecutorDisagreement : public ::testing::TestWithParam<Wrong> {};

TEST_P(ExecutorDisagreement, IsNamed) {
  const SimulatedEngine engine = GetParam().mining ? SimulatedEngine::mining(64) : SimulatedEngine{};
  const std::vector<Finding> findings = findings_of(GetParam().patches, engine);
  const std::vector<std::string> paths = paths_of(findings);
  EXPECT_NE(std::find(paths.begin(), paths.end(), GetParam().path), paths.end()) << testing::PrintToString(paths);
  for (const Finding& finding : findings) {
    EXPECT_FALSE(finding.found.empty() || finding.expected.empty()) << finding.path;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Executor, ExecutorDisagreement,
    ::testing::Values(
        Wrong{"Padded",
              "config.json:build_config.plugin_config.remove_input_padding",
              {.config = R"({"build_config": {"plugin_config": {"remove_input_padding": false}}})"}},
        Wrong{"NoAttentionPlugin",
              "config.json:build_config.plugin_config.gpt_attention_plugin",
              {.config = R"({"build_config": {"plugin_config": {"gpt_attention_plugin": ""}}})"}},
        Wrong{"ContinuousCache",
              "config.json:build_config.kv_cache_type",
              {.config = R"({"build_config": {"kv_cache_type": "CONTINUOUS"}})"}},
        Wrong{"PagedOverridesDisabled",
              "config.json:build_config.plugin_config.paged_kv_cache",
              {.config = R"({"build_config": {"plugin_config": {"paged_kv_cache": true}}})"},
              true},
        Wrong{"CacheQuantization",
              "config.json:pretrained_config.quantization.kv_cache_quant_algo",
              {.config = R"({"pretrained_config": {"quantization": {"kv_cache_quant_algo": "NVFP4"}}})"}},
        Wrong{"CacheDtype",
              "model.kv_cache_dtype",
              {.config = R"({"pretrained_config": {"quantization": {"kv_cache_quant_algo": "FP8"}}})"}},
        Wrong{"Layers", "model.layers", {.config = R"({"pretrained_config": {"num_hidden_layers": 5}})"}},
        Wrong{"Vocabulary", "model.vocab_size", {.config = R"({"pretrained_config": {"vocab_size": 513}})"}},
        Wrong{"MoreSlotsThanBuilt", "limits.slots", {.config = R"({"build_config": {"max_batch_size": 15}})"}},
        Wrong{"AnotherBuiltBudget",
              "limits.built_step_token_budget",
              {.config = R"({"build_config": {"max_num_tokens": 1024}})"}},
        Wrong{
            "LongerThanBuilt", "limits.max_sequence_tokens", {.config = R"({"build_config": {"max_seq_len": 1279}})"}},
        Wrong{"BlockTokens",
              "limits.kv_block_tokens",
              {.config = R"({"build_config": {"plugin_config": {"tokens_per_block": 32}}})"}},
        Wrong{"SeveralRanks",
              "card.count",
              {.contract = R"({"card": {"count": 2, "tensor_parallel": 2}})",
               .config = R"({"pretrained_config": {"mapping": {"tp_size": 2}}})"}},
        Wrong{"RankFile", "rank1.engine", {.config = R"({"pretrained_config": {"mapping": {"tp_size": 2}}})"}},
        Wrong{"Devices", "executor.json:devices", {.executor = R"({"devices": [0, 1]})"}},
        Wrong{"Beams", "limits.beams", {.contract = R"({"limits": {"beams": 4}})"}},
        Wrong{"QueueSmallerThanSlots", "executor.json:max_queue_size", {.executor = R"({"max_queue_size": 15})"}},
        Wrong{"NoMemoryFraction",
              "limits.kv_cache_memory_fraction",
              {.contract = R"({"limits": {"kv_cache_memory_fraction": "not_applicable"}})"}},
        Wrong{"WholeMemory",
              "limits.kv_cache_memory_fraction",
              {.contract = R"({"limits": {"kv_cache_memory_fraction": 1}})"}},
        Wrong{"SinkTokensOfTheBuilder",
              "executor.json:kv_cache.sink_tokens",
              {.config = R"({"pretrained_config": {"runtime_defaults": {"sink_token_length": 4}}})"}},
        Wrong{"SinkTokensOfNoKind",
              "config.json:pretrained_config.runtime_defaults.sink_token_length",
              {.config = R"({"pretrained_config": {"runtime_defaults": {"sink_token_length": "4"}}})"}},
        Wrong{"ReuseThatMixesBlocksUp",
              "executor.json:kv_cache.block_reuse",
              {.contract = R"({"runtime": {"version": "1.2.0"}})"}},
        Wrong{"AnotherGrammarRuntime",
              "executor.json:guided_decoding",
              {.executor = R"({"guided_decoding": "llguidance"})"}},
        Wrong{"PoolSmallerThanASequence",
              "executor.json:kv_cache.max_tokens",
              {.executor = R"({"kv_cache": {"max_tokens": 1279}})"}},
        Wrong{"PartialReuse",
              "executor.json:kv_cache.partial_reuse",
              {.executor = R"({"kv_cache": {"partial_reuse": true}})"}},
        Wrong{"ReuseIsSwitchedOff",
              "executor.json:kv_cache.block_reuse",
              {.config = R"({"build_config": {"plugin_config": {"use_paged_context_fmha": false}}})"}},
        Wrong{"ReuseWithContextLogits",
              "executor.json:kv_cache.block_reuse",
              {.config = R"({"build_config": {"gather_context_logits": true}})"}},
        Wrong{"NoOnboarding",
              "executor.json:kv_cache.onboard_blocks",
              {.executor = R"({"kv_cache": {"onboard_blocks": false}})"}},
        Wrong{"ChunksWithoutPagedAttention",
              "executor.json:chunked_context",
              {.config = R"({"build_config": {"plugin_config": {"use_paged_context_fmha": false}}})"}},
        Wrong{
            "ChunksWithoutCache", "executor.json:chunked_context", {.executor = R"({"chunked_context": true})"}, true},
        Wrong{"PromptLongerThanAStep", "limits.max_input_tokens", {.executor = R"({"chunked_context": false})"}},
        Wrong{"NoCacheSettings", "executor.json:kv_cache", {.executor = R"({"kv_cache": "not_applicable"})"}},
        Wrong{"Payload", "executor.json:payload_outputs", {.executor = R"({"payload_outputs": ["hidden"]})"}},
        Wrong{"NoPayload",
              "executor.json:payload_outputs",
              {.executor = R"({"payload_outputs": "not_applicable"})"},
              true},
        Wrong{"NoGrammars",
              "executor.json:guided_decoding",
              {.contract = R"({"capabilities": {"guided_decoding": ["regex"]}})"}},
        Wrong{"GrammarsThatBeginAnew",
              "executor.json:scheduler.capacity_policy",
              {.executor = R"({"guided_decoding": "xgrammar", "scheduler": {"capacity_policy": "max_utilization"}})"}},
        Wrong{"Runtime", "runtime.name", {.contract = R"({"runtime": {"name": "vllm"}})"}},
        Wrong{"Unknown", "executor.json:max_beam_width", {.executor = R"({"max_beam_width": 1})"}},
        Wrong{"NoFeature", "executor.json:speculative_decoding", {.executor = R"({"speculative_decoding": "eagle"})"}}),
    [](const auto& tested) { return std::string(tested.param.name); });

// ---- the tokenizer ----

Status read_vocabulary_of(const std::string& text, Vocabulary& out) {
  const TemporaryDirectory directory;
  std::ofstream(directory.path() / "tokenizer.json") << text;
  return read_vocabulary((directory.path() / "tokenizer.json").string(), 4, out);
}

TEST(ExecutorVocabulary, ReadsMapsListsAndAddedTokens) {
  Vocabulary map;
  ASSERT_TRUE(read_vocabulary_of(R"({"model": {"vocab": {"a": 0, "b": 2}}, "added_tokens":
                                    [{"id": 3, "content": "<end>"}]})",
                                 map)
                  .ok());
  EXPECT_EQ(map.tokens, (std::vector<std::string>{"a", "", "b", "<end>"}));
  EXPECT_TRUE(map.tokenizer.starts_with(R"({"model")"));
  Vocabulary list;
  ASSERT_TRUE(read_vocabulary_of(R"({"model": {"vocab": [["a", -1.5], ["b", -2]]}})", list).ok());
  EXPECT_EQ(list.tokens, (std::vector<std::string>{"a", "b", "", ""}));
}

TEST(ExecutorVocabulary, SaysWhatIsWrong) {
  const std::pair<const char*, const char*> wrong[] = {
      {"[1]", "not a JSON object"},
      {"{", "not a JSON object"},
      {"{}", "model.vocab: absent"},
      {R"({"model": {"vocab": {"a": 4}}})", "model.vocab: id 4, expected 0 to 3"},
      {R"({"model": {"vocab": {"a": "x"}}})", "model.vocab: neither tokens nor ids"},
      {R"({"model": {"vocab": ["a"]}})", "model.vocab: expected pairs"},
      {R"({"model": {"vocab": {}}, "added_tokens": [{"id": -1, "content": "x"}]})", "added_tokens: id -1"},
      {R"({"model": {"vocab": {}}, "added_tokens": [7]})", "added_tokens: expected objects"},
  };
  for (const auto& [text, says] : wrong) {
    Vocabulary vocabulary;
    const Status status = read_vocabulary_of(text, vocabulary);
    EXPECT_EQ(status.code(), IFAB_FAILED_PRECONDITION) << text;
    EXPECT_NE(status.message().find(says), std::string::npos) << status.message();
  }
  Vocabulary vocabulary;
  EXPECT_FALSE(read_vocabulary("/nowhere/tokenizer.json", 4, vocabulary).ok());
}

// ---- the books ----

Request request_of(std::vector<int32_t> prompt, uint32_t max_tokens, uint64_t salt = 0) {
  Request request;
  request.prompt = std::move(prompt);
  request.max_tokens = max_tokens;
  request.salt = salt;
  return request;
}

TEST(ExecutorLiveBlocks, SharesWhatIsComputedUnderOneSalt) {
  LiveBlocks blocks(16, true);
  const Request first = request_of(prompt_of(40, 1), 8);
  EXPECT_EQ(blocks.need(first).blocks, 3u);
  blocks.enter(first);
  EXPECT_TRUE(blocks.need(first).leader_computes);
  EXPECT_EQ(blocks.need(first).blocks, 3u) << "nothing is there yet";
  blocks.context_done(first);
  EXPECT_EQ(blocks.need(first).blocks, 1u);
  EXPECT_EQ(blocks.need(first).shared_tokens, 32u);
  EXPECT_EQ(blocks.need(request_of(prompt_of(40, 1), 8, 7)).blocks, 3u) << "another salt";
  EXPECT_EQ(blocks.need(request_of(prompt_of(32, 1), 8)).shared_tokens, 16u) << "one token is always computed";
  const Request second = request_of(prompt_of(40, 1), 24);
  blocks.enter(second);
  EXPECT_EQ(blocks.held(), 3 + 2u);
  blocks.leave(first, true);
  EXPECT_EQ(blocks.held(), 4u);
  EXPECT_TRUE(blocks.need(first).leader_computes) << "who had computed them is gone, who shares them is not done";
  blocks.leave(second, false);
  EXPECT_EQ(blocks.held(), 0u);
  EXPECT_EQ(blocks.need(first).blocks, 3u);
}

TEST(ExecutorLiveBlocks, WithoutReuseOrCacheNothingIsShared) {
  LiveBlocks apart(16, false);
  const Request request = request_of(prompt_of(40, 1), 8);
  apart.enter(request);
  apart.context_done(request);
  EXPECT_EQ(apart.need(request).blocks, 3u);
  LiveBlocks none(0, false);
  none.enter(request);
  EXPECT_EQ(none.need(request).blocks_ever + none.held(), 0u);
}

// ---- the pulse ----

tensorrt_llm::executor::IterationStats iteration(int32_t active, int32_t scheduled, int32_t tokens) {
  tensorrt_llm::executor::IterationStats stats;
  stats.iterLatencyMS = 8;
  stats.numActiveRequests = active;
  stats.inflightBatchingStats.emplace();
  stats.inflightBatchingStats->numScheduledRequests = scheduled;
  stats.inflightBatchingStats->numCtxTokens = tokens;
  return stats;
}

TEST(ExecutorPulse, TellsMovingHoldingBackAndStandingStill) {
  Pulse pulse;
  EXPECT_EQ(pulse.take({}).activity, Activity::kQuiet);
  EXPECT_EQ(pulse.take({iteration(2, 2, 30)}).activity, Activity::kMoving);
  const Pulse::Beat waits = pulse.take({iteration(3, 1, 30), iteration(3, 1, 12)});
  EXPECT_EQ(waits.activity, Activity::kHoldingBack);
  EXPECT_EQ(waits.prompt_tokens, 42u);
  EXPECT_TRUE(waits.moved());
  const Pulse::Beat still = pulse.take({iteration(3, 0, 0), iteration(3, 0, 0)});
  EXPECT_EQ(still.activity, Activity::kStandingStill);
  EXPECT_FALSE(still.moved());
  EXPECT_EQ(pulse.take({iteration(3, 0, 0), iteration(3, 3, 0)}).activity, Activity::kMoving) << "it moved again";
  EXPECT_EQ(pulse.take({iteration(0, 0, 0)}).activity, Activity::kQuiet) << "the idle flush";
  EXPECT_GT(pulse.iteration_time().count(), 0);
}

// ---- guides ----

TEST(ExecutorGuides, AreReadOnceWhereTheyAreGood) {
  GuideCheck guides;
  for (int i = 0; i < 3; ++i) {
    EXPECT_TRUE(guides.check(IFAB_GUIDE_REGEX, "a|b").ok());
    EXPECT_EQ(guides.check(IFAB_GUIDE_GRAMMAR, "a|b").code(), IFAB_INVALID_ARGUMENT) << "of another kind";
  }
  EXPECT_EQ(guides.read(), 4u);
  for (int i = 0; i < 64; ++i) EXPECT_TRUE(guides.check(IFAB_GUIDE_REGEX, std::to_string(i)).ok());
  EXPECT_TRUE(guides.check(IFAB_GUIDE_REGEX, "a|b").ok());
  EXPECT_EQ(guides.read(), 4u + 64 + 1) << "remembered are the last ones";
}

// ---- plugins ----

// In this program, since plugins are registered once a process.
TEST(ExecutorRuntime, PluginsThatDoNotRegisterAreRefusedUntilTheyDo) {
  SimulatedEngine engine;
  engine.payload_dtype = "float16";
  const auto refusal = [&] {
    try {
      const standin::Driver driver(engine);
    } catch (const std::runtime_error& error) {
      return std::string(error.what());
    }
    return std::string("loaded");
  };
  standin::control().register_plugins = false;
  EXPECT_EQ(refusal(), "the plugins of TensorRT-LLM could not be registered");
  EXPECT_EQ(standin::control().calls, std::vector<std::string>{"plugins"})
      << "before the engine is opened for its tensors";
  standin::control().register_plugins = true;
  EXPECT_EQ(refusal(), "loaded");
  EXPECT_EQ(standin::control().calls, (std::vector<std::string>{"plugins", "plugins", "tensors", "mpi", "executor"}));
}

// ---- endings ----

TEST(ExecutorTranslate, EndingsThatMakeNoSenseAreNotTakenForGood) {
  using Reason = tensorrt_llm::executor::FinishReason;
  Request request = request_of({1}, 4);
  request.stop_ids = {7, 9};
  std::vector<int32_t> tokens = {3, 4};
  EXPECT_EQ(ending_of(Reason::kSTOP_WORDS, request, 7, 2, tokens).kind, Ending::Kind::kBroken);
  EXPECT_EQ(ending_of(Reason::kTIMED_OUT, request, 7, 2, tokens).kind, Ending::Kind::kBroken);
  EXPECT_EQ(ending_of(Reason::kNOT_FINISHED, request, -1, 2, tokens).kind, Ending::Kind::kBroken);
  EXPECT_EQ(ending_of(Reason::kNOT_FINISHED, request, 7, 2, tokens).stop_id, 7) << "which need not be in the output";
  EXPECT_EQ(ending_of(Reason::kNOT_FINISHED, request, 7, 4, tokens).kind, Ending::Kind::kLength);
  EXPECT_EQ(ending_of(Reason::kCANCELLED, request, 7, 2, tokens).kind, Ending::Kind::kCancelled);
  EXPECT_EQ(tokens.size(), 2u);
  tokens.push_back(9);
  const Ending stop = ending_of(Reason::kSTOP_WORDS, request, 7, 3, tokens);
  EXPECT_EQ(stop.kind, Ending::Kind::kStop);
  EXPECT_EQ(stop.stop_id, 9);
  EXPECT_EQ(tokens, (std::vector<int32_t>{3, 4}));
}

TEST(ExecutorTranslate, ErrorsHaveAnOwner) {
  const Request request = request_of({1}, 4);
  EXPECT_EQ(failure_of("Encountered an error when fetching new request: too long", request).status.message(),
            "request: the runtime does not take it: too long");
  EXPECT_EQ(failure_of("Encountered an error in forwardSync function: x", request).kind, Failure::Kind::kForward);
  const Failure other = failure_of(std::string(5000, 'x'), request);
  EXPECT_EQ(other.kind, Failure::Kind::kOther);
  EXPECT_EQ(other.status.code(), IFAB_INTERNAL);
  EXPECT_LT(other.status.message().size(), 512u);
}

}  // namespace
}  // namespace ifab::executor
