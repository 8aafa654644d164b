// SPDX-License-Identifier: Apache-2.0
//
// What is the same in every plugin of TensorRT 10 and 11 (IPluginV3) here. An `Operation` says the rest, all of it
// static:
//   Plan                        what the plan says of one; its fields are of four bytes
//   kName, kFields              the plugin's name and its fields
//   refuse(plan)                what is wrong with a plan, or nothing
//   inputs(plan), outputs(plan) types, in order
//   shape(plan, input, output, expressions)   extents of one output, of the first input's
//   check(plan, dims, largest)  what is wrong with inputs' extents, as many as are given; `largest`: those of a
//   profile,
//                               whose number of tokens need only be possible
//   launch(plan, kernels, dims, inputs, outputs, stream)
// Everything has two extents but weights, and lies densely.
#pragma once

#include <NvInferRuntime.h>
#include <NvInferRuntimePlugin.h>

#include <array>
#include <cstddef>
#include <cstring>
#include <exception>
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "kernels.h"

namespace ifab::plugins {

inline constexpr const char* kVersion = "1";
inline constexpr const char* kNamespace = "ifab";

// Hands a sentence to the logger of whoever loaded the library.
void complain(const std::string& sentence) noexcept;

struct Field {
  const char* name;
  size_t offset;  // in the plan
  nvinfer1::PluginFieldType type;
};

// Runs what may throw; a sentence is logged and answered with `otherwise`.
template <class Value, class Body>
Value guarded(const char* plugin, Value otherwise, Body body) noexcept {
  try {
    const std::string problem = body();
    if (problem.empty()) return Value{};
    complain(problem);
  } catch (const std::exception&) {
    complain(std::string(plugin) + ": out of memory");
  }
  return otherwise;
}

template <class Operation>
class Plugin final : public nvinfer1::IPluginV3,
                     public nvinfer1::IPluginV3OneCore,
                     public nvinfer1::IPluginV3OneBuild,
                     public nvinfer1::IPluginV3OneRuntime {
 public:
  using Plan = typename Operation::Plan;
  using Types = std::vector<nvinfer1::DataType>;

  explicit Plugin(const Plan& plan, std::shared_ptr<Kernels> kernels = nullptr)
      : plan_(plan),
        inputs_(Operation::inputs(plan)),
        outputs_(Operation::outputs(plan)),
        kernels_(std::move(kernels)) {
    for (size_t i = 0; i < fields_.size(); ++i) {
      const Field& field = Operation::kFields[i];
      fields_[i] = {field.name, reinterpret_cast<const char*>(&plan_) + field.offset, field.type, 1};
    }
  }
  Plugin(const Plugin&) = delete;
  Plugin& operator=(const Plugin&) = delete;
  ~Plugin() noexcept override = default;

  nvinfer1::IPluginCapability* getCapabilityInterface(nvinfer1::PluginCapabilityType type) noexcept override {
    switch (type) {
      case nvinfer1::PluginCapabilityType::kCORE:
        return static_cast<nvinfer1::IPluginV3OneCore*>(this);
      case nvinfer1::PluginCapabilityType::kBUILD:
        return static_cast<nvinfer1::IPluginV3OneBuild*>(this);
      case nvinfer1::PluginCapabilityType::kRUNTIME:
        return static_cast<nvinfer1::IPluginV3OneRuntime*>(this);
    }
    return nullptr;
  }
  nvinfer1::IPluginV3* clone() noexcept override { return made(plan_, kernels_); }

  // A plugin, or null where there is no memory for one.
  static Plugin* made(const Plan& plan, std::shared_ptr<Kernels> kernels) noexcept {
    Plugin* plugin = nullptr;
    (void)guarded<int32_t>(Operation::kName, -1, [&]() -> std::string {
      plugin = new Plugin(plan, std::move(kernels));
      return {};
    });
    return plugin;
  }

  const char* getPluginName() const noexcept override { return Operation::kName; }
  const char* getPluginVersion() const noexcept override { return kVersion; }
  const char* getPluginNamespace() const noexcept override { return kNamespace; }

  int32_t getNbOutputs() const noexcept override { return static_cast<int32_t>(outputs_.size()); }
  int32_t getOutputDataTypes(nvinfer1::DataType* out, int32_t outputs, const nvinfer1::DataType*,
                             int32_t inputs) const noexcept override {
    if (!counted(inputs, outputs)) return -1;
    for (size_t i = 0; i < outputs_.size(); ++i) out[i] = outputs_[i];
    return 0;
  }
  int32_t getOutputShapes(const nvinfer1::DimsExprs* in, int32_t inputs, const nvinfer1::DimsExprs*, int32_t,
                          nvinfer1::DimsExprs* out, int32_t outputs,
                          nvinfer1::IExprBuilder& expressions) noexcept override {
    if (!counted(inputs, outputs) || in[0].nbDims != 2) {
      complain(std::string(Operation::kName) + " takes " + std::to_string(inputs_.size()) +
               " inputs, the first of which has two extents");
      return -1;
    }
    for (int32_t i = 0; i < outputs; ++i) Operation::shape(plan_, in[0], out[i], expressions);
    return 0;
  }
  bool supportsFormatCombination(int32_t place, const nvinfer1::DynamicPluginTensorDesc* all, int32_t inputs,
                                 int32_t outputs) noexcept override {
    if (!counted(inputs, outputs)) return false;
    const nvinfer1::PluginTensorDesc& tensor = all[place].desc;
    const auto at = static_cast<size_t>(place);
    const nvinfer1::DataType type = at < inputs_.size() ? inputs_[at] : outputs_[at - inputs_.size()];
    return tensor.format == nvinfer1::TensorFormat::kLINEAR && tensor.type == type;
  }
  int32_t configurePlugin(const nvinfer1::DynamicPluginTensorDesc* in, int32_t inputs,
                          const nvinfer1::DynamicPluginTensorDesc*, int32_t outputs) noexcept override {
    return guarded<int32_t>(Operation::kName, -1, [&] {
      return counted(inputs, outputs) ? Operation::check(plan_, {in[0].max}, true) : miscounted();
    });
  }
  size_t getWorkspaceSize(const nvinfer1::DynamicPluginTensorDesc*, int32_t, const nvinfer1::DynamicPluginTensorDesc*,
                          int32_t) const noexcept override {
    return 0;
  }

  int32_t onShapeChange(const nvinfer1::PluginTensorDesc* in, int32_t inputs, const nvinfer1::PluginTensorDesc*,
                        int32_t outputs) noexcept override {
    return guarded<int32_t>(Operation::kName, -1, [&] {
      if (!counted(inputs, outputs)) return miscounted();
      std::vector<nvinfer1::Dims> dims;
      for (int32_t i = 0; i < inputs; ++i) dims.push_back(in[i].dims);
      return Operation::check(plan_, dims, false);
    });
  }
  int32_t enqueue(const nvinfer1::PluginTensorDesc* in, const nvinfer1::PluginTensorDesc*, const void* const* inputs,
                  void* const* outputs, void*, cudaStream_t stream) noexcept override {
    return guarded<int32_t>(Operation::kName, -1, [&]() -> std::string {
      if (kernels_ == nullptr) {
        std::string problem;
        kernels_ = Kernels::shared(problem);
        if (!problem.empty()) return problem;
      }
      return Operation::launch(plan_, *kernels_, in[0].dims, inputs, outputs, stream);
    });
  }
  nvinfer1::IPluginV3* attachToContext(nvinfer1::IPluginResourceContext*) noexcept override {
    std::shared_ptr<Kernels> kernels;
    const int32_t failed = guarded<int32_t>(Operation::kName, -1, [&] {
      std::string problem;
      kernels = Kernels::shared(problem);
      return problem;
    });
    return failed != 0 ? nullptr : made(plan_, std::move(kernels));
  }
  const nvinfer1::PluginFieldCollection* getFieldsToSerialize() noexcept override { return &collection_; }

 private:
  bool counted(int32_t inputs, int32_t outputs) const {
    return static_cast<size_t>(inputs) == inputs_.size() && static_cast<size_t>(outputs) == outputs_.size();
  }
  static std::string miscounted() { return std::string(Operation::kName) + ": wrong number of inputs or outputs"; }

  Plan plan_;
  Types inputs_, outputs_;
  std::shared_ptr<Kernels> kernels_;
  std::array<nvinfer1::PluginField, Operation::kFields.size()> fields_;
  nvinfer1::PluginFieldCollection collection_{static_cast<int32_t>(fields_.size()), fields_.data()};
};

template <class Operation>
class Creator final : public nvinfer1::IPluginCreatorV3One {
 public:
  Creator() {
    for (size_t i = 0; i < names_.size(); ++i) {
      names_[i] = {Operation::kFields[i].name, nullptr, Operation::kFields[i].type, 1};
    }
  }
  nvinfer1::IPluginV3* createPlugin(const char*, const nvinfer1::PluginFieldCollection* fields,
                                    nvinfer1::TensorRTPhase) noexcept override {
    typename Operation::Plan plan;
    const int32_t failed = guarded<int32_t>(Operation::kName, -1, [&] { return read(fields, plan); });
    return failed != 0 ? nullptr : Plugin<Operation>::made(plan, nullptr);
  }
  const nvinfer1::PluginFieldCollection* getFieldNames() noexcept override { return &collection_; }
  const char* getPluginName() const noexcept override { return Operation::kName; }
  const char* getPluginVersion() const noexcept override { return kVersion; }
  const char* getPluginNamespace() const noexcept override { return kNamespace; }

 private:
  static std::string read(const nvinfer1::PluginFieldCollection* given, typename Operation::Plan& plan) {
    const std::string name = Operation::kName;
    std::array<bool, Operation::kFields.size()> seen{};
    for (int32_t i = 0; given != nullptr && i < given->nbFields; ++i) {
      const nvinfer1::PluginField& field = given->fields[i];
      size_t which = 0;
      while (which < seen.size() && std::strcmp(Operation::kFields[which].name, field.name) != 0) ++which;
      if (which == seen.size()) return name + " has no field " + field.name;
      const Field& known = Operation::kFields[which];
      if (field.type != known.type || field.length != 1 || field.data == nullptr) {
        const bool real = known.type == nvinfer1::PluginFieldType::kFLOAT32;
        return name + ": " + field.name + " must be one " + (real ? "float32" : "int32");
      }
      std::memcpy(reinterpret_cast<char*>(&plan) + known.offset, field.data, 4);
      seen[which] = true;
    }
    for (size_t which = 0; which < seen.size(); ++which) {
      if (!seen[which]) return name + ": the field " + Operation::kFields[which].name + " is missing";
    }
    return Operation::refuse(plan);
  }

  std::array<nvinfer1::PluginField, Operation::kFields.size()> names_;
  nvinfer1::PluginFieldCollection collection_{static_cast<int32_t>(names_.size()), names_.data()};
};

}  // namespace ifab::plugins
