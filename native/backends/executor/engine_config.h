// SPDX-License-Identifier: Apache-2.0
//
// What a TensorRT-LLM engine says of itself: config.json, which its builder writes.
//
// The vendor's parser fills in what is missing (a continuous cache, no limits, float32 logits), and some of what it
// reads overrides something else. Here every field that decides what a node may be asked is required, and whatever
// would be overridden, ignored or silently switched off at run time is a finding.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "directory.h"
#include "status.h"

namespace ifab::executor {

// The engine's own configuration, by which the library knows its directory: the one that has `pretrained_config`.
inline constexpr const char* kEngineConfigFile = "config.json";

struct EngineConfig {
  std::string architecture;
  uint32_t layers = 0;
  uint32_t hidden_size = 0;
  uint32_t vocab_size = 0;
  uint32_t tensor_parallel = 0;
  uint32_t pipeline_parallel = 0;
  std::string cache_dtype;  // of the KV cache's values, in the contract's words: "float16", "fp8"; where `cached`
  bool cached = false;      // paged; an engine without a cache computes prompts only
  bool paged_context_attention = false;
  bool gathers_context_logits = false;
  uint32_t block_tokens = 0;
  uint32_t max_batch_size = 0;  // sequences
  uint32_t max_step_tokens = 0;
  uint32_t max_sequence_tokens = 0;
  uint32_t max_beams = 0;
  uint32_t default_sink_tokens = 0;  // in force where the run time says nothing of them
};

// Whether config.json lies there and has `pretrained_config`: another vendor's file of that name is not ours.
bool is_engine_config(const EngineDirectory& directory);

// Reads config.json. Appends everything that is missing, mistyped, or of a kind that the Executor would refuse; returns
// the values where nothing is. Fields that are not named here are the builder's own and are passed over.
std::optional<EngineConfig> read_engine_config(const EngineDirectory& directory, std::vector<Finding>& findings);

}  // namespace ifab::executor
