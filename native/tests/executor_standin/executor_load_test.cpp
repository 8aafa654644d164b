// SPDX-License-Identifier: Apache-2.0
//
// How the executor backend brings the runtime up: the order, every field of its configuration, and what is refused.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "backend_fixture.h"
#include "client.h"

namespace ifab::standin {
namespace {

using ExecutorLoadTest = ExecutorBackendTest;

TEST_F(ExecutorLoadTest, BringsTheRuntimeUpInOrder) {
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

TEST_F(ExecutorLoadTest, StatesEveryFieldOfTheConfiguration) {
  const Driver plain(small());
  // Parts that are stated by leaving them out, as executor.json says of each.
  const std::vector<std::string> absent = {"peftCache", "logitsPostProcessor", "debug",
                                           "specDec",   "cacheTransceiver",    "kvCache.crossKvCacheFraction"};
  std::vector<std::string> expected = absent;
  expected.insert(expected.end(), {"kvCache.sinkTokenLength", "guidedDecoding"});
  EXPECT_EQ(control().configuration->unstated(), expected);
}

// Every setting, with two values, and what the configuration says then.
struct Setting {
  const char* name;
  const char* one;
  const char* other;
  double (*stated)(const tensorrt_llm::executor::ExecutorConfig& config);
};

class ExecutorSetting : public ExecutorLoadTest, public ::testing::WithParamInterface<Setting> {};

TEST_P(ExecutorSetting, ReachesTheConfiguration) {
  SimulatedEngine engine = small();
  engine.max_input_tokens = 64;  // a whole prompt fits a step
  const auto stated = [&](const char* value) {
    const Driver driver(engine, {.executor = value});
    return GetParam().stated(*control().configuration);
  };
  EXPECT_EQ(stated(GetParam().one), 1);
  EXPECT_EQ(stated(GetParam().other), 0);
}

#define SETTING(name, one, other, field)                                            \
  Setting {                                                                         \
    name, one, other, [](const auto& config) { return static_cast<double>(field); } \
  }

INSTANTIATE_TEST_SUITE_P(
    Executor, ExecutorSetting,
    ::testing::Values(
        SETTING("chunked", R"({"chunked_context": true})", R"({"chunked_context": false})",
                config.enableChunkedContext.value),
        SETTING("policy", R"({"scheduler": {"capacity_policy": "guaranteed_no_evict"}})",
                R"({"scheduler": {"capacity_policy": "max_utilization"}})",
                config.scheduler.value.getCapacitySchedulerPolicy()),
        SETTING("chunks", R"({"scheduler": {"chunking_policy": "equal_progress"}})",
                R"({"scheduler": {"chunking_policy": "first_come_first_served"}})",
                *config.scheduler.value.getContextChunkingPolicy()),
        SETTING("receive_poll", R"({"receive_poll_ms": 1})", R"({"receive_poll_ms": 0})",
                config.recvPollPeriodMs.value),
        SETTING("iterations", R"({"iteration_stats": 65})", R"({"iteration_stats": 64})",
                config.iterStatsMaxIterations.value - 64),
        SETTING("requests", R"({"request_stats": 1})", R"({"request_stats": 0})",
                config.requestStatsMaxIterations.value),
        SETTING("reuse", R"({"kv_cache": {"block_reuse": true}})", R"({"kv_cache": {"block_reuse": false}})",
                config.kvCache.value.enableBlockReuse.value),
        SETTING("copies", R"({"kv_cache": {"copy_on_partial_reuse": true}})",
                R"({"kv_cache": {"copy_on_partial_reuse": false}})", config.kvCache.value.copyOnPartialReuse.value),
        SETTING("events", R"({"kv_cache": {"event_buffer": 1}})", R"({"kv_cache": {"event_buffer": 0}})",
                config.kvCache.value.eventBufferMaxSize.value),
        SETTING("gathering", R"({"kv_cache": {"event_gather_ms": 2}})", R"({"kv_cache": {"event_gather_ms": 1}})",
                config.kvCache.value.attentionDpEventsGatherPeriodMs.value - 1),
        SETTING("uvm", R"({"kv_cache": {"use_uvm": true}})", R"({"kv_cache": {"use_uvm": false}})",
                config.kvCache.value.useUvm.value),
        SETTING("bytes", R"({"kv_cache": {"max_gpu_bytes": 1}})", R"({"kv_cache": {"max_gpu_bytes": 0}})",
                config.kvCache.value.maxGpuTotalBytes.value),
        SETTING("direct_storage", R"({"weights": {"gpu_direct_storage": true}})",
                R"({"weights": {"gpu_direct_storage": false}})", config.useGpuDirectStorage.value),
        SETTING("multi_block", R"({"performance": {"multi_block_mode": true}})",
                R"({"performance": {"multi_block_mode": false}})", config.perfKnobs.value.multiBlockMode.value),
        SETTING("accumulation", R"({"performance": {"context_fmha_fp32_accumulation": true}})",
                R"({"performance": {"context_fmha_fp32_accumulation": false}})",
                config.perfKnobs.value.enableContextFMHAFP32Acc.value),
        SETTING("graphs", R"({"performance": {"cuda_graph_mode": true}})",
                R"({"performance": {"cuda_graph_mode": false}})", config.perfKnobs.value.cudaGraphMode.value),
        SETTING("normalised", R"({"normalize_log_probs": true})", R"({"normalize_log_probs": false})",
                config.normalizeLogProbs.value),
        SETTING("logits", R"({"gather_generation_logits": true})", R"({"gather_generation_logits": false})",
                config.gatherGenerationLogits.value),
        SETTING("prompt_tables", R"({"prompt_table_offloading": true})", R"({"prompt_table_offloading": false})",
                config.promptTableOffloading.value),
        SETTING("overlap", R"({"trt_overlap": true})", R"({"trt_overlap": false})", config.enableTrtOverlap.value),
        SETTING("fail_fast", R"({"fail_fast_on_attention_window": true})",
                R"({"fail_fast_on_attention_window": false})", config.failFast.value)),
    [](const auto& tested) { return std::string(tested.param.name); });

TEST_F(ExecutorLoadTest, StatesWhatNoSettingSays) {
  SimulatedEngine engine = small();
  engine.payload_dtype = "float16";
  const Driver driver(engine, {.contract = R"({"limits": {"host_cache_bytes": 4096}})",
                               .executor = R"({"guided_decoding": "xgrammar"})"});
  namespace trt = tensorrt_llm::executor;
  const trt::ExecutorConfig& config = *control().configuration;
  EXPECT_EQ(config.batchingType.value, trt::BatchingType::kINFLIGHT);
  EXPECT_EQ(config.parallel.value->mode.value, trt::CommunicationMode::kLEADER);
  EXPECT_EQ(config.parallel.value->numNodes.value, 1);
  EXPECT_EQ(config.decoding.value->getDecodingMode(), trt::DecodingMode::TopKTopP());
  EXPECT_EQ(config.maxBeamWidth.value, 1);
  EXPECT_EQ(config.kvCache.value.hostCacheSize.value, 4096u);
  EXPECT_FALSE(config.kvCache.value.enablePartialReuse.value);
  ASSERT_EQ(config.additionalOutputs.value->size(), 1u);
  EXPECT_EQ(config.additionalOutputs.value->front().name, "hidden");
  EXPECT_FALSE(config.additionalOutputs.value->front().gatherContext) << "a row for each sequence";
  const trt::GuidedDecodingConfig& guides = *config.guidedDecoding.value;
  EXPECT_EQ(guides.getBackend(), trt::GuidedDecodingConfig::GuidedDecodingBackend::kXGRAMMAR);
  EXPECT_EQ(guides.getStopTokenIds(), std::vector<int32_t>{256});
  EXPECT_EQ(guides.getEncodedVocab()->size(), engine.vocab_size);
}

TEST_F(ExecutorLoadTest, StatesOfAnAbsentCacheWhatTheRuntimeLetsOneState) {
  const Driver mining(SimulatedEngine::mining(64));
  const std::vector<std::string> unstated = control().configuration->kvCache.value.unstated();
  EXPECT_EQ(unstated, (std::vector<std::string>{"crossKvCacheFraction", "maxAttentionWindowVec", "sinkTokenLength",
                                                "freeGpuMemoryFraction"}));
}

TEST_F(ExecutorLoadTest, ListsTheTensorsOnTheCardThatRunsTheEngine) {
  SimulatedEngine engine = small();
  engine.payload_dtype = "float16";
  const Driver driver(engine, {.executor = R"({"devices": [3]})"});
  EXPECT_EQ(control().listed_on, 3);
}

TEST_F(ExecutorLoadTest, StatesWhatContractAndSettingsSay) {
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

TEST_F(ExecutorLoadTest, TakesThePoolFromTheRuntime) {
  Driver driver(small());
  EXPECT_EQ(driver.backend().facts().kv_pool_blocks, 256u);
  EXPECT_EQ(driver.backend().facts().samples_max, 8u);
  EXPECT_FALSE(driver.backend().facts().scoring);
}

TEST_F(ExecutorLoadTest, IsOneInAProcess) {
  {
    const Driver first(small());
    EXPECT_SAYS(refusal(small(), {}), "one process an engine");
  }
  EXPECT_EQ(refusal(small(), {}), "loaded");
}

TEST_F(ExecutorLoadTest, SaysWhatTheRuntimeRefuses) {
  EXPECT_SAYS(refusal(small(), {.contract = R"({"runtime": {"version": "1.2.2"}})"}),
              "runtime.version: 1.2.2, and this is TensorRT-LLM 1.2.1");
  control().world_size = 2;
  EXPECT_SAYS(refusal(small(), {}), "the runtime refuses the engine: the world has another size");
  control().world_size = 1;
  EXPECT_SAYS(refusal(small(), {.plan = R"({"tokens_an_answer": "x"})"}), "the runtime refuses the engine");
  EXPECT_SAYS(refusal(small(), {.plan = R"({"simulated": {"kv_block_tokens": 32}})"}),
              "limits.kv_block_tokens: 16, and the runtime's blocks have 32");
  EXPECT_EQ(refusal(small(), {}), "loaded") << "what was refused has left the process free";
}

TEST_F(ExecutorLoadTest, LooksUpOutputsBeforeTheyAreUsed) {
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

TEST_F(ExecutorLoadTest, ARuntimeThatWantsACacheSaysSoAtLoad) {
  const SimulatedEngine engine = SimulatedEngine::mining(64);
  EXPECT_SAYS(refusal(engine, {.plan = R"({"semantics": {"accepts_engines_without_cache": false}})"}),
              "the runtime refuses the engine: the engine has no cache");
  const std::string paged = R"({"build_config": {"plugin_config": {"use_paged_context_fmha": true}}})";
  EXPECT_EQ(refusal(engine, {.config = paged}), "loaded");
  EXPECT_SAYS(
      refusal(engine, {.config = paged, .plan = R"({"semantics": {"accepts_paged_attention_without_cache": false}})"}),
      "the runtime refuses the engine");
}

TEST_F(ExecutorLoadTest, AnOutputWithARowForEachTokenIsFoundAtLoad) {
  const SimulatedEngine engine = SimulatedEngine::mining(64);
  EXPECT_SAYS(refusal(engine, {.plan = R"({"outputs": [
      {"name": "hidden", "extents": [-1, 64], "dtype": "float16", "rows": "tokens"}]})"}),
              "the proving step: a forward pass failed, and with it all requests in it: Encountered an error in "
              "forwardAsync function: final index mismatch");
}

TEST_F(ExecutorLoadTest, APayloadThatIsNotTheContractsIsFoundAtLoad) {
  const SimulatedEngine engine = SimulatedEngine::mining(64);
  EXPECT_SAYS(refusal(engine, {.plan = R"({"simulated": {"hidden_size": 8}})"}),
              "the proving step: the runtime returned output hidden in another form than the contract's");
}

}  // namespace
}  // namespace ifab::standin
