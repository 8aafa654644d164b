// SPDX-License-Identifier: Apache-2.0
//
// Stand-in for the part of TensorRT-LLM's Executor interface that the executor backend uses: names and signatures as
// published for release 1.2, written anew. What is here compiles against the vendor's headers too
// (scripts/check-headers); what is not here, the backend does not use.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace tensorrt_llm::executor {

using SizeType32 = std::int32_t;
using FloatType = float;
using TokenIdType = std::int32_t;
using VecTokens = std::vector<TokenIdType>;
using BeamTokens = std::vector<VecTokens>;
using IdType = std::uint64_t;
using IterationType = std::uint64_t;
using RandomSeedType = std::uint64_t;
using VecLogProbs = std::vector<FloatType>;
using MillisecondsType = std::chrono::milliseconds;
using CacheSaltIDType = std::uint64_t;
using PriorityType = float;

enum class DataType { kBOOL, kUINT8, kINT8, kINT32, kINT64, kBF16, kFP8, kFP16, kFP32, kUNKNOWN };
enum class MemoryType { kCPU, kCPU_PINNED, kCPU_PINNEDPOOL, kGPU, kUVM, kUNKNOWN };
enum class ModelType { kDECODER_ONLY = 0, kENCODER_ONLY = 1, kENCODER_DECODER = 2 };
enum class BatchingType { kSTATIC = 0, kINFLIGHT = 1 };
enum class CapacitySchedulerPolicy { kMAX_UTILIZATION = 0, kGUARANTEED_NO_EVICT = 1, kSTATIC_BATCH = 2 };
enum class ContextChunkingPolicy { kFIRST_COME_FIRST_SERVED = 0, kEQUAL_PROGRESS = 1 };
enum class CommunicationType { kMPI = 0 };
enum class CommunicationMode { kLEADER, kORCHESTRATOR };
enum class FinishReason {
  kNOT_FINISHED = 0,
  kEND_ID = 1,
  kSTOP_WORDS = 2,
  kLENGTH = 3,
  kTIMED_OUT = 4,
  kCANCELLED = 5
};

struct KvCacheStats {
  SizeType32 maxNumBlocks = 0;
  SizeType32 usedNumBlocks = 0;
  SizeType32 tokensPerBlock = 0;
};

struct InflightBatchingStats {
  SizeType32 numScheduledRequests = 0;
  SizeType32 numCtxTokens = 0;
};

struct IterationStats {
  IterationType iter = 0;
  double iterLatencyMS = 0;
  SizeType32 numActiveRequests = 0;
  SizeType32 numQueuedRequests = 0;
  std::optional<KvCacheStats> kvCacheStats;
  std::optional<InflightBatchingStats> inflightBatchingStats;
};

struct RequestPerfMetrics {
  struct KvCacheMetrics {
    SizeType32 numReusedBlocks{0};
  };
  KvCacheMetrics kvCacheMetrics;
};

class DecodingMode {
 public:
  static constexpr DecodingMode TopKTopP() { return DecodingMode(1); }
  bool operator==(DecodingMode const& other) const = default;

 private:
  explicit constexpr DecodingMode(std::uint32_t state) : state_(state) {}
  std::uint32_t state_;
};

}  // namespace tensorrt_llm::executor
