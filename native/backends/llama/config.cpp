// SPDX-License-Identifier: Apache-2.0
#include "config.h"

#include <algorithm>
#include <array>
#include <utility>

#include "document.h"
#include "ifab/engine.h"
#include "schema.h"

namespace ifab::llama {
namespace {

uint32_t number(const Value& document, std::string_view key) {
  return static_cast<uint32_t>(document.at(key).integer());
}

int32_t dtype_of(std::string_view word) {
  if (word == "float16") return IFAB_DTYPE_FLOAT16;
  if (word == "bfloat16") return IFAB_DTYPE_BFLOAT16;
  return IFAB_DTYPE_FLOAT32;
}

std::string render_layers(const std::vector<int32_t>& layers) {
  std::string out = "[";
  for (const int32_t layer : layers) out += (out.size() > 1 ? ", " : "") + std::to_string(layer);
  return out + "]";
}

class Comparison {
 public:
  Comparison(const Config& config, const ContractValues& contract, std::vector<Finding>& findings)
      : config_(config), contract_(contract), findings_(findings) {}

  void run() {
    const ContractValues::Limits& limits = contract_.limits;
    equal("slots", config_.slots, "limits.slots", limits.slots);
    equal("step_token_budget", config_.step_token_budget, "limits.step_token_budget", limits.step_token_budget);
    if (config_.sequence_tokens < limits.max_sequence_tokens) {
      add("sequence_tokens", config_.sequence_tokens,
          "at least the contract's limits.max_sequence_tokens, " + std::to_string(limits.max_sequence_tokens));
    }
    if (limits.kv_block_tokens != kBlockTokens) {
      wrong("limits.kv_block_tokens",
            limits.kv_block_tokens ? std::to_string(*limits.kv_block_tokens) : "not_applicable",
            "64, the block of this runtime");
    }
    if (limits.beams != 1) wrong("limits.beams", std::to_string(limits.beams), "1: this runtime has no beam search");
    if (limits.host_cache_bytes != 0) {
      wrong("limits.host_cache_bytes", std::to_string(limits.host_cache_bytes),
            "0: the cache is in one place, the device's memory");
    }
    device();
    if (contract_.runtime.name != "llama.cpp")
      wrong("runtime.name", render_text(contract_.runtime.name), "\"llama.cpp\"");
    if (contract_.runtime.version != kRuntimeVersion) {
      wrong("runtime.version", render_text(contract_.runtime.version),
            "the runtime's own, " + render_text(kRuntimeVersion));
    }
    cache_type();
    reproducible();
    payload();
  }

 private:
  void wrong(const char* path, std::string found, std::string expected) {
    findings_.push_back({path, std::move(found), std::move(expected)});
  }
  void add(const char* key, uint64_t found, std::string expected) {
    findings_.push_back({std::string(kConfigurationFile) + ":" + key, std::to_string(found), std::move(expected)});
  }
  void equal(const char* key, uint64_t ours, const char* path, uint64_t theirs) {
    if (ours != theirs) add(key, ours, "the contract's " + std::string(path) + ", " + std::to_string(theirs));
  }

  void device() {
    const std::string theirs = contract_.card.compute_capability.value_or("not_applicable");
    if ((config_.device == Config::Device::kCpu) != (theirs == "not_applicable")) {
      wrong("card.compute_capability", theirs,
            config_.device == Config::Device::kCpu ? "\"not_applicable\", as llama.json's device is \"cpu\""
                                                   : "that of the card, as llama.json's device is \"cuda\"");
    }
  }

  void cache_type() {
    const std::string ours = config_.cache_type == Config::CacheType::kF16 ? "float16" : "q8_0";
    const std::string theirs = contract_.model.kv_cache_dtype.value_or("not_applicable");
    if (theirs != ours) wrong("model.kv_cache_dtype", theirs, ours + ", as llama.json's kv_type says");
  }

  void reproducible() {
    if (config_.reproducible != contract_.capabilities.reproducible) {
      wrong("capabilities.reproducible", contract_.capabilities.reproducible ? "true" : "false",
            std::string(config_.reproducible ? "true" : "false") + ", as llama.json says");
    }
    // Float weights meet one row and several rows with different kernels, whose sums differ in the last bits.
    static constexpr std::array<std::string_view, 2> kProven{"q8_0", "q4_1"};
    const std::string& weights = contract_.model.weights_dtype;
    if (config_.reproducible && std::find(kProven.begin(), kProven.end(), weights) == kProven.end()) {
      wrong("model.weights_dtype", weights, "q8_0 or q4_1, since llama.json's reproducible is true");
    }
  }

  void payload() {
    const auto& theirs = contract_.capabilities.payload;
    if (theirs.has_value() != config_.payload.has_value()) {
      wrong("capabilities.payload", theirs ? "a payload" : "not_applicable",
            config_.payload ? "a payload, as llama.json says" : "not_applicable, as llama.json says");
      return;
    }
    if (!theirs) return;
    if (theirs->layers != config_.payload->layers) {
      wrong("capabilities.payload.layers", render_layers(theirs->layers),
            render_layers(config_.payload->layers) + ", as llama.json says");
    }
    if (theirs->dtype != config_.payload->dtype) {
      wrong("capabilities.payload.dtype", std::to_string(theirs->dtype),
            std::to_string(config_.payload->dtype) + ", as llama.json says");
    }
  }

  const Config& config_;
  const ContractValues& contract_;
  std::vector<Finding>& findings_;
};

}  // namespace

std::optional<Config> read_config(std::string_view text, std::vector<Finding>& findings) {
  std::vector<Finding> own;
  const std::optional<Value> document = read_checked(text, "llama", own);
  for (Finding& finding : own) {
    finding.path = std::string(kConfigurationFile) + ":" + finding.path;
    findings.push_back(std::move(finding));
  }
  if (!document || !own.empty()) return std::nullopt;

  Config config;
  config.gguf = document->at("gguf").text();
  config.device = document->at("device").text() == "cpu" ? Config::Device::kCpu : Config::Device::kCuda;
  config.layout = document->at("kv_layout").text() == "streams" ? Config::Layout::kStreams : Config::Layout::kUnified;
  config.slots = number(*document, "slots");
  config.resident_heads = number(*document, "resident_heads");
  config.sequence_tokens = number(*document, "sequence_tokens");
  config.pool_tokens = config.streams() ? 0 : number(*document, "pool_tokens");
  config.step_token_budget = number(*document, "step_token_budget");
  config.threads = number(*document, "threads");
  config.batch_threads = number(*document, "batch_threads");
  config.cache_type = document->at("kv_type").text() == "f16" ? Config::CacheType::kF16 : Config::CacheType::kQ8;
  config.reproducible = document->at("reproducible").boolean();
  const Value& payload = document->at("payload");
  if (!payload.not_applicable()) {
    Config::Payload& out = config.payload.emplace();
    out.dtype = dtype_of(payload.at("dtype").text());
    for (const Value& layer : payload.at("layers").items()) out.layers.push_back(static_cast<int32_t>(layer.integer()));
  }
  // The runtime would round it up; a pool that is not what it says would make admission count wrong.
  if (config.pool_tokens % kCacheGranule != 0) {
    findings.push_back({std::string(kConfigurationFile) + ":pool_tokens", std::to_string(config.pool_tokens),
                        "multiple of " + std::to_string(kCacheGranule)});
    return std::nullopt;
  }
  return config;
}

void compare_with_directory(const Config& config, const EngineDirectory& directory, std::vector<Finding>& findings) {
  if (!directory.has(config.gguf)) {
    findings.push_back({std::string(kConfigurationFile) + ":gguf", render_text(config.gguf),
                        "name of a file in the engine directory"});
  }
  if (const ContractValues* contract = directory.contract()) Comparison(config, *contract, findings).run();
}

}  // namespace ifab::llama
