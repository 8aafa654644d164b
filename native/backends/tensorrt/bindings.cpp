// SPDX-License-Identifier: Apache-2.0
#include "bindings.h"

#include <algorithm>
#include <array>
#include <optional>
#include <string_view>

#include "document.h"
#include "ifab/engine.h"

namespace ifab::tensorrt {

uint32_t element_bytes(ElementType type) {
  switch (type) {
    case ElementType::kInt64:
      return 8;
    case ElementType::kFloat32:
    case ElementType::kInt32:
      return 4;
    case ElementType::kFloat16:
    case ElementType::kBfloat16:
      return 2;
    case ElementType::kInt8:
    case ElementType::kBool:
    case ElementType::kFp8:
      return 1;
    case ElementType::kOther:
      break;
  }
  return 0;
}

const char* element_name(ElementType type) {
  static constexpr std::array<const char*, 9> kNames = {"float32", "float16", "bfloat16", "int32",       "int64",
                                                        "int8",    "bool",    "fp8",      "another type"};
  return kNames[static_cast<size_t>(type)];
}

namespace {

enum class Extent { kRows, kRowTokens, kTokens, kPrompts, kSixteen, kOne, kLayers };

struct Rule {
  std::string_view name;
  Role role;
  bool rows, packed;  // in which layouts the tensor belongs
  bool required;
  ElementType type;
  bool on_host;
  std::array<Extent, 2> extents;
  uint32_t rank;
};

// Names and types of inputs. The packed ones, and which of them the processor reads, are those of TensorRT-LLM 1.2's
// generation_mixin.py with the attention plugin on and the KV cache disabled.
constexpr std::array<Rule, 14> kInputs = {{
    {"input_ids",
     Role::kTokenIds,
     true,
     false,
     true,
     ElementType::kInt32,
     false,
     {Extent::kRows, Extent::kRowTokens},
     2},
    {"positions",
     Role::kPositions,
     true,
     false,
     true,
     ElementType::kInt32,
     false,
     {Extent::kRows, Extent::kRowTokens},
     2},
    {"segments",
     Role::kSegments,
     true,
     false,
     true,
     ElementType::kInt32,
     false,
     {Extent::kRows, Extent::kRowTokens},
     2},
    {"last_rows", Role::kLastRows, true, false, true, ElementType::kInt32, false, {Extent::kPrompts, Extent::kOne}, 1},
    {"input_ids", Role::kTokenIds, false, true, true, ElementType::kInt32, false, {Extent::kTokens, Extent::kOne}, 1},
    {"position_ids",
     Role::kPositions,
     false,
     true,
     true,
     ElementType::kInt32,
     false,
     {Extent::kTokens, Extent::kOne},
     1},
    {"last_token_ids",
     Role::kLastTokenIds,
     false,
     true,
     true,
     ElementType::kInt32,
     false,
     {Extent::kPrompts, Extent::kOne},
     1},
    {"host_request_types",
     Role::kRequestTypes,
     false,
     true,
     true,
     ElementType::kInt32,
     true,
     {Extent::kPrompts, Extent::kOne},
     1},
    {"context_lengths",
     Role::kContextLengths,
     false,
     true,
     true,
     ElementType::kInt32,
     false,
     {Extent::kPrompts, Extent::kOne},
     1},
    {"host_context_lengths",
     Role::kHostContextLengths,
     false,
     true,
     true,
     ElementType::kInt32,
     true,
     {Extent::kPrompts, Extent::kOne},
     1},
    {"host_runtime_perf_knobs",
     Role::kPerfKnobs,
     false,
     true,
     true,
     ElementType::kInt64,
     true,
     {Extent::kSixteen, Extent::kOne},
     1},
    {"host_context_progress",
     Role::kContextProgress,
     false,
     true,
     true,
     ElementType::kInt64,
     true,
     {Extent::kOne, Extent::kOne},
     1},
    {"host_max_attention_window_sizes",
     Role::kAttentionWindows,
     false,
     true,
     true,
     ElementType::kInt32,
     true,
     {Extent::kLayers, Extent::kOne},
     1},
    {"host_sink_token_length",
     Role::kSinkTokens,
     false,
     true,
     true,
     ElementType::kInt32,
     true,
     {Extent::kOne, Extent::kOne},
     1},
}};

constexpr std::array<std::string_view, 7> kCacheMarks = {
    "past_key_value",    "present_key_value", "kv_cache_block_offsets", "kv_cache_pool",
    "cache_indirection", "kv_cache_scale",    "sequence_length"};

std::string quoted(const std::string& name) {
  return "tensors[" + name + "]";
}

std::string render_extents(const std::vector<int64_t>& extents) {
  std::string out = "[";
  for (const int64_t extent : extents) out += (out.size() > 1 ? ", " : "") + std::to_string(extent);
  return out + "]";
}

class Planner {
 public:
  Planner(const Enumeration& enumeration, const ContractValues& contract, std::vector<Finding>& findings)
      : enumeration_(enumeration), contract_(contract), findings_(findings) {}

  BindingPlan run() {
    const TensorInfo* ids = find("input_ids");
    if (ids == nullptr) {
      find_nothing("tensors[input_ids]", "an input that takes token ids");
      return {};
    }
    if (ids->extents.size() != 1 && ids->extents.size() != 2) {
      add(quoted(ids->name), render_extents(ids->extents), "[rows, row_tokens] or [tokens]");
      return {};
    }
    plan_.packed = ids->extents.size() == 1;
    if (enumeration_.profiles != 1)
      add("profiles", std::to_string(enumeration_.profiles), "1, for prompts of every number");
    sizes(*ids);
    for (const TensorInfo& tensor : enumeration_.tensors) bind(tensor);
    missing();
    outputs();
    limits();
    return std::move(plan_);
  }

 private:
  void add(std::string path, std::string found, std::string expected) {
    add_finding(findings_, {std::move(path), std::move(found), std::move(expected)});
  }
  void find_nothing(std::string path, std::string expected) { add(std::move(path), "absent", std::move(expected)); }

  const TensorInfo* find(std::string_view name) const {
    for (const TensorInfo& tensor : enumeration_.tensors) {
      if (tensor.name == name) return &tensor;
    }
    return nullptr;
  }

  static int64_t largest(const TensorInfo* tensor, size_t axis) {
    return tensor != nullptr && tensor->largest.size() > axis ? tensor->largest[axis] : 0;
  }

  void sizes(const TensorInfo& ids) {
    plan_.prompts = static_cast<uint32_t>(largest(find(plan_.packed ? "last_token_ids" : "last_rows"), 0));
    plan_.shares_rows = !plan_.packed && (find("positions") != nullptr || find("segments") != nullptr);
    if (plan_.packed) {
      plan_.tokens = static_cast<uint32_t>(largest(&ids, 0));
      plan_.row_tokens = contract_.limits.max_input_tokens;
      return;
    }
    plan_.rows = static_cast<uint32_t>(largest(&ids, 0));
    plan_.row_tokens = static_cast<uint32_t>(std::max<int64_t>(ids.extents[1], 0));
    plan_.tokens = plan_.rows * plan_.row_tokens;
  }

  int64_t extent(Extent kind) const {
    switch (kind) {
      case Extent::kRowTokens:
        return plan_.row_tokens;
      case Extent::kSixteen:
        return 16;
      case Extent::kOne:
        return 1;
      case Extent::kLayers:
        return contract_.model.layers;
      case Extent::kRows:
      case Extent::kTokens:
      case Extent::kPrompts:
        break;
    }
    return -1;
  }

  void bind(const TensorInfo& tensor) {
    Binding binding;
    binding.tensor = tensor;
    if (is_cache(tensor)) {
      add(quoted(tensor.name), "a tensor of a KV cache", "an engine without one");
    } else if (tensor.shape_tensor) {
      add(quoted(tensor.name), "a shape tensor", "only tensors whose values do not decide extents");
    } else if (tensor.is_input) {
      bind_input(binding);
    }
    binding.bytes = bytes_of(tensor);
    if (!tensor.is_input && binding.bytes == 0) {
      add(quoted(tensor.name), element_name(tensor.type), "an output of a type whose size is known");
    }
    plan_.bindings.push_back(std::move(binding));
  }

  // An output that nobody reads is written all the same. Where the runtime does not say how large it becomes, a dynamic
  // extent is taken for whatever there is most of.
  uint64_t bytes_of(const TensorInfo& tensor) const {
    if (tensor.most_bytes > 0) return tensor.most_bytes;
    uint64_t bytes = element_bytes(tensor.type);
    for (const int64_t size : tensor.is_input ? tensor.largest : tensor.extents) {
      bytes *= static_cast<uint64_t>(size < 0 ? std::max(plan_.tokens, plan_.prompts) : size);
    }
    return bytes;
  }

  static bool is_cache(const TensorInfo& tensor) {
    return std::any_of(kCacheMarks.begin(), kCacheMarks.end(),
                       [&](std::string_view mark) { return tensor.name.find(mark) != std::string::npos; });
  }

  void bind_input(Binding& binding) {
    const TensorInfo& tensor = binding.tensor;
    const Rule* rule = rule_of(tensor.name);
    if (rule == nullptr) {
      add(quoted(tensor.name), "an input that this backend does not know", "no input that nobody fills");
      return;
    }
    binding.role = rule->role;
    // Who reads the memory decides, not what the runtime reports: the plugin's host_* inputs are reported on the card.
    binding.on_host = rule->on_host || tensor.reported_on_host;
    if (tensor.type != rule->type) add(quoted(tensor.name), element_name(tensor.type), element_name(rule->type));
    bool fits = tensor.extents.size() == rule->rank;
    for (size_t axis = 0; fits && axis < rule->rank; ++axis) {
      const int64_t wanted = extent(rule->extents[axis]);
      fits = wanted < 0 ? tensor.extents[axis] == -1 : tensor.extents[axis] == wanted;
    }
    if (!fits) {
      std::vector<int64_t> wanted;
      for (size_t axis = 0; axis < rule->rank; ++axis) wanted.push_back(extent(rule->extents[axis]));
      add(quoted(tensor.name), render_extents(tensor.extents), render_extents(wanted));
    }
    if (tensor.smallest.empty() || (tensor.extents[0] == -1 && tensor.smallest[0] > 1)) {
      add(quoted(tensor.name), "smallest extents " + render_extents(tensor.smallest), "a profile that begins at 1");
    }
  }

  const Rule* rule_of(std::string_view name) const {
    const auto found = std::find_if(kInputs.begin(), kInputs.end(), [&](const Rule& rule) {
      return rule.name == name && (plan_.packed ? rule.packed : rule.rows);
    });
    return found == kInputs.end() ? nullptr : &*found;
  }

  void missing() {
    for (const Rule& rule : kInputs) {
      if (!(plan_.packed ? rule.packed : rule.rows) || !rule.required) continue;
      // Of an engine that gives each prompt a row they would say nothing.
      if (!plan_.packed && !plan_.shares_rows && (rule.role == Role::kPositions || rule.role == Role::kSegments)) {
        continue;
      }
      const TensorInfo* tensor = find(rule.name);
      if (tensor == nullptr || !tensor->is_input) {
        find_nothing(quoted(std::string(rule.name)), std::string("an input, ") + element_name(rule.type));
      }
    }
  }

  void outputs() {
    if (!contract_.capabilities.payload) {
      add("capabilities.payload", "not_applicable", "the payload that this engine makes");
      return;
    }
    const ContractValues::Payload& payload = *contract_.capabilities.payload;
    const ElementType type = payload.dtype == IFAB_DTYPE_FLOAT32   ? ElementType::kFloat32
                             : payload.dtype == IFAB_DTYPE_FLOAT16 ? ElementType::kFloat16
                                                                   : ElementType::kBfloat16;
    const std::vector<int64_t> wanted = {-1, static_cast<int64_t>(contract_.model.hidden_size)};
    for (const int32_t layer : payload.layers) {
      const std::string name = layer < 0 ? "hidden" : "layer_" + std::to_string(layer);
      const auto binding = std::find_if(plan_.bindings.begin(), plan_.bindings.end(), [&](const Binding& each) {
        return each.tensor.name == name && !each.tensor.is_input;
      });
      if (binding == plan_.bindings.end()) {
        find_nothing(quoted(name), "an output, since the contract's payload has layer " + std::to_string(layer));
        continue;
      }
      if (binding->tensor.type != type) add(quoted(name), element_name(binding->tensor.type), element_name(type));
      if (binding->tensor.extents != wanted) {
        add(quoted(name), render_extents(binding->tensor.extents),
            render_extents(wanted) + ", gathered to the last token");
      }
      binding->role = Role::kHidden;
      binding->bytes =
          uint64_t{plan_.prompts} * contract_.model.hidden_size * element_bytes(type);  // seen to at launch
      binding->layer = layer;
      plan_.hidden.push_back(static_cast<size_t>(binding - plan_.bindings.begin()));
    }
  }

  void limits() {
    const ContractValues::Limits& limits = contract_.limits;
    if (limits.max_output_tokens != 0) add("limits.max_output_tokens", std::to_string(limits.max_output_tokens), "0");
    if (limits.kv_block_tokens)
      add("limits.kv_block_tokens", std::to_string(*limits.kv_block_tokens), "not_applicable");
    if (plan_.row_tokens != 0 && limits.max_input_tokens > plan_.row_tokens) {
      add("limits.max_input_tokens", std::to_string(limits.max_input_tokens),
          "at most a row of the engine, " + std::to_string(plan_.row_tokens));
    }
    if (!plan_.packed && limits.step_token_budget < plan_.row_tokens) {
      add("limits.step_token_budget", std::to_string(limits.step_token_budget),
          "at least a row of the engine, " + std::to_string(plan_.row_tokens));
    }
    if (plan_.tokens != limits.built_step_token_budget) {
      add("limits.built_step_token_budget", std::to_string(limits.built_step_token_budget),
          std::to_string(plan_.tokens) + ", the largest launch of the engine's profile");
    }
    if (plan_.prompts == 0) add("profiles", "no prompt at all", "a profile that takes at least 1");
  }

  const Enumeration& enumeration_;
  const ContractValues& contract_;
  std::vector<Finding>& findings_;
  BindingPlan plan_;
};

}  // namespace

BindingPlan plan_bindings(const Enumeration& enumeration, const ContractValues& contract,
                          std::vector<Finding>& findings) {
  return Planner(enumeration, contract, findings).run();
}

}  // namespace ifab::tensorrt
