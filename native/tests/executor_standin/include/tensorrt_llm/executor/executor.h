// SPDX-License-Identifier: Apache-2.0
//
// Stand-in: see types.h. Classes that the backend fills hold plain values. Those of a configuration remember what was
// set, so that tests can tell a field that was stated from one that was left to its default.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <filesystem>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tensorrt_llm/executor/tensor.h"
#include "tensorrt_llm/executor/types.h"

namespace tensorrt_llm::executor {

char const* version() noexcept;

// For setters: throws where the value is one that the vendor's refuses.
void require(bool holds, char const* what);

// A value with its default, and whether somebody stated it.
template <class T>
struct Stated {
  T value{};
  bool stated = false;
  void set(T given) {
    value = std::move(given);
    stated = true;
  }
};

class SamplingConfig {
 public:
  explicit SamplingConfig(SizeType32 beamWidth = 1) : beamWidth_(beamWidth) {}
  void setBeamWidth(SizeType32 beamWidth) { beamWidth_ = beamWidth; }
  void setTopK(std::optional<SizeType32> const& topK) { topK_ = topK; }
  void setTopP(std::optional<FloatType> const& topP) { topP_ = topP; }
  void setMinP(std::optional<FloatType> const& minP) { minP_ = minP; }
  void setSeed(std::optional<RandomSeedType> const& seed) { seed_ = seed; }
  void setTemperature(std::optional<FloatType> const& temperature) { temperature_ = temperature; }
  void setRepetitionPenalty(std::optional<FloatType> const& penalty) { repetitionPenalty_ = penalty; }
  void setPresencePenalty(std::optional<FloatType> const& penalty) { presencePenalty_ = penalty; }
  void setFrequencyPenalty(std::optional<FloatType> const& penalty) { frequencyPenalty_ = penalty; }
  void setNumReturnSequences(std::optional<SizeType32> const& number) { numReturnSequences_ = number; }
  [[nodiscard]] SizeType32 getBeamWidth() const { return beamWidth_; }
  [[nodiscard]] std::optional<SizeType32> getTopK() const { return topK_; }
  [[nodiscard]] std::optional<FloatType> getTopP() const { return topP_; }
  [[nodiscard]] std::optional<FloatType> getMinP() const { return minP_; }
  [[nodiscard]] std::optional<RandomSeedType> getSeed() const { return seed_; }
  [[nodiscard]] std::optional<FloatType> getTemperature() const { return temperature_; }
  [[nodiscard]] std::optional<FloatType> getRepetitionPenalty() const { return repetitionPenalty_; }
  [[nodiscard]] std::optional<FloatType> getPresencePenalty() const { return presencePenalty_; }
  [[nodiscard]] std::optional<FloatType> getFrequencyPenalty() const { return frequencyPenalty_; }
  [[nodiscard]] std::optional<SizeType32> getNumReturnSequences() const { return numReturnSequences_; }

 private:
  SizeType32 beamWidth_;
  std::optional<SizeType32> topK_, numReturnSequences_;
  std::optional<FloatType> topP_, minP_, temperature_, repetitionPenalty_, presencePenalty_, frequencyPenalty_;
  std::optional<RandomSeedType> seed_;
};

class AdditionalModelOutput {
 public:
  explicit AdditionalModelOutput(std::string called, bool withContext = false)
      : name(std::move(called)), gatherContext(withContext) {}
  std::string name;
  bool gatherContext{false};
};

class OutputConfig {
 public:
  bool returnLogProbs = false;
  bool returnContextLogits = false;
  bool returnGenerationLogits = false;
  bool excludeInputFromOutput = false;
  bool returnEncoderOutput = false;
  bool returnPerfMetrics = false;
  std::optional<std::vector<AdditionalModelOutput>> additionalModelOutputs;
};

class GuidedDecodingParams {
 public:
  enum class GuideType { kJSON = 0, kJSON_SCHEMA = 1, kREGEX = 2, kEBNF_GRAMMAR = 3, kSTRUCTURAL_TAG = 4 };
  explicit GuidedDecodingParams(GuideType guideType, std::optional<std::string> guide = std::nullopt)
      : type_(guideType), guide_(std::move(guide)) {}
  [[nodiscard]] GuideType getGuideType() const { return type_; }
  [[nodiscard]] std::optional<std::string> getGuide() const { return guide_; }

 private:
  GuideType type_;
  std::optional<std::string> guide_;
};

using RetentionPriority = SizeType32;

class KvCacheRetentionConfig {
 public:
  static constexpr RetentionPriority kDefaultRetentionPriority = 35;
  struct TokenRangeRetentionConfig {
    explicit TokenRangeRetentionConfig(SizeType32 start, std::optional<SizeType32> end = std::nullopt,
                                       RetentionPriority level = kDefaultRetentionPriority)
        : tokenStart(start), tokenEnd(end), priority(level) {}
    SizeType32 tokenStart;
    std::optional<SizeType32> tokenEnd;
    RetentionPriority priority;
  };
  explicit KvCacheRetentionConfig(std::vector<TokenRangeRetentionConfig> const& ranges) : ranges_(ranges) {}
  [[nodiscard]] std::vector<TokenRangeRetentionConfig> getTokenRangeRetentionConfigs() const { return ranges_; }

 private:
  std::vector<TokenRangeRetentionConfig> ranges_;
};

class Request {
 public:
  Request(VecTokens inputTokenIds, SizeType32 maxTokens) : tokens_(std::move(inputTokenIds)), maxTokens_(maxTokens) {}
  void setStreaming(bool streaming) { streaming_ = streaming; }
  void setSamplingConfig(SamplingConfig const& config) { sampling_ = config; }
  void setOutputConfig(OutputConfig const& config) { output_ = config; }
  void setEndId(SizeType32 endId) { endId_ = endId; }
  void setStopWords(std::list<VecTokens> const& stopWords) { stopWords_ = stopWords; }
  void setKvCacheRetentionConfig(KvCacheRetentionConfig const& config) { retention_ = config; }
  void setClientId(IdType clientId) { clientId_ = clientId; }
  void setPriority(PriorityType priority) { priority_ = priority; }
  void setReturnAllGeneratedTokens(bool all) { allTokens_ = all; }
  void setGuidedDecodingParams(GuidedDecodingParams const& params) { guide_ = params; }
  void setCacheSaltID(CacheSaltIDType salt) { salt_ = salt; }
  [[nodiscard]] VecTokens getInputTokenIds() const { return tokens_; }
  [[nodiscard]] SizeType32 getMaxTokens() const { return maxTokens_; }
  [[nodiscard]] bool getStreaming() const { return streaming_; }
  [[nodiscard]] SamplingConfig getSamplingConfig() const { return sampling_; }
  [[nodiscard]] OutputConfig getOutputConfig() const { return output_; }
  [[nodiscard]] std::optional<SizeType32> getEndId() const { return endId_; }
  [[nodiscard]] std::optional<std::list<VecTokens>> getStopWords() const { return stopWords_; }
  [[nodiscard]] std::optional<KvCacheRetentionConfig> getKvCacheRetentionConfig() const { return retention_; }
  [[nodiscard]] std::optional<IdType> getClientId() const { return clientId_; }
  [[nodiscard]] PriorityType getPriority() const { return priority_; }
  [[nodiscard]] bool getReturnAllGeneratedTokens() const { return allTokens_; }
  [[nodiscard]] std::optional<GuidedDecodingParams> getGuidedDecodingParams() const { return guide_; }
  [[nodiscard]] std::optional<CacheSaltIDType> getCacheSaltID() const { return salt_; }

 private:
  VecTokens tokens_;
  SizeType32 maxTokens_;
  bool streaming_ = false;
  SamplingConfig sampling_;
  OutputConfig output_;
  std::optional<SizeType32> endId_;
  std::optional<std::list<VecTokens>> stopWords_;
  std::optional<KvCacheRetentionConfig> retention_;
  std::optional<IdType> clientId_;
  PriorityType priority_ = 0.5f;
  bool allTokens_ = false;
  std::optional<GuidedDecodingParams> guide_;
  std::optional<CacheSaltIDType> salt_;
};

struct AdditionalOutput {
  AdditionalOutput(std::string called, Tensor tensor) : name(std::move(called)), output(std::move(tensor)) {}
  std::string name;
  Tensor output;
};

struct Result {
  bool isFinal = false;
  BeamTokens outputTokenIds;
  std::optional<std::vector<VecLogProbs>> logProbs;
  std::vector<FinishReason> finishReasons;
  SizeType32 sequenceIndex{0};
  bool isSequenceFinal = false;
  std::optional<RequestPerfMetrics> requestPerfMetrics;
  std::vector<AdditionalOutput> additionalOutputs;
};

class Response {
 public:
  Response(IdType requestId, std::string errorMsg) : id_(requestId), error_(std::move(errorMsg)) {}
  Response(IdType requestId, Result result) : id_(requestId), result_(std::move(result)) {}
  [[nodiscard]] IdType getRequestId() const { return id_; }
  [[nodiscard]] bool hasError() const { return error_.has_value(); }
  // Each throws where it is the other one.
  [[nodiscard]] std::string const& getErrorMsg() const { return error_.value(); }
  [[nodiscard]] Result const& getResult() const { return result_.value(); }

 private:
  IdType id_;
  std::optional<std::string> error_;
  std::optional<Result> result_;
};

class DynamicBatchConfig {};

class SchedulerConfig {
 public:
  explicit SchedulerConfig(
      CapacitySchedulerPolicy capacitySchedulerPolicy = CapacitySchedulerPolicy::kGUARANTEED_NO_EVICT,
      std::optional<ContextChunkingPolicy> contextChunkingPolicy = std::nullopt,
      std::optional<DynamicBatchConfig> dynamicBatchConfig = std::nullopt)
      : policy_(capacitySchedulerPolicy), chunking_(contextChunkingPolicy), dynamic_(dynamicBatchConfig) {}
  [[nodiscard]] CapacitySchedulerPolicy getCapacitySchedulerPolicy() const { return policy_; }
  [[nodiscard]] std::optional<ContextChunkingPolicy> getContextChunkingPolicy() const { return chunking_; }
  [[nodiscard]] std::optional<DynamicBatchConfig> getDynamicBatchConfig() const { return dynamic_; }

 private:
  CapacitySchedulerPolicy policy_;
  std::optional<ContextChunkingPolicy> chunking_;
  std::optional<DynamicBatchConfig> dynamic_;
};

class KvCacheConfig {
 public:
  void setEnableBlockReuse(bool value) { enableBlockReuse.set(value); }
  void setEnablePartialReuse(bool value) { enablePartialReuse.set(value); }
  void setCopyOnPartialReuse(bool value) { copyOnPartialReuse.set(value); }
  void setMaxTokens(std::optional<SizeType32> value) {
    require(value.value_or(1) > 0, "maxTokens");
    maxTokens.set(value);
  }
  void setMaxAttentionWindowVec(std::vector<SizeType32> value) {
    for (SizeType32 const window : value) require(window > 0, "maxAttentionWindow");
    maxAttentionWindowVec.set(std::move(value));
  }
  void setSinkTokenLength(SizeType32 value) {
    require(value > 0, "sinkTokenLength");
    sinkTokenLength.set(value);
  }
  void setFreeGpuMemoryFraction(FloatType value) {
    require(value > 0 && value < 1, "freeGpuMemoryFraction");
    freeGpuMemoryFraction.set(value);
  }
  void setHostCacheSize(size_t value) { hostCacheSize.set(value); }
  void setOnboardBlocks(bool value) { onboardBlocks.set(value); }
  void setSecondaryOffloadMinPriority(std::optional<RetentionPriority> value) {
    secondaryOffloadMinPriority.set(value);
  }
  void setEventBufferMaxSize(size_t value) { eventBufferMaxSize.set(value); }
  void setUseUvm(bool value) { useUvm.set(value); }
  void setAttentionDpEventsGatherPeriodMs(SizeType32 value) {
    require(value > 0, "attentionDpEventsGatherPeriodMs");
    attentionDpEventsGatherPeriodMs.set(value);
  }
  void setMaxGpuTotalBytes(std::uint64_t value) { maxGpuTotalBytes.set(value); }
  // What of it nobody has stated.
  [[nodiscard]] std::vector<std::string> unstated() const;

  Stated<bool> enableBlockReuse{true};
  Stated<bool> enablePartialReuse{true};
  Stated<bool> copyOnPartialReuse{true};
  Stated<std::optional<SizeType32>> maxTokens;
  Stated<std::vector<SizeType32>> maxAttentionWindowVec;
  Stated<SizeType32> sinkTokenLength;
  Stated<FloatType> freeGpuMemoryFraction{0.9f};
  Stated<size_t> hostCacheSize;
  Stated<bool> onboardBlocks{true};
  Stated<std::optional<RetentionPriority>> secondaryOffloadMinPriority;
  Stated<size_t> eventBufferMaxSize;
  Stated<bool> useUvm;
  Stated<SizeType32> attentionDpEventsGatherPeriodMs{5};
  Stated<std::uint64_t> maxGpuTotalBytes;
};

class ExtendedRuntimePerfKnobConfig {
 public:
  void setMultiBlockMode(bool value) { multiBlockMode.set(value); }
  void setEnableContextFMHAFP32Acc(bool value) { enableContextFMHAFP32Acc.set(value); }
  void setCudaGraphMode(bool value) { cudaGraphMode.set(value); }
  void setCudaGraphCacheSize(SizeType32 value) { cudaGraphCacheSize.set(value); }
  [[nodiscard]] std::vector<std::string> unstated() const;

  Stated<bool> multiBlockMode{true};
  Stated<bool> enableContextFMHAFP32Acc;
  Stated<bool> cudaGraphMode;
  Stated<SizeType32> cudaGraphCacheSize;
};

class ParallelConfig {
 public:
  void setCommunicationType(CommunicationType value) { type.set(value); }
  void setCommunicationMode(CommunicationMode value) { mode.set(value); }
  void setDeviceIds(std::vector<SizeType32> const& value) { deviceIds.set(value); }
  void setNumNodes(SizeType32 value) { numNodes.set(value); }
  [[nodiscard]] std::vector<std::string> unstated() const;

  Stated<CommunicationType> type{CommunicationType::kMPI};
  Stated<CommunicationMode> mode{CommunicationMode::kLEADER};
  Stated<std::vector<SizeType32>> deviceIds;
  Stated<SizeType32> numNodes;
};

class DecodingConfig {
 public:
  void setDecodingMode(DecodingMode const& value) { mode_ = value; }
  [[nodiscard]] std::optional<DecodingMode> getDecodingMode() const { return mode_; }

 private:
  std::optional<DecodingMode> mode_;
};

class GuidedDecodingConfig {
 public:
  enum class GuidedDecodingBackend { kXGRAMMAR = 0, kLLGUIDANCE = 1 };
  explicit GuidedDecodingConfig(GuidedDecodingBackend backend) : backend_(backend) {}
  void setEncodedVocab(std::vector<std::string> const& vocabulary) { vocabulary_ = vocabulary; }
  void setTokenizerStr(std::string const& tokenizer) { tokenizer_ = tokenizer; }
  void setStopTokenIds(std::vector<TokenIdType> const& ids) { stopIds_ = ids; }
  [[nodiscard]] GuidedDecodingBackend getBackend() const { return backend_; }
  [[nodiscard]] std::optional<std::vector<std::string>> getEncodedVocab() const { return vocabulary_; }
  [[nodiscard]] std::optional<std::string> getTokenizerStr() const { return tokenizer_; }
  [[nodiscard]] std::optional<std::vector<TokenIdType>> getStopTokenIds() const { return stopIds_; }
  void validate() const;

 private:
  GuidedDecodingBackend backend_;
  std::optional<std::vector<std::string>> vocabulary_;
  std::optional<std::string> tokenizer_;
  std::optional<std::vector<TokenIdType>> stopIds_;
};

class ExecutorConfig {
 public:
  void setMaxBeamWidth(SizeType32 value) { maxBeamWidth.set(value); }
  void setMaxBatchSize(SizeType32 value) { maxBatchSize.set(value); }
  void setMaxNumTokens(SizeType32 value) { maxNumTokens.set(value); }
  void setSchedulerConfig(SchedulerConfig const& value) { scheduler.set(value); }
  void setKvCacheConfig(KvCacheConfig const& value) { kvCache.set(value); }
  void setEnableChunkedContext(bool value) { enableChunkedContext.set(value); }
  void setNormalizeLogProbs(bool value) { normalizeLogProbs.set(value); }
  void setIterStatsMaxIterations(SizeType32 value) { iterStatsMaxIterations.set(value); }
  void setRequestStatsMaxIterations(SizeType32 value) { requestStatsMaxIterations.set(value); }
  void setBatchingType(BatchingType value) { batchingType.set(value); }
  void setParallelConfig(ParallelConfig const& value) { parallel.set(value); }
  void setDecodingConfig(DecodingConfig const& value) { decoding.set(value); }
  void setUseGpuDirectStorage(bool const& value) { useGpuDirectStorage.set(value); }
  void setGpuWeightsPercent(float const& value) { gpuWeightsPercent.set(value); }
  void setMaxQueueSize(std::optional<SizeType32> const& value) { maxQueueSize.set(value); }
  void setExtendedRuntimePerfKnobConfig(ExtendedRuntimePerfKnobConfig const& value) { perfKnobs.set(value); }
  void setRecvPollPeriodMs(SizeType32 const& value) { recvPollPeriodMs.set(value); }
  void setMaxSeqIdleMicroseconds(std::uint64_t value) { maxSeqIdleMicroseconds.set(value); }
  void setGuidedDecodingConfig(GuidedDecodingConfig const& value) { guidedDecoding.set(value); }
  void setAdditionalModelOutputs(std::vector<AdditionalModelOutput> const& value) { additionalOutputs.set(value); }
  void setGatherGenerationLogits(bool value) { gatherGenerationLogits.set(value); }
  void setPromptTableOffloading(bool value) { promptTableOffloading.set(value); }
  void setEnableTrtOverlap(bool value) { enableTrtOverlap.set(value); }
  void setFailFastOnAttentionWindowTooLarge(bool value) { failFast.set(value); }
  [[nodiscard]] std::vector<std::string> unstated() const;

  Stated<SizeType32> maxBeamWidth{1};
  Stated<std::optional<SizeType32>> maxBatchSize;
  Stated<std::optional<SizeType32>> maxNumTokens;
  Stated<SchedulerConfig> scheduler;
  Stated<KvCacheConfig> kvCache;
  Stated<bool> enableChunkedContext{true};
  Stated<bool> normalizeLogProbs{true};
  Stated<SizeType32> iterStatsMaxIterations{1000};
  Stated<SizeType32> requestStatsMaxIterations;
  Stated<BatchingType> batchingType{BatchingType::kINFLIGHT};
  Stated<std::optional<ParallelConfig>> parallel;
  Stated<std::optional<DecodingConfig>> decoding;
  Stated<bool> useGpuDirectStorage;
  Stated<float> gpuWeightsPercent{1.0f};
  Stated<std::optional<SizeType32>> maxQueueSize;
  Stated<ExtendedRuntimePerfKnobConfig> perfKnobs;
  Stated<SizeType32> recvPollPeriodMs;
  Stated<std::uint64_t> maxSeqIdleMicroseconds{180'000'000};
  Stated<std::optional<GuidedDecodingConfig>> guidedDecoding;
  Stated<std::optional<std::vector<AdditionalModelOutput>>> additionalOutputs;
  Stated<bool> gatherGenerationLogits;
  Stated<bool> promptTableOffloading;
  Stated<bool> enableTrtOverlap;
  Stated<bool> failFast;
};

class Executor {
 public:
  Executor(std::filesystem::path const& modelPath, ModelType modelType, ExecutorConfig const& executorConfig);
  ~Executor();
  Executor(Executor const& executor) = delete;
  Executor& operator=(Executor const& executor) = delete;

  [[nodiscard]] IdType enqueueRequest(Request const& request);
  [[nodiscard]] std::vector<Response> awaitResponses(
      std::optional<std::chrono::milliseconds> const& timeout = std::nullopt);
  void cancelRequest(IdType requestId);
  void shutdown();
  std::deque<IterationStats> getLatestIterationStats();

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tensorrt_llm::executor
