// SPDX-License-Identifier: Apache-2.0
#include "reports.h"

#include <nlohmann/json.hpp>

namespace ifab {
namespace {

// Keys keep the order in which the header names them.
using Json = nlohmann::ordered_json;

constexpr const char* kNotApplicable = "not_applicable";
// Findings may quote any bytes of a document; what is no UTF-8 is shown as U+FFFD.
constexpr auto kReplace = Json::error_handler_t::replace;

template <class T>
Json maybe(const std::optional<T>& value) {
  return value ? Json(*value) : Json(kNotApplicable);
}

Json findings_json(const std::vector<Finding>& findings) {
  Json list = Json::array();
  for (const Finding& finding : findings) {
    list.push_back({{"path", finding.path}, {"found", finding.found}, {"expected", finding.expected}});
  }
  return list;
}

const char* dtype_name(int32_t dtype) {
  return dtype == IFAB_DTYPE_FLOAT32 ? "float32" : dtype == IFAB_DTYPE_FLOAT16 ? "float16" : "bfloat16";
}

const char* guide_name(int32_t kind) {
  return kind == IFAB_GUIDE_JSON_SCHEMA ? "json_schema" : kind == IFAB_GUIDE_REGEX ? "regex" : "grammar";
}

Json limits_json(const ContractValues::Limits& limits) {
  return {{"max_input_tokens", limits.max_input_tokens},
          {"max_sequence_tokens", limits.max_sequence_tokens},
          {"max_output_tokens", limits.max_output_tokens},
          {"slots", limits.slots},
          {"step_token_budget", limits.step_token_budget},
          {"built_step_token_budget", limits.built_step_token_budget},
          {"kv_block_tokens", maybe(limits.kv_block_tokens)},
          {"kv_cache_memory_fraction", maybe(limits.kv_cache_memory_fraction)},
          {"host_cache_bytes", limits.host_cache_bytes},
          {"beams", limits.beams},
          {"longest_step_ms", limits.longest_step_ms}};
}

Json capabilities_json(const ContractValues::Capabilities& capabilities) {
  Json guides = Json::array();
  for (const int32_t kind : capabilities.guide_kinds) guides.push_back(guide_name(kind));
  Json payload = kNotApplicable;
  if (capabilities.payload) {
    payload = {{"shape", capabilities.payload->shape},
               {"dtype", dtype_name(capabilities.payload->dtype)},
               {"layers", capabilities.payload->layers}};
  }
  return {{"guided_decoding", std::move(guides)},
          {"samples_max", capabilities.samples_max},
          {"scoring", capabilities.scoring},
          {"reproducible", capabilities.reproducible},
          {"payload", std::move(payload)}};
}

}  // namespace

std::string findings_report(const std::vector<Finding>& findings) {
  return Json{{"findings", findings_json(findings)}}.dump(-1, ' ', false, kReplace);
}

std::string inspection_report(std::string_view contract_sha256, std::string_view configuration_file,
                              const std::vector<Finding>& findings) {
  const Json report = {{"contract_sha256", contract_sha256},
                       {"configuration_file", configuration_file},
                       {"findings", findings_json(findings)}};
  return report.dump(-1, ' ', false, kReplace);
}

std::string engine_report(std::string_view contract_sha256, const ContractValues& contract, const EngineFacts& facts,
                          const EventLimits& events, int64_t load_ms) {
  const Json report = {{"contract_sha256", contract_sha256},
                       {"vocab_size", facts.vocab_size},
                       {"hidden_size", facts.hidden_size},
                       {"layers", facts.layers},
                       {"kv_pool_blocks", facts.kv_pool_blocks},
                       {"load_ms", load_ms},
                       {"limits", limits_json(contract.limits)},
                       {"capabilities", capabilities_json(contract.capabilities)},
                       {"poll",
                        {{"events", 1},
                         {"tokens", events.poll_tokens()},
                         {"payload_bytes", events.payload_bytes},
                         {"text_bytes", kEventTextBytes}}}};
  return report.dump(-1, ' ', false, kReplace);
}

}  // namespace ifab
