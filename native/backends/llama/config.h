// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "directory.h"
#include "status.h"

namespace ifab::llama {

// The engine's own configuration, by which the library knows its directory.
inline constexpr const char* kConfigurationFile = "llama.json";

// Version of the runtime that is built in.
inline constexpr const char* kRuntimeVersion = IFAB_LIBLLAMA_VERSION;

// Tokens of one cache block: what heads are shared in, and what prompts are cut at. Attention over 64 or more new
// tokens of a sequence takes another path than over fewer, with other last bits, so this is the runtime's number, not a
// choice.
inline constexpr uint32_t kBlockTokens = 64;

// What the runtime rounds the cache of a sequence, or the pool, up to.
inline constexpr uint32_t kCacheGranule = 256;

inline constexpr uint32_t whole_blocks(uint32_t tokens) {
  return tokens / kBlockTokens * kBlockTokens;
}
inline constexpr uint64_t blocks_for(uint64_t tokens) {
  return (tokens + kBlockTokens - 1) / kBlockTokens;
}

// The values of a llama.json that has passed its schema; the schema says what each means.
struct Config {
  enum class Device { kCpu, kCuda };
  enum class Layout { kStreams, kUnified };
  enum class CacheType { kF16, kQ8 };
  struct Payload {
    std::vector<int32_t> layers;
    int32_t dtype = 0;  // IFAB_DTYPE_*
  };

  std::string gguf;
  Device device = Device::kCpu;
  Layout layout = Layout::kStreams;
  uint32_t slots = 0;
  uint32_t resident_heads = 0;
  uint32_t sequence_tokens = 0;
  uint32_t pool_tokens = 0;  // 0 with streams
  uint32_t step_token_budget = 0;
  uint32_t threads = 0;  // that compute a step which generates, where the device is the processor, and choose tokens
  uint32_t batch_threads = 0;
  CacheType cache_type = CacheType::kF16;
  bool reproducible = false;
  std::optional<Payload> payload;

  bool streams() const { return layout == Layout::kStreams; }
  uint32_t sequences() const { return slots + resident_heads; }
};

// Reads the text of a llama.json. Appends everything that is wrong with it; returns the values where nothing is.
std::optional<Config> read_config(std::string_view text, std::vector<Finding>& findings);

// Appends where a configuration disagrees with the contract beside it, or with the files of the directory.
void compare_with_directory(const Config& config, const EngineDirectory& directory, std::vector<Finding>& findings);

}  // namespace ifab::llama
