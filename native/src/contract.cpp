// SPDX-License-Identifier: Apache-2.0
#include "contract.h"

#include <utility>

#include "schema.h"

namespace ifab {
namespace {

// The schema has passed the document: every number is inside of its type, and every word is one of these.
template <class Number>
Number number(const Value& object, std::string_view key) {
  return static_cast<Number>(object.at(key).integer());
}

std::string text(const Value& object, std::string_view key) {
  return object.at(key).text();
}

std::optional<std::string> optional_text(const Value& object, std::string_view key) {
  const Value& value = object.at(key);
  return value.not_applicable() ? std::nullopt : std::optional(value.text());
}

template <class Number>
std::vector<Number> numbers(const Value& list) {
  std::vector<Number> out;
  for (const Value& item : list.items()) out.push_back(static_cast<Number>(item.integer()));
  return out;
}

int32_t guide_kind(const std::string& word) {
  if (word == "json_schema") return IFAB_GUIDE_JSON_SCHEMA;
  return word == "regex" ? IFAB_GUIDE_REGEX : IFAB_GUIDE_GRAMMAR;
}

int32_t payload_dtype(const std::string& word) {
  if (word == "float32") return IFAB_DTYPE_FLOAT32;
  return word == "float16" ? IFAB_DTYPE_FLOAT16 : IFAB_DTYPE_BFLOAT16;
}

ContractValues::Model model(const Value& from) {
  return {text(from, "architecture"),           number<uint32_t>(from, "layers"), number<uint32_t>(from, "hidden_size"),
          number<uint32_t>(from, "vocab_size"), text(from, "weights_dtype"),      text(from, "activations_dtype"),
          optional_text(from, "kv_cache_dtype")};
}

ContractValues::Card card(const Value& from) {
  return {text(from, "family"),
          optional_text(from, "compute_capability"),
          number<uint64_t>(from, "memory_bytes"),
          number<uint32_t>(from, "count"),
          number<uint32_t>(from, "tensor_parallel"),
          number<uint32_t>(from, "pipeline_parallel")};
}

ContractValues::Limits limits(const Value& from) {
  ContractValues::Limits out;
  out.max_input_tokens = number<uint32_t>(from, "max_input_tokens");
  out.max_sequence_tokens = number<uint32_t>(from, "max_sequence_tokens");
  out.max_output_tokens = number<uint32_t>(from, "max_output_tokens");
  out.slots = number<uint32_t>(from, "slots");
  out.step_token_budget = number<uint32_t>(from, "step_token_budget");
  out.built_step_token_budget = number<uint32_t>(from, "built_step_token_budget");
  if (!from.at("kv_block_tokens").not_applicable()) out.kv_block_tokens = number<uint32_t>(from, "kv_block_tokens");
  const Value& fraction = from.at("kv_cache_memory_fraction");
  if (!fraction.not_applicable()) out.kv_cache_memory_fraction = fraction.real();
  out.host_cache_bytes = number<uint64_t>(from, "host_cache_bytes");
  out.beams = number<uint32_t>(from, "beams");
  out.longest_step_ms = number<uint32_t>(from, "longest_step_ms");
  return out;
}

ContractValues::Capabilities capabilities(const Value& from) {
  ContractValues::Capabilities out;
  for (const Value& word : from.at("guided_decoding").items()) out.guide_kinds.push_back(guide_kind(word.text()));
  out.samples_max = number<uint32_t>(from, "samples_max");
  out.scoring = from.at("scoring").boolean();
  out.reproducible = from.at("reproducible").boolean();
  const Value& payload = from.at("payload");
  if (!payload.not_applicable()) {
    out.payload = ContractValues::Payload{numbers<uint32_t>(payload.at("shape")), payload_dtype(text(payload, "dtype")),
                                          numbers<int32_t>(payload.at("layers"))};
  }
  return out;
}

ContractValues::Build build(const Value& from) {
  ContractValues::Build out;
  out.tool = text(from, "tool");
  out.tool_version = text(from, "tool_version");
  for (const Value& flag : from.at("flags").items()) out.flags.push_back(flag.text());
  out.calibration = optional_text(from, "calibration");
  out.date = text(from, "date");
  return out;
}

}  // namespace

uint32_t ContractValues::Payload::size_bytes() const {
  uint32_t bytes = dtype == IFAB_DTYPE_FLOAT32 ? 4 : 2;
  for (const uint32_t extent : shape) bytes *= extent;
  return bytes;
}

ContractValues contract_values(const Value& document) {
  ContractValues out;
  out.engine_id = text(document, "engine_id");
  for (const Value& file : document.at("files").items()) {
    out.files.push_back({text(file, "path"), number<uint64_t>(file, "size_bytes"), text(file, "sha256")});
  }
  out.model = model(document.at("model"));
  const Value& tokenizer = document.at("tokenizer");
  out.tokenizer = {text(tokenizer, "file"), numbers<int32_t>(tokenizer.at("end_token_ids"))};
  out.card = card(document.at("card"));
  out.limits = limits(document.at("limits"));
  out.capabilities = capabilities(document.at("capabilities"));
  const Value& runtime = document.at("runtime");
  out.runtime = {text(runtime, "name"), text(runtime, "version")};
  out.build = build(document.at("build"));
  return out;
}

std::optional<ContractValues> read_contract(std::string_view json, std::vector<Finding>& findings) {
  std::vector<Finding> own;
  const std::optional<Value> document = read_checked(json, "contract", own);
  std::optional<ContractValues> out;
  if (document && own.empty()) out = contract_values(*document);
  for (Finding& finding : own) add_finding(findings, std::move(finding));
  return out;
}

}  // namespace ifab
