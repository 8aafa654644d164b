// SPDX-License-Identifier: Apache-2.0
#include "settings.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <string_view>
#include <utility>

#include "document.h"
#include "schema.h"

namespace ifab::executor {
namespace {

uint32_t number(const Value& value) {
  return static_cast<uint32_t>(value.integer());
}

CacheSettings cache_of(const Value& value) {
  CacheSettings cache;
  cache.block_reuse = value.at("block_reuse").boolean();
  cache.copy_on_partial_reuse = value.at("copy_on_partial_reuse").boolean();
  cache.max_tokens = number(value.at("max_tokens"));
  for (const Value& window : value.at("max_attention_window").items()) {
    cache.max_attention_window.push_back(static_cast<int32_t>(window.integer()));
  }
  cache.sink_tokens = number(value.at("sink_tokens"));
  cache.onboard_blocks = value.at("onboard_blocks").boolean();
  cache.offload_priority = static_cast<int32_t>(value.at("offload_priority").integer());
  cache.event_buffer = number(value.at("event_buffer"));
  cache.event_gather_ms = number(value.at("event_gather_ms"));
  cache.use_uvm = value.at("use_uvm").boolean();
  cache.max_gpu_bytes = static_cast<uint64_t>(value.at("max_gpu_bytes").integer());
  return cache;
}

Settings settings_of(const Value& document) {
  Settings settings;
  for (const Value& device : document.at("devices").items()) {
    settings.devices.push_back(static_cast<int32_t>(device.integer()));
  }
  const Value& scheduler = document.at("scheduler");
  settings.capacity_policy = scheduler.at("capacity_policy").text() == "max_utilization"
                                 ? CapacityPolicy::kMaxUtilization
                                 : CapacityPolicy::kGuaranteedNoEvict;
  settings.chunking_policy = scheduler.at("chunking_policy").text() == "equal_progress"
                                 ? ChunkingPolicy::kEqualProgress
                                 : ChunkingPolicy::kFirstComeFirstServed;
  settings.chunked_context = document.at("chunked_context").boolean();
  settings.max_queue_size = number(document.at("max_queue_size"));
  settings.max_idle_us = static_cast<uint64_t>(document.at("max_idle_us").integer());
  settings.receive_poll_ms = number(document.at("receive_poll_ms"));
  settings.iteration_stats = number(document.at("iteration_stats"));
  settings.request_stats = number(document.at("request_stats"));
  if (const Value& cache = document.at("kv_cache"); !cache.not_applicable()) settings.cache = cache_of(cache);
  settings.gpu_direct_storage = document.at("weights").at("gpu_direct_storage").boolean();
  settings.gpu_weights_percent = document.at("weights").at("gpu_percent").real();
  const Value& performance = document.at("performance");
  settings.multi_block_mode = performance.at("multi_block_mode").boolean();
  settings.context_fmha_fp32_accumulation = performance.at("context_fmha_fp32_accumulation").boolean();
  settings.cuda_graph_mode = performance.at("cuda_graph_mode").boolean();
  settings.cuda_graph_cache = number(performance.at("cuda_graph_cache"));
  settings.normalize_log_probs = document.at("normalize_log_probs").boolean();
  settings.gather_generation_logits = document.at("gather_generation_logits").boolean();
  settings.prompt_table_offloading = document.at("prompt_table_offloading").boolean();
  settings.trt_overlap = document.at("trt_overlap").boolean();
  settings.fail_fast_on_attention_window = document.at("fail_fast_on_attention_window").boolean();
  settings.guided_decoding = !document.at("guided_decoding").not_applicable();
  for (const Value& output : document.at("payload_outputs").items()) settings.payload_outputs.push_back(output.text());
  return settings;
}

// Whether that release is before 1.2.1. One that is not three numbers is not: it is compared with the library's at
// load.
bool before_sound_reuse(const std::string& version) {
  std::array<unsigned, 3> parts{};
  if (std::sscanf(version.c_str(), "%u.%u.%u", &parts[0], &parts[1], &parts[2]) != 3) return false;
  return parts < std::array<unsigned, 3>{1, 2, 1};
}

// Comparisons between the three documents, each named by the document that is at fault.
class Comparison {
 public:
  Comparison(const Settings& settings, const EngineConfig& engine, const ContractValues& contract,
             std::vector<Finding>& findings)
      : settings_(settings), engine_(engine), contract_(contract), limits_(contract.limits), findings_(findings) {}

  void run() {
    compare_model();
    compare_sizes();
    compare_cache();
    compare_prompts();
    compare_outputs();
  }

 private:
  void add(const char* path, std::string found, std::string expected) {
    add_finding(findings_, {path, std::move(found), std::move(expected)});
  }
  void equal(const char* path, uint64_t contract, uint64_t engine) {
    if (contract != engine) add(path, std::to_string(contract), "the engine's, " + std::to_string(engine));
  }
  void at_most(const char* path, uint64_t value, uint64_t most, const char* whose) {
    if (value > most) add(path, std::to_string(value), "at most " + std::to_string(most) + ", " + whose);
  }
  static std::string own(const char* field) { return std::string(kSettingsFile) + ":" + field; }

  void compare_model() {
    equal("model.layers", contract_.model.layers, engine_.layers);
    equal("model.hidden_size", contract_.model.hidden_size, engine_.hidden_size);
    equal("model.vocab_size", contract_.model.vocab_size, engine_.vocab_size);
    equal("card.tensor_parallel", contract_.card.tensor_parallel, engine_.tensor_parallel);
    equal("card.pipeline_parallel", contract_.card.pipeline_parallel, engine_.pipeline_parallel);
    if (contract_.card.count != 1) {
      add("card.count", std::to_string(contract_.card.count),
          "1: an engine over several cards needs one process a rank, which the library does not start");
    }
    if (settings_.devices.size() != contract_.card.count) {
      add(own("devices").c_str(), std::to_string(settings_.devices.size()) + " devices",
          "one for each card of the contract, " + std::to_string(contract_.card.count));
    }
    if (contract_.runtime.name != "tensorrt-llm") {
      add("runtime.name", render_text(contract_.runtime.name), "\"tensorrt-llm\"");
    }
  }

  void compare_sizes() {
    at_most("limits.slots", limits_.slots, engine_.max_batch_size, "build_config.max_batch_size of config.json");
    equal("limits.built_step_token_budget", limits_.built_step_token_budget, engine_.max_step_tokens);
    at_most("limits.max_sequence_tokens", limits_.max_sequence_tokens, engine_.max_sequence_tokens,
            "build_config.max_seq_len of config.json");
    if (limits_.beams != 1)
      add("limits.beams", std::to_string(limits_.beams), "1: requests ask for samples, not beams");
    if (settings_.max_queue_size < limits_.slots) {
      add(own("max_queue_size").c_str(), std::to_string(settings_.max_queue_size),
          "at least limits.slots of the contract, " + std::to_string(limits_.slots));
    }
  }

  void compare_cache() {
    const bool contract_cached = limits_.kv_block_tokens.has_value();
    if (contract_cached != engine_.cached) {
      return add("model.kv_cache_dtype", contract_cached ? "a cache" : "no cache",
                 engine_.cached ? "a cache, as config.json says" : "no cache, as config.json says");
    }
    if (settings_.cache.has_value() != engine_.cached) {
      return add(own("kv_cache").c_str(), settings_.cache ? "a cache" : "\"not_applicable\"",
                 engine_.cached ? "settings, since the engine has a cache" : "\"not_applicable\", since it has none");
    }
    if (!engine_.cached) {
      if (limits_.max_output_tokens > 0) {
        add("limits.max_output_tokens", std::to_string(limits_.max_output_tokens),
            "0, since an engine without a cache computes prompts only");
      }
      return;
    }
    equal("limits.kv_block_tokens", *limits_.kv_block_tokens, engine_.block_tokens);
    if (*contract_.model.kv_cache_dtype != engine_.cache_dtype) {
      add("model.kv_cache_dtype", render_text(*contract_.model.kv_cache_dtype),
          render_text(engine_.cache_dtype) + ", as config.json says");
    }
    if (!limits_.kv_cache_memory_fraction) {
      add("limits.kv_cache_memory_fraction", "\"not_applicable\"",
          "the share of the card's free memory that the cache may take");
    } else if (*limits_.kv_cache_memory_fraction >= 1) {
      add("limits.kv_cache_memory_fraction", "1", "less than 1: the runtime takes no other share");
    }
    const CacheSettings& cache = *settings_.cache;
    if (cache.max_tokens < limits_.max_sequence_tokens) {
      add(own("kv_cache.max_tokens").c_str(), std::to_string(cache.max_tokens),
          "at least limits.max_sequence_tokens of the contract, " + std::to_string(limits_.max_sequence_tokens));
    }
    // The runtime switches reuse off with a warning where the engine cannot do it, and takes an engine with paged
    // context attention only with onboarding.
    if (cache.block_reuse && !engine_.paged_context_attention) {
      add(own("kv_cache.block_reuse").c_str(), "true", "false: the engine lacks use_paged_context_fmha");
    }
    if (cache.block_reuse && engine_.gathers_context_logits) {
      add(own("kv_cache.block_reuse").c_str(), "true", "false: the engine gathers context logits");
    }
    if (!cache.onboard_blocks && engine_.paged_context_attention) {
      add(own("kv_cache.onboard_blocks").c_str(), "false", "true, since the engine has use_paged_context_fmha");
    }
    compare_defaults(cache);
    if (cache.block_reuse && settings_.chunked_context && before_sound_reuse(contract_.runtime.version)) {
      add(own("kv_cache.block_reuse").c_str(), "true",
          "false, or chunked_context false: releases before 1.2.1 give away blocks that are not computed yet, and "
          "runtime.version of the contract is " +
              contract_.runtime.version);
    }
  }

  // What the engine's builder put down for settings that are not made. 0 sink tokens are such a setting, since the
  // runtime lets nobody make it.
  void compare_defaults(const CacheSettings& cache) {
    if (cache.sink_tokens == 0 && engine_.default_sink_tokens > 0) {
      add(own("kv_cache.sink_tokens").c_str(), "0",
          std::to_string(engine_.default_sink_tokens) +
              ", since 0 leaves it to pretrained_config.runtime_defaults of config.json");
    }
  }

  void compare_prompts() {
    if (settings_.chunked_context && engine_.cached && !engine_.paged_context_attention) {
      add(own("chunked_context").c_str(), "true", "false: the engine lacks use_paged_context_fmha");
    }
    if (settings_.chunked_context && !engine_.cached) {
      add(own("chunked_context").c_str(), "true", "false, since the engine has no cache to continue from");
    }
    // The runtime keeps one token of the sequence for output, and a prompt in one piece has to fit one step.
    const uint64_t longest = engine_.max_sequence_tokens - 1;
    const uint64_t most = settings_.chunked_context ? longest : std::min<uint64_t>(longest, limits_.step_token_budget);
    at_most("limits.max_input_tokens", limits_.max_input_tokens, most,
            settings_.chunked_context ? "the longest sequence but one token"
                                      : "the longest sequence but one token, and one step, since "
                                        "executor.json:chunked_context is false");
  }

  void compare_outputs() {
    const auto& payload = contract_.capabilities.payload;
    const size_t layers = payload ? payload->layers.size() : 0;
    if (settings_.payload_outputs.size() != layers) {
      add(own("payload_outputs").c_str(), std::to_string(settings_.payload_outputs.size()) + " outputs",
          "one for each layer of capabilities.payload of the contract, " + std::to_string(layers));
    }
    if (!contract_.capabilities.guide_kinds.empty() && !settings_.guided_decoding) {
      add(own("guided_decoding").c_str(), "\"not_applicable\"",
          "a runtime of grammars, since capabilities.guided_decoding of the contract is not empty");
    }
  }

  const Settings& settings_;
  const EngineConfig& engine_;
  const ContractValues& contract_;
  const ContractValues::Limits& limits_;
  std::vector<Finding>& findings_;
};

}  // namespace

std::optional<Settings> read_settings(const EngineDirectory& directory, std::vector<Finding>& findings) {
  std::string text = "{}";
  if (directory.has(kSettingsFile)) {
    if (Status status = directory.read_text(kSettingsFile, text); !status.ok()) {
      add_finding(findings, {kSettingsFile, status.message(), "a file that can be read"});
      return std::nullopt;
    }
  } else {
    add_finding(findings, {kSettingsFile, "absent", "how the Executor is to run this engine"});
  }
  std::vector<Finding> own;
  const std::optional<Value> document = read_checked(text, "executor", own);
  if (own.empty() && document) return settings_of(*document);
  for (Finding& finding : own) {
    finding.path = std::string(kSettingsFile) + (finding.path.empty() ? "" : ":") + finding.path;
    add_finding(findings, std::move(finding));
  }
  return std::nullopt;
}

void compare(const Settings& settings, const EngineConfig& engine, const ContractValues& contract,
             std::vector<Finding>& findings) {
  Comparison(settings, engine, contract, findings).run();
}

std::string rank_file(uint32_t rank) {
  return "rank" + std::to_string(rank) + ".engine";
}

}  // namespace ifab::executor
