// SPDX-License-Identifier: Apache-2.0
#include "simulated_directory.h"

#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include "sha256.h"

namespace ifab::test {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kNotApplicable = "not_applicable";

Json cache(bool cached, Json value) {
  return cached ? std::move(value) : Json(kNotApplicable);
}

Json simulated_document(const SimulatedEngine& engine) {
  const bool cached = engine.kv_block_tokens > 0;
  Json payload = kNotApplicable;
  if (!engine.payload_dtype.empty()) payload = {{"values", engine.hidden_size}, {"dtype", engine.payload_dtype}};
  Json step_faults = Json::array();
  for (const auto& fault : engine.step_faults) {
    step_faults.push_back({{"kind", fault.kind}, {"step", fault.step}, {"count", fault.count}});
  }
  Json request_faults = Json::array();
  for (const auto& fault : engine.request_faults) {
    request_faults.push_back(
        {{"kind", fault.kind}, {"trigger", fault.trigger}, {"value", fault.value}, {"count", fault.count}});
  }
  return {{"simulated_version", 1},
          {"seed", engine.seed},
          {"vocab_size", engine.vocab_size},
          {"hidden_size", engine.hidden_size},
          {"layers", engine.layers},
          {"slots", engine.slots},
          {"sequence_tokens", engine.max_sequence_tokens},
          {"step_token_budget", engine.step_token_budget},
          {"splits_prompts", engine.splits_prompts},
          {"kv_block_tokens", cache(cached, engine.kv_block_tokens)},
          {"kv_pool_blocks", cache(cached, engine.kv_pool_blocks)},
          {"samples_max", engine.samples_max},
          {"scoring", engine.scoring},
          {"payload", std::move(payload)},
          {"end_one_in", engine.end_one_in},
          {"time",
           {{"mode", engine.time_scale > 0 ? "real" : "virtual"},
            {"scale", cache(engine.time_scale > 0, engine.time_scale)},
            {"load_ms", engine.load_ms},
            {"step_us", engine.step_us},
            {"prompt_token_ns", engine.prompt_token_ns},
            {"generated_token_ns", engine.generated_token_ns},
            {"context_token_ns", engine.context_token_ns}}},
          {"step_faults", std::move(step_faults)},
          {"request_faults", std::move(request_faults)}};
}

Json contract_document(const SimulatedEngine& engine, const Json& files) {
  const bool cached = engine.kv_block_tokens > 0;
  Json payload = kNotApplicable;
  if (!engine.payload_dtype.empty()) {
    payload = {{"shape", {engine.hidden_size}}, {"dtype", engine.payload_dtype}, {"layers", {-1}}};
  }
  return {{"contract_version", 1},
          {"engine_id", engine.engine_id},
          {"files", files},
          {"model",
           {{"architecture", "simulated"},
            {"layers", engine.layers},
            {"hidden_size", engine.hidden_size},
            {"vocab_size", engine.vocab_size},
            {"weights_dtype", "none"},
            {"activations_dtype", "none"},
            {"kv_cache_dtype", cache(cached, "none")}}},
          {"tokenizer", {{"file", "tokenizer.json"}, {"end_token_ids", engine.end_token_ids}}},
          {"card",
           {{"family", "cpu"},
            {"compute_capability", kNotApplicable},
            {"memory_bytes", 1 << 26},
            {"count", 1},
            {"tensor_parallel", 1},
            {"pipeline_parallel", 1}}},
          {"limits",
           {{"max_input_tokens", engine.max_input_tokens},
            {"max_sequence_tokens", engine.max_sequence_tokens},
            {"max_output_tokens", engine.max_output_tokens},
            {"slots", engine.slots},
            {"step_token_budget", engine.step_token_budget},
            {"built_step_token_budget", engine.step_token_budget},
            {"kv_block_tokens", cache(cached, engine.kv_block_tokens)},
            {"kv_cache_memory_fraction", kNotApplicable},
            {"host_cache_bytes", 0},
            {"beams", 1},
            {"longest_step_ms", engine.longest_step_ms}}},
          {"capabilities",
           {{"guided_decoding", Json::array()},
            {"samples_max", engine.samples_max},
            {"scoring", engine.scoring},
            {"reproducible", true},
            {"payload", std::move(payload)}}},
          {"runtime", {{"name", "simulated"}, {"version", "1"}}},
          {"build",
           {{"tool", "native tests"},
            {"tool_version", "1"},
            {"flags", Json::array()},
            {"calibration", kNotApplicable},
            {"date", "2026-01-01"}}}};
}

void write(const std::filesystem::path& path, const std::string& text) {
  std::ofstream file(path, std::ios::binary);
  file << text;
  file.close();
  if (!file) throw std::runtime_error("cannot write " + path.string());
}

}  // namespace

SimulatedEngine SimulatedEngine::mining(uint32_t hidden_size) {
  SimulatedEngine engine;
  engine.hidden_size = hidden_size;
  engine.end_token_ids = {};
  engine.max_input_tokens = engine.max_sequence_tokens = 128;
  engine.max_output_tokens = 0;
  engine.kv_block_tokens = engine.kv_pool_blocks = 0;
  engine.samples_max = 1;
  engine.scoring = false;
  engine.payload_dtype = "float16";
  return engine;
}

void write_simulated_directory(const std::filesystem::path& directory, const SimulatedEngine& engine) {
  std::filesystem::create_directories(directory);
  Json files = Json::array();
  const auto add = [&](const char* name, const std::string& text) {
    write(directory / name, text);
    files.push_back({{"path", name}, {"size_bytes", text.size()}, {"sha256", sha256_hex(text)}});
  };
  add("simulated.json", simulated_document(engine).dump(1));
  add("tokenizer.json", "{}");
  write(directory / "contract.json", contract_document(engine, files).dump(1));
}

TemporaryDirectory::TemporaryDirectory() {
  std::string pattern = (std::filesystem::temp_directory_path() / "ifab-test-XXXXXX").string();
  if (mkdtemp(pattern.data()) == nullptr) throw std::runtime_error("cannot make a directory like " + pattern);
  path_ = pattern;
}

TemporaryDirectory::~TemporaryDirectory() {
  std::error_code ignored;  // what is left behind in a temporary directory fails no test
  std::filesystem::remove_all(path_, ignored);
}

}  // namespace ifab::test
