// SPDX-License-Identifier: Apache-2.0
#include "executor_config.h"

#include <optional>
#include <vector>

namespace ifab::executor {
namespace {

namespace trt = tensorrt_llm::executor;

constexpr trt::SizeType32 kGatherMs = 5;  // of events that are off: it has to be more than 0

trt::SizeType32 number(uint64_t value) {
  return static_cast<trt::SizeType32>(value);
}

trt::SchedulerConfig scheduler_of(const Settings& settings) {
  // It has no setters. No dynamic batch: tuning would move slots and budget away from what the contract promises.
  return trt::SchedulerConfig(
      settings.capacity_policy == CapacityPolicy::kMaxUtilization ? trt::CapacitySchedulerPolicy::kMAX_UTILIZATION
                                                                  : trt::CapacitySchedulerPolicy::kGUARANTEED_NO_EVICT,
      settings.chunking_policy == ChunkingPolicy::kEqualProgress ? trt::ContextChunkingPolicy::kEQUAL_PROGRESS
                                                                 : trt::ContextChunkingPolicy::kFIRST_COME_FIRST_SERVED,
      std::nullopt);
}

trt::KvCacheConfig cache_of(const Settings& settings, const ContractValues& contract) {
  trt::KvCacheConfig config;
  config.setEnablePartialReuse(false);
  config.setHostCacheSize(contract.limits.host_cache_bytes);
  if (!settings.cache) {
    // The runtime makes no cache for such an engine. These say that none is wanted; that it could be of no tokens or no
    // share of the memory, the setters do not let one say.
    config.setEnableBlockReuse(false);
    config.setCopyOnPartialReuse(false);
    config.setMaxTokens(number(contract.limits.max_sequence_tokens));
    config.setOnboardBlocks(true);
    config.setSecondaryOffloadMinPriority(std::nullopt);
    config.setEventBufferMaxSize(0);
    config.setUseUvm(false);
    config.setAttentionDpEventsGatherPeriodMs(kGatherMs);
    config.setMaxGpuTotalBytes(0);
    return config;
  }
  const CacheSettings& cache = *settings.cache;
  config.setEnableBlockReuse(cache.block_reuse);
  config.setCopyOnPartialReuse(cache.copy_on_partial_reuse);
  config.setMaxTokens(number(cache.max_tokens));
  config.setMaxAttentionWindowVec(cache.max_attention_window);
  // Its setter refuses 0, which is said by not calling it; settings.cpp sees to it that the engine says nothing else.
  if (cache.sink_tokens > 0) config.setSinkTokenLength(number(cache.sink_tokens));
  config.setFreeGpuMemoryFraction(static_cast<float>(*contract.limits.kv_cache_memory_fraction));
  config.setOnboardBlocks(cache.onboard_blocks);
  config.setSecondaryOffloadMinPriority(cache.offload_priority);
  config.setEventBufferMaxSize(cache.event_buffer);
  config.setUseUvm(cache.use_uvm);
  config.setAttentionDpEventsGatherPeriodMs(number(cache.event_gather_ms));
  config.setMaxGpuTotalBytes(cache.max_gpu_bytes);
  return config;
}

trt::ParallelConfig parallel_of(const Settings& settings) {
  trt::ParallelConfig config;
  config.setCommunicationType(trt::CommunicationType::kMPI);
  config.setCommunicationMode(trt::CommunicationMode::kLEADER);
  config.setDeviceIds(settings.devices);
  config.setNumNodes(1);
  return config;
}

trt::ExtendedRuntimePerfKnobConfig performance_of(const Settings& settings) {
  trt::ExtendedRuntimePerfKnobConfig config;
  config.setMultiBlockMode(settings.multi_block_mode);
  config.setEnableContextFMHAFP32Acc(settings.context_fmha_fp32_accumulation);
  config.setCudaGraphMode(settings.cuda_graph_mode);
  config.setCudaGraphCacheSize(number(settings.cuda_graph_cache));
  return config;
}

trt::GuidedDecodingConfig guides_of(const ContractValues& contract, const Vocabulary& vocabulary) {
  trt::GuidedDecodingConfig config(trt::GuidedDecodingConfig::GuidedDecodingBackend::kXGRAMMAR);
  config.setEncodedVocab(vocabulary.tokens);
  config.setTokenizerStr(vocabulary.tokenizer);
  config.setStopTokenIds(contract.tokenizer.end_token_ids);
  config.validate();
  return config;
}

}  // namespace

trt::ExecutorConfig make_executor_config(const Settings& settings, const ContractValues& contract,
                                         const Vocabulary& vocabulary) {
  trt::ExecutorConfig config;
  config.setMaxBeamWidth(number(contract.limits.beams));
  config.setMaxBatchSize(number(contract.limits.slots));
  config.setMaxNumTokens(number(contract.limits.step_token_budget));
  config.setSchedulerConfig(scheduler_of(settings));
  config.setKvCacheConfig(cache_of(settings, contract));
  config.setEnableChunkedContext(settings.chunked_context);
  config.setNormalizeLogProbs(settings.normalize_log_probs);
  config.setIterStatsMaxIterations(number(settings.iteration_stats));
  config.setRequestStatsMaxIterations(number(settings.request_stats));
  config.setBatchingType(trt::BatchingType::kINFLIGHT);
  config.setParallelConfig(parallel_of(settings));
  trt::DecodingConfig decoding;
  decoding.setDecodingMode(trt::DecodingMode::TopKTopP());
  config.setDecodingConfig(decoding);
  config.setUseGpuDirectStorage(settings.gpu_direct_storage);
  config.setGpuWeightsPercent(static_cast<float>(settings.gpu_weights_percent));
  config.setMaxQueueSize(number(settings.max_queue_size));
  config.setExtendedRuntimePerfKnobConfig(performance_of(settings));
  config.setRecvPollPeriodMs(number(settings.receive_poll_ms));
  config.setMaxSeqIdleMicroseconds(settings.max_idle_us);
  if (settings.guided_decoding) config.setGuidedDecodingConfig(guides_of(contract, vocabulary));
  std::vector<trt::AdditionalModelOutput> outputs;
  for (const std::string& name : settings.payload_outputs) outputs.emplace_back(name, false);
  config.setAdditionalModelOutputs(outputs);
  config.setGatherGenerationLogits(settings.gather_generation_logits);
  config.setPromptTableOffloading(settings.prompt_table_offloading);
  config.setEnableTrtOverlap(settings.trt_overlap);
  config.setFailFastOnAttentionWindowTooLarge(settings.fail_fast_on_attention_window);
  return config;
}

}  // namespace ifab::executor
