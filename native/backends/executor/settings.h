// SPDX-License-Identifier: Apache-2.0
//
// How the Executor is to run an engine: executor.json, whose rules are in engines/schema/executor.schema.json.
//
// Contract, config.json and executor.json together give every field of the vendor's configuration; none is left to its
// default, because its defaults are sized for somebody else: a queue without end, nine tenths of what the card has
// left, reuse that is switched off with a warning. A file that is absent is read as one without fields, so that every
// field is named in the refusal.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "contract.h"
#include "directory.h"
#include "engine_config.h"
#include "status.h"

namespace ifab::executor {

inline constexpr const char* kSettingsFile = "executor.json";

enum class CapacityPolicy { kGuaranteedNoEvict, kMaxUtilization };
enum class ChunkingPolicy { kFirstComeFirstServed, kEqualProgress };

struct CacheSettings {
  bool block_reuse = false;
  bool copy_on_partial_reuse = false;
  uint32_t max_tokens = 0;                    // of the pool; the contract's fraction of the card's memory bounds it too
  std::vector<int32_t> max_attention_window;  // tokens, one for each layer, or fewer that repeat
  uint32_t sink_tokens = 0;
  bool onboard_blocks = false;
  int32_t offload_priority = 0;  // blocks below it are dropped instead of moved to the host's cache
  uint32_t event_buffer = 0;     // events kept; 0: none
  uint32_t event_gather_ms = 0;
  bool use_uvm = false;
  uint64_t max_gpu_bytes = 0;  // 0: no further bound
};

struct Settings {
  std::vector<int32_t> devices;  // numbers of the cards, one a rank
  CapacityPolicy capacity_policy = CapacityPolicy::kGuaranteedNoEvict;
  ChunkingPolicy chunking_policy = ChunkingPolicy::kFirstComeFirstServed;
  bool chunked_context = false;  // a prompt may be computed over several iterations
  uint32_t max_queue_size = 0;   // sequences that wait inside the runtime
  uint64_t max_idle_us = 0;      // after which the runtime frees a sequence that nobody moves
  uint32_t receive_poll_ms = 0;
  uint32_t iteration_stats = 0;  // iterations whose statistics are kept until they are read
  uint32_t request_stats = 0;
  std::optional<CacheSettings> cache;  // empty: the engine has none
  bool gpu_direct_storage = false;
  double gpu_weights_percent = 0;  // share of the weights that stays on the card
  bool multi_block_mode = false;
  bool context_fmha_fp32_accumulation = false;
  bool cuda_graph_mode = false;
  uint32_t cuda_graph_cache = 0;  // graphs kept
  bool normalize_log_probs = false;
  bool gather_generation_logits = false;
  bool prompt_table_offloading = false;
  bool trt_overlap = false;
  bool fail_fast_on_attention_window = false;
  bool guided_decoding = false;              // by xgrammar; the C++ runtime refuses llguidance
  std::vector<std::string> payload_outputs;  // of the engine, one for each layer of the contract's payload
};

// Reads executor.json. Appends everything that is wrong with it; returns the values where nothing is.
std::optional<Settings> read_settings(const EngineDirectory& directory, std::vector<Finding>& findings);

// Appends every disagreement between what the contract promises, what the engine was built for, and how it is to run.
void compare(const Settings& settings, const EngineConfig& engine, const ContractValues& contract,
             std::vector<Finding>& findings);

// File of the engine of one rank.
std::string rank_file(uint32_t rank);

}  // namespace ifab::executor
