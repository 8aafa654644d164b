// SPDX-License-Identifier: Apache-2.0
#include "engine_config.h"

#include <algorithm>
#include <cctype>
#include <initializer_list>
#include <string_view>
#include <utility>

#include "document.h"

namespace ifab::executor {
namespace {

constexpr int64_t kLargest = 16'777'216;  // of any number of tokens, sequences or layers, as in contracts

std::string lower(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(), [](unsigned char c) { return std::tolower(c); });
  return text;
}

// Reads fields by path and keeps account of what is wrong with them.
class Reader {
 public:
  Reader(const Value& document, std::vector<Finding>& findings) : document_(document), findings_(findings) {}

  void wrong(const std::string& path, std::string found, std::string expected) {
    add_finding(findings_, {std::string(kEngineConfigFile) + ":" + path, std::move(found), std::move(expected)});
    ++wrong_;
  }
  bool fine() const { return wrong_ == 0; }

  uint32_t number(const std::string& path) {
    const Value* value = at(path);
    if (value != nullptr && value->is(Value::Kind::kInteger) && value->integer() >= 1 && value->integer() <= kLargest) {
      return static_cast<uint32_t>(value->integer());
    }
    mistyped(path, value, "integer from 1 to " + std::to_string(kLargest));
    return 0;
  }
  // A number that builders of some releases put down, or null; 0 where there is none.
  uint32_t number_or_none(const std::string& path) {
    const Value* value = at(path);
    if (value == nullptr || value->is(Value::Kind::kNull)) return 0;
    if (value->is(Value::Kind::kInteger) && value->integer() >= 0 && value->integer() <= kLargest) {
      return static_cast<uint32_t>(value->integer());
    }
    mistyped(path, value, "integer from 0 to " + std::to_string(kLargest) + ", or null");
    return 0;
  }
  std::string text(const std::string& path) {
    const Value* value = at(path);
    if (value != nullptr && value->is(Value::Kind::kText) && !value->text().empty()) return value->text();
    mistyped(path, value, "text that is not empty");
    return {};
  }
  bool flag(const std::string& path) {
    const Value* value = at(path);
    if (value != nullptr && value->is(Value::Kind::kBoolean)) return value->boolean();
    mistyped(path, value, "true or false");
    return false;
  }
  // A text, or null, which the builder writes for "none"; the empty text then.
  std::string text_or_null(const std::string& path) {
    const Value* value = at(path);
    if (value != nullptr && value->is(Value::Kind::kNull)) return {};
    if (value != nullptr && value->is(Value::Kind::kText)) return value->text();
    mistyped(path, value, "text or null");
    return {};
  }

 private:
  const Value* at(std::string_view path) const {
    const Value* value = &document_;
    while (value != nullptr && !path.empty()) {
      const size_t dot = path.find('.');
      value = value->find(path.substr(0, dot));
      path = dot == std::string_view::npos ? std::string_view{} : path.substr(dot + 1);
    }
    return value;
  }
  void mistyped(const std::string& path, const Value* value, std::string expected) {
    wrong(path, value == nullptr ? "absent" : render(*value), std::move(expected));
  }

  const Value& document_;
  std::vector<Finding>& findings_;
  size_t wrong_ = 0;
};

std::optional<Value> read(const EngineDirectory& directory, std::vector<Finding>& findings) {
  std::string text;
  if (Status status = directory.read_text(kEngineConfigFile, text); !status.ok()) {
    add_finding(findings, {kEngineConfigFile, status.message(), "a file that can be read"});
    return std::nullopt;
  }
  std::vector<Finding> own;
  std::optional<Value> document = read_document(text, own);
  for (Finding& finding : own) {
    finding.path = std::string(kEngineConfigFile) + (finding.path.empty() ? "" : ":") + finding.path;
    add_finding(findings, std::move(finding));
  }
  return own.empty() ? std::move(document) : std::nullopt;
}

// In-flight batching needs the attention plugin, packed input, and a cache that is paged or absent.
void check_kind(Reader& reader, EngineConfig& config) {
  const std::string plugins = "build_config.plugin_config.";
  if (const std::string plugin = reader.text_or_null(plugins + "gpt_attention_plugin"); plugin.empty()) {
    reader.wrong(plugins + "gpt_attention_plugin", "none", "the attention plugin, without which nothing is batched");
  }
  if (!reader.flag(plugins + "remove_input_padding")) {
    reader.wrong(plugins + "remove_input_padding", "false", "true: padded engines are not batched in flight");
  }
  const std::string kind = lower(reader.text("build_config.kv_cache_type"));
  const bool paged = reader.flag(plugins + "paged_kv_cache");
  if (kind != "paged" && kind != "disabled") {
    reader.wrong("build_config.kv_cache_type", render_text(kind), "\"paged\" or \"disabled\"");
  } else if (paged != (kind == "paged")) {
    reader.wrong(plugins + "paged_kv_cache", paged ? "true" : "false",
                 "what build_config.kv_cache_type says, \"" + kind + "\": true would override it");
  }
  config.cached = kind == "paged";
  config.paged_context_attention = reader.flag(plugins + "use_paged_context_fmha");
  if (!reader.flag(plugins + "context_fmha") && config.paged_context_attention) {
    reader.wrong(plugins + "context_fmha", "false", "true, since use_paged_context_fmha is true");
  }
  config.block_tokens = reader.number(plugins + "tokens_per_block");
}

void check_model(Reader& reader, EngineConfig& config) {
  const std::string model = "pretrained_config.";
  config.architecture = reader.text(model + "architecture");
  config.layers = reader.number(model + "num_hidden_layers");
  config.hidden_size = reader.number(model + "hidden_size");
  config.vocab_size = reader.number(model + "vocab_size");
  (void)reader.number(model + "num_attention_heads");
  config.tensor_parallel = reader.number(model + "mapping.tp_size");
  config.pipeline_parallel = reader.number(model + "mapping.pp_size");
  const std::string dtype = reader.text(model + "dtype");
  if (!dtype.empty() && dtype != "float32" && dtype != "float16" && dtype != "bfloat16") {
    reader.wrong(model + "dtype", render_text(dtype), "\"float32\", \"float16\" or \"bfloat16\"");
  }
  const std::string cache = reader.text_or_null(model + "quantization.kv_cache_quant_algo");
  if (!cache.empty() && cache != "FP8" && cache != "INT8") {
    reader.wrong(model + "quantization.kv_cache_quant_algo", render_text(cache), "\"FP8\", \"INT8\" or null");
  }
  config.cache_dtype = cache.empty() ? dtype : lower(cache);
  config.default_sink_tokens = reader.number_or_none(model + "runtime_defaults.sink_token_length");
}

}  // namespace

bool is_engine_config(const EngineDirectory& directory) {
  if (!directory.has(kEngineConfigFile)) return false;
  std::string text;
  if (!directory.read_text(kEngineConfigFile, text).ok()) return false;
  std::vector<Finding> ignored;  // inspect() reads it again, and says what is wrong with it
  const std::optional<Value> document = read_document(text, ignored);
  return document && document->find("pretrained_config") != nullptr;
}

std::optional<EngineConfig> read_engine_config(const EngineDirectory& directory, std::vector<Finding>& findings) {
  const std::optional<Value> document = read(directory, findings);
  if (!document) return std::nullopt;
  Reader reader(*document, findings);
  EngineConfig config;
  // Without it the vendor's parser takes the file for one of an old builder, and reads other fields.
  (void)reader.text("version");
  check_model(reader, config);
  check_kind(reader, config);
  config.gathers_context_logits = reader.flag("build_config.gather_context_logits");
  config.max_batch_size = reader.number("build_config.max_batch_size");
  config.max_step_tokens = reader.number("build_config.max_num_tokens");
  config.max_sequence_tokens = reader.number("build_config.max_seq_len");
  config.max_beams = reader.number("build_config.max_beam_width");
  return reader.fine() ? std::optional(config) : std::nullopt;
}

}  // namespace ifab::executor
