// SPDX-License-Identifier: Apache-2.0
//
// The plugins: ifab_packed_attention, ifab_norm and ifab_gated_unit, version 1, namespace ifab.
#include <atomic>
#include <cstdio>

#include "attention_shape.h"
#include "plugin.h"
#include "rows_shape.h"

namespace ifab::plugins {
namespace {

using nvinfer1::DataType;
using nvinfer1::Dims;
using nvinfer1::PluginFieldType;
using Types = std::vector<DataType>;

std::atomic<nvinfer1::ILoggerFinder*> logger_finder{nullptr};

DataType type_of(float output_scale) {
  return output_scale > 0.0F ? DataType::kFP8 : DataType::kBF16;
}

// Inputs: qkv, then positions and segments where rows are packed, then cosine and sine; attention.h has extents.
struct PackedAttention {
  using Plan = AttentionShape;
  static constexpr const char* kName = "ifab_packed_attention";
  static constexpr std::array<Field, 6> kFields = {
      {{"heads", offsetof(Plan, heads), PluginFieldType::kINT32},
       {"kv_heads", offsetof(Plan, kv_heads), PluginFieldType::kINT32},
       {"head_size", offsetof(Plan, head_size), PluginFieldType::kINT32},
       {"row_tokens", offsetof(Plan, row_tokens), PluginFieldType::kINT32},
       {"packed", offsetof(Plan, packed), PluginFieldType::kINT32},
       {"output_scale", offsetof(Plan, output_scale), PluginFieldType::kFLOAT32}}};

  static std::string refuse(const Plan& plan) { return plugins::refuse(plan); }
  static Types inputs(const Plan& plan) {
    Types types = {DataType::kBF16};
    if (plan.packed != 0) types.insert(types.end(), 2, DataType::kINT32);
    types.insert(types.end(), 2, DataType::kFLOAT);
    return types;
  }
  static Types outputs(const Plan& plan) { return {type_of(plan.output_scale)}; }
  static void shape(const Plan& plan, const nvinfer1::DimsExprs& in, nvinfer1::DimsExprs& out,
                    nvinfer1::IExprBuilder& expressions) {
    out.nbDims = 2;
    out.d[0] = in.d[0];
    out.d[1] = expressions.constant(int64_t{plan.heads} * plan.head_size);
  }

  static std::string check(const Plan& plan, const std::vector<Dims>& dims, bool largest) {
    for (const Dims& each : dims) {
      if (each.nbDims != 2) return wrong("an input that has not two extents");
    }
    if (dims[0].d[1] != int64_t{plan.heads + 2 * plan.kv_heads} * plan.head_size) {
      return wrong("qkv's width, which is not (heads + 2 * kv_heads) * head_size");
    }
    const size_t tables = plan.packed != 0 ? 3 : 1;
    for (size_t i = 1; i < dims.size(); ++i) {
      if (i < tables && dims[i].d[1] != plan.row_tokens) {
        return wrong("positions' or segments' width, not row_tokens");
      }
      if (i >= tables && (dims[i].d[0] != plan.row_tokens || dims[i].d[1] != plan.head_size / 2)) {
        return wrong("cosine's or sine's extents, not row_tokens and half of head_size");
      }
    }
    return largest ? std::string() : refuse_tokens(plan, dims[0].d[0]);
  }

  static std::string launch(const Plan& plan, Kernels& kernels, const Dims& dims, const void* const* inputs,
                            void* const* outputs, void* stream) {
    const int64_t tokens = dims.d[0];
    if (std::string problem = refuse_tokens(plan, tokens); !problem.empty()) return problem;
    const int32_t tables = plan.packed != 0 ? 3 : 1;
    AttentionArguments addresses;
    addresses.qkv = static_cast<const uint16_t*>(inputs[0]);
    addresses.positions = plan.packed != 0 ? static_cast<const int32_t*>(inputs[1]) : nullptr;
    addresses.segments = plan.packed != 0 ? static_cast<const int32_t*>(inputs[2]) : nullptr;
    addresses.cosine = static_cast<const float*>(inputs[tables]);
    addresses.sine = static_cast<const float*>(inputs[tables + 1]);
    addresses.output = static_cast<uint8_t*>(outputs[0]);
    return kernels.launch(plan, tokens / plan.row_tokens, addresses, stream);
  }

  static std::string wrong(const char* what) { return std::string(kName) + ": wrong is " + what; }
};

// Inputs: x, then the addend where there is one, then the weight. Outputs: the normed, then the sum where there is one.
struct RowNorm {
  using Plan = Norm;
  static constexpr const char* kName = "ifab_norm";
  static constexpr std::array<Field, 3> kFields = {
      {{"epsilon", offsetof(Plan, epsilon), PluginFieldType::kFLOAT32},
       {"added", offsetof(Plan, added), PluginFieldType::kINT32},
       {"output_scale", offsetof(Plan, output_scale), PluginFieldType::kFLOAT32}}};

  static std::string refuse(const Plan& plan) { return plugins::refuse(plan); }
  static Types inputs(const Plan& plan) { return Types(plan.added != 0 ? 3 : 2, DataType::kBF16); }
  static Types outputs(const Plan& plan) {
    Types types = {type_of(plan.output_scale)};
    if (plan.added != 0) types.push_back(DataType::kBF16);
    return types;
  }
  static void shape(const Plan&, const nvinfer1::DimsExprs& in, nvinfer1::DimsExprs& out, nvinfer1::IExprBuilder&) {
    out = in;
  }

  static std::string check(const Plan& plan, const std::vector<Dims>& dims, bool largest) {
    if (std::string problem = refuse_rows(kName, dims[0].d[1], largest ? 1 : dims[0].d[0]); !problem.empty()) {
      return problem;
    }
    if (dims.size() == 1) return {};
    const Dims& weight = dims.back();
    if (weight.nbDims != 1 || weight.d[0] != dims[0].d[1]) return wrong("the weight's extents, not x's width");
    const Dims& addend = dims[1];
    const bool same = addend.nbDims == 2 && addend.d[0] == dims[0].d[0] && addend.d[1] == dims[0].d[1];
    return plan.added == 0 || same ? std::string() : wrong("the addend's extents, not those of x");
  }

  static std::string launch(const Plan& plan, Kernels& kernels, const Dims& dims, const void* const* inputs,
                            void* const* outputs, void* stream) {
    const bool added = plan.added != 0;
    NormArguments addresses;
    addresses.x = static_cast<const uint16_t*>(inputs[0]);
    addresses.addend = added ? static_cast<const uint16_t*>(inputs[1]) : nullptr;
    addresses.weight = static_cast<const uint16_t*>(inputs[added ? 2 : 1]);
    addresses.output = static_cast<uint8_t*>(outputs[0]);
    addresses.sum = added ? static_cast<uint16_t*>(outputs[1]) : nullptr;
    return kernels.launch(plan, dims.d[0], static_cast<int32_t>(dims.d[1]), addresses, stream);
  }

  static std::string wrong(const char* what) { return std::string(kName) + ": wrong is " + what; }
};

// Input: x, of which each row holds the gate and then what it gates.
struct Gated {
  using Plan = GatedUnit;
  static constexpr const char* kName = "ifab_gated_unit";
  static constexpr std::array<Field, 1> kFields = {
      {{"output_scale", offsetof(Plan, output_scale), PluginFieldType::kFLOAT32}}};

  static std::string refuse(const Plan& plan) { return plugins::refuse(plan); }
  static Types inputs(const Plan&) { return {DataType::kBF16}; }
  static Types outputs(const Plan& plan) { return {type_of(plan.output_scale)}; }
  static void shape(const Plan&, const nvinfer1::DimsExprs& in, nvinfer1::DimsExprs& out,
                    nvinfer1::IExprBuilder& expressions) {
    out.nbDims = 2;
    out.d[0] = in.d[0];
    out.d[1] = expressions.operation(nvinfer1::DimensionOperation::kFLOOR_DIV, *in.d[1], *expressions.constant(2));
  }

  static std::string check(const Plan&, const std::vector<Dims>& dims, bool largest) {
    if (dims[0].d[1] % 2 != 0) return std::string(kName) + ": x does not fall into halves";
    return refuse_rows(kName, dims[0].d[1] / 2, largest ? 1 : dims[0].d[0]);
  }

  static std::string launch(const Plan& plan, Kernels& kernels, const Dims& dims, const void* const* inputs,
                            void* const* outputs, void* stream) {
    GatedUnitArguments addresses;
    addresses.x = static_cast<const uint16_t*>(inputs[0]);
    addresses.output = static_cast<uint8_t*>(outputs[0]);
    return kernels.launch(plan, dims.d[0], static_cast<int32_t>(dims.d[1] / 2), addresses, stream);
  }
};

}  // namespace

void complain(const std::string& sentence) noexcept {
  nvinfer1::ILoggerFinder* finder = logger_finder.load();
  nvinfer1::ILogger* logger = finder != nullptr ? finder->findLogger() : nullptr;
  if (logger != nullptr) {
    logger->log(nvinfer1::ILogger::Severity::kERROR, sentence.c_str());
  } else {
    std::fprintf(stderr, "%s\n", sentence.c_str());
  }
}

}  // namespace ifab::plugins

extern "C" __attribute__((visibility("default"))) void setLoggerFinder(nvinfer1::ILoggerFinder* finder) {
  ifab::plugins::logger_finder.store(finder);
}

extern "C" __attribute__((visibility("default"))) nvinfer1::IPluginCreatorInterface* const* getCreators(
    int32_t& count) {
  using namespace ifab::plugins;
  static Creator<PackedAttention> attention;
  static Creator<RowNorm> norm;
  static Creator<Gated> gated_unit;
  static std::array<nvinfer1::IPluginCreatorInterface*, 3> creators = {&attention, &norm, &gated_unit};
  count = static_cast<int32_t>(creators.size());
  return creators.data();
}
