// SPDX-License-Identifier: Apache-2.0
#include "engine_file.h"

#include <algorithm>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <optional>
#include <stdexcept>

#include "contract.h"
#include "control.h"
#include "document.h"
#include "engine_tensors.h"

namespace ifab::standin {
namespace {

using Json = nlohmann::json;

Json read_json(const std::filesystem::path& path) {
  std::ifstream file(path);
  if (!file) throw std::runtime_error("cannot open " + path.filename().string());
  return Json::parse(file);
}

tensorrt::ElementType type_of(const std::string& dtype) {
  return dtype == "float32"   ? tensorrt::ElementType::kFloat32
         : dtype == "float16" ? tensorrt::ElementType::kFloat16
                              : tensorrt::ElementType::kBfloat16;
}

simulated::Config simulated_of(const Json& document, const std::vector<int32_t>& end_ids) {
  std::vector<Finding> findings;
  const std::optional<Value> value = read_document(document.dump(), findings);
  ContractValues contract;  // what the configuration takes from one
  contract.tokenizer.end_token_ids = end_ids;
  contract.limits.max_input_tokens = 1;
  return simulated::read_config(value.value(), contract);
}

void set(Semantics& semantics, const std::string& name, bool value) {
  const auto named = [&](const Switch& each) { return each.name == name; };
  const auto fact = std::find_if(kFacts.begin(), kFacts.end(), named);
  const auto unknown = std::find_if(kUnknown.begin(), kUnknown.end(), named);
  if (fact == kFacts.end() && unknown == kUnknown.end()) throw std::runtime_error("no such semantics: " + name);
  semantics.*(fact != kFacts.end() ? fact->value : unknown->value) = value;
}

}  // namespace

bool EngineFile::has_output(const std::string& name) const {
  return std::any_of(tensors.begin(), tensors.end(),
                     [&](const tensorrt::TensorInfo& tensor) { return !tensor.is_input && tensor.name == name; });
}

EngineFile read_engine(const std::filesystem::path& directory) {
  const Json plan = read_json(directory / "rank0.engine");
  EngineFile engine;
  engine.simulated = simulated_of(plan.at("simulated"), plan.at("end_token_ids"));
  engine.tokens_an_answer = plan.at("tokens_an_answer");
  for (const Json& output : plan.at("outputs")) {
    tensorrt::TensorInfo tensor;
    tensor.name = output.at("name");
    tensor.extents = output.at("extents").get<std::vector<int64_t>>();
    tensor.type = type_of(output.at("dtype"));
    if (output.at("rows") == "tokens") engine.ungathered.insert(tensor.name);
    engine.tensors.push_back(std::move(tensor));
  }
  for (const auto& [name, value] : plan.at("semantics").items()) set(engine.semantics, name, value);
  if (control().semantics) engine.semantics = *control().semantics;

  const Json config = read_json(directory / "config.json");
  const Json& build = config.at("build_config");
  const Json& plugins = build.at("plugin_config");
  const Json& mapping = config.at("pretrained_config").at("mapping");
  engine.max_batch_size = build.at("max_batch_size");
  engine.max_step_tokens = build.at("max_num_tokens");
  engine.max_sequence_tokens = build.at("max_seq_len");
  engine.ranks = mapping.at("tp_size").get<uint32_t>() * mapping.at("pp_size").get<uint32_t>();
  const std::string kind = build.at("kv_cache_type");
  engine.cached = kind != "DISABLED" || plugins.at("paged_kv_cache").get<bool>();
  engine.in_flight = plugins.at("remove_input_padding").get<bool>() && kind != "CONTINUOUS";
  engine.paged_attention = plugins.at("use_paged_context_fmha");
  engine.context_logits = build.at("gather_context_logits");
  return engine;
}

}  // namespace ifab::standin

namespace ifab::executor {

// In the vendor's place: what TensorRT would list.
Status list_tensors(const std::string& engine_path, const ContractValues& contract, int32_t card,
                    std::vector<tensorrt::TensorInfo>& out) {
  (void)contract;
  standin::control().calls.emplace_back("tensors");
  standin::control().listed_on = card;
  out = standin::read_engine(std::filesystem::path(engine_path).parent_path()).tensors;
  return {};
}

}  // namespace ifab::executor
