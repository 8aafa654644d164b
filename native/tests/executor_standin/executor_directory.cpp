// SPDX-License-Identifier: Apache-2.0
#include "executor_directory.h"

#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include "sha256.h"

namespace ifab::standin {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kNotApplicable = "not_applicable";

std::string read(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("cannot read " + path.string());
  return {std::istreambuf_iterator<char>(file), {}};
}

void write(const std::filesystem::path& path, const std::string& text) {
  std::ofstream file(path, std::ios::binary);
  file << text;
  file.close();
  if (!file) throw std::runtime_error("cannot write " + path.string());
}

Json patched(Json document, const std::string& patch) {
  if (!patch.empty()) document.merge_patch(Json::parse(patch));
  return document;
}

Json config_of(const Json& contract, bool cached) {
  const Json& limits = contract.at("limits");
  const Json& model = contract.at("model");
  return {{"version", "1.2.1"},
          {"pretrained_config",
           {{"architecture", "LlamaForCausalLM"},
            {"dtype", "float16"},
            {"num_hidden_layers", model.at("layers")},
            {"num_attention_heads", 8},
            {"hidden_size", model.at("hidden_size")},
            {"vocab_size", model.at("vocab_size")},
            {"mapping", {{"tp_size", 1}, {"pp_size", 1}}},
            {"quantization", {{"quant_algo", nullptr}, {"kv_cache_quant_algo", nullptr}}}}},
          {"build_config",
           {{"max_batch_size", limits.at("slots")},
            {"max_num_tokens", limits.at("built_step_token_budget")},
            {"max_seq_len", limits.at("max_sequence_tokens").get<int64_t>() + 1},
            {"max_beam_width", 1},
            {"kv_cache_type", cached ? "PAGED" : "DISABLED"},
            {"gather_context_logits", false},
            {"plugin_config",
             {{"gpt_attention_plugin", "auto"},
              {"remove_input_padding", true},
              {"paged_kv_cache", cached},
              {"context_fmha", true},
              {"use_paged_context_fmha", cached},
              {"tokens_per_block", cached ? limits.at("kv_block_tokens") : Json(32)}}}}}};
}

Json executor_of(const Json& contract, const Json& simulated, bool cached) {
  const Json& limits = contract.at("limits");
  Json cache = kNotApplicable;
  if (cached) {
    const auto pool = simulated.at("kv_pool_blocks").get<int64_t>() * simulated.at("kv_block_tokens").get<int64_t>();
    cache = {{"block_reuse", true},
             {"partial_reuse", false},
             {"copy_on_partial_reuse", false},
             {"max_tokens", pool},
             {"max_attention_window", {limits.at("max_sequence_tokens")}},
             {"sink_tokens", 0},
             {"onboard_blocks", true},
             {"offload_priority", 35},
             {"event_buffer", 0},
             {"event_gather_ms", 5},
             {"use_uvm", false},
             {"max_gpu_bytes", 0}};
  }
  const bool payload = contract.at("capabilities").at("payload") != kNotApplicable;
  return {{"executor_version", 1},
          {"batching", "inflight"},
          {"communication", "leader"},
          {"devices", {0}},
          {"scheduler",
           {{"capacity_policy", "guaranteed_no_evict"},
            {"chunking_policy", "first_come_first_served"},
            {"dynamic_batch", kNotApplicable}}},
          {"chunked_context", cached && simulated.at("splits_prompts").get<bool>()},
          {"max_queue_size", 4 * limits.at("slots").get<int64_t>()},
          {"max_idle_us", 180'000'000},
          {"receive_poll_ms", 0},
          {"iteration_stats", 4096},
          {"request_stats", 0},
          {"kv_cache", cache},
          {"weights", {{"gpu_direct_storage", false}, {"gpu_percent", 1.0}}},
          {"performance",
           {{"multi_block_mode", true},
            {"context_fmha_fp32_accumulation", false},
            {"cuda_graph_mode", false},
            {"cuda_graph_cache", 0}}},
          {"decoding_mode", "top_k_top_p"},
          {"normalize_log_probs", false},
          {"gather_generation_logits", false},
          {"prompt_table_offloading", false},
          {"trt_overlap", false},
          {"fail_fast_on_attention_window", true},
          {"guided_decoding", kNotApplicable},
          {"payload_outputs", payload ? Json::array({"hidden"}) : Json(kNotApplicable)},
          {"peft_cache", kNotApplicable},
          {"logits_post_processor", kNotApplicable},
          {"speculative_decoding", kNotApplicable},
          {"cache_transceiver", kNotApplicable},
          {"debug", kNotApplicable}};
}

Json plan_of(const Json& contract, const Json& simulated) {
  Json outputs = Json::array();
  if (const Json& payload = contract.at("capabilities").at("payload"); payload != kNotApplicable) {
    outputs.push_back({{"name", "hidden"},
                       {"extents", {-1, contract.at("model").at("hidden_size")}},
                       {"dtype", payload.at("dtype")},
                       {"rows", "sequences"}});
  }
  outputs.push_back({{"name", "logits"},
                     {"extents", {-1, contract.at("model").at("vocab_size")}},
                     {"dtype", "float32"},
                     {"rows", "sequences"}});
  return {{"simulated", simulated},
          {"end_token_ids", contract.at("tokenizer").at("end_token_ids")},
          {"outputs", outputs},
          {"semantics", Json::object()},
          {"tokens_an_answer", 1}};
}

}  // namespace

void convert_directory(const std::filesystem::path& simulated, const std::filesystem::path& out,
                       const Patches& patches) {
  const Json card = Json::parse(read(simulated / "simulated.json"));
  Json contract = Json::parse(read(simulated / "contract.json"));
  const bool cached = card.at("kv_block_tokens") != kNotApplicable;
  contract["model"]["kv_cache_dtype"] = cached ? Json("float16") : Json(kNotApplicable);
  contract["limits"]["kv_cache_memory_fraction"] = cached ? Json(0.5) : Json(kNotApplicable);
  contract["capabilities"]["scoring"] = false;  // a prompt's log-probabilities would need its logits
  contract["runtime"] = {{"name", "tensorrt-llm"}, {"version", "1.2.1"}};

  std::filesystem::create_directories(out);
  contract["files"] = Json::array();
  const auto add = [&](const char* name, const std::string& text) {
    write(out / name, text);
    contract["files"].push_back({{"path", name}, {"size_bytes", text.size()}, {"sha256", sha256_hex(text)}});
  };
  add("config.json", patched(config_of(contract, cached), patches.config).dump(1));
  if (patches.executor != "null") {
    add("executor.json", patched(executor_of(contract, card, cached), patches.executor).dump(1));
  }
  add("rank0.engine", patched(plan_of(contract, card), patches.plan).dump(1));
  add("tokenizer.json", read(simulated / "tokenizer.json"));
  write(out / "contract.json", patched(std::move(contract), patches.contract).dump(1));
}

void write_executor_directory(const std::filesystem::path& out, test::SimulatedEngine engine, const Patches& patches) {
  const test::TemporaryDirectory simulated;
  engine.scoring = false;
  test::write_simulated_directory(simulated.path(), engine);
  Json vocabulary = Json::object();
  for (uint32_t id = 0; id < engine.vocab_size; ++id) vocabulary["token " + std::to_string(id)] = id;
  write(simulated.path() / "tokenizer.json", Json{{"model", {{"vocab", vocabulary}}}}.dump());
  convert_directory(simulated.path(), out, patches);
}

}  // namespace ifab::standin
