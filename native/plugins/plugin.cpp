// SPDX-License-Identifier: Apache-2.0
//
// The attention kernel as a plugin of TensorRT 10 and 11 (IPluginV3): name ifab_packed_attention, version 1, namespace
// ifab. Inputs: qkv, then positions and segments where rows are packed, then cosine and sine; attention.h has extents.
#include <NvInferRuntime.h>
#include <NvInferRuntimePlugin.h>

#include <array>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <exception>
#include <memory>
#include <new>
#include <string>
#include <utility>

#include "kernels.h"
#include "shape.h"

namespace ifab::attention {
namespace {

using nvinfer1::DataType;
using nvinfer1::PluginField;
using nvinfer1::PluginFieldCollection;
using nvinfer1::PluginFieldType;

constexpr const char* kName = "ifab_packed_attention";
constexpr const char* kVersion = "1";
constexpr const char* kNamespace = "ifab";

std::atomic<nvinfer1::ILoggerFinder*> logger_finder{nullptr};

void complain(const std::string& sentence) noexcept {
  nvinfer1::ILoggerFinder* finder = logger_finder.load();
  nvinfer1::ILogger* logger = finder != nullptr ? finder->findLogger() : nullptr;
  if (logger != nullptr) {
    logger->log(nvinfer1::ILogger::Severity::kERROR, sentence.c_str());
  } else {
    std::fprintf(stderr, "%s\n", sentence.c_str());
  }
}

// Runs what may throw; a sentence is logged and answered with `otherwise`.
template <class Value, class Body>
Value guarded(Value otherwise, Body body) noexcept {
  try {
    const std::string problem = body();
    if (problem.empty()) return Value{};
    complain(problem);
  } catch (const std::exception&) {
    complain("ifab_packed_attention: out of memory");
  }
  return otherwise;
}

class Plugin final : public nvinfer1::IPluginV3,
                     public nvinfer1::IPluginV3OneCore,
                     public nvinfer1::IPluginV3OneBuild,
                     public nvinfer1::IPluginV3OneRuntime {
 public:
  explicit Plugin(const Shape& shape, std::shared_ptr<Kernels> kernels = nullptr)
      : shape_(shape),
        kernels_(std::move(kernels)),
        fields_{{{"heads", &shape_.heads, PluginFieldType::kINT32, 1},
                 {"kv_heads", &shape_.kv_heads, PluginFieldType::kINT32, 1},
                 {"head_size", &shape_.head_size, PluginFieldType::kINT32, 1},
                 {"row_tokens", &shape_.row_tokens, PluginFieldType::kINT32, 1},
                 {"packed", &shape_.packed, PluginFieldType::kINT32, 1},
                 {"output_scale", &shape_.output_scale, PluginFieldType::kFLOAT32, 1}}},
        collection_{static_cast<int32_t>(fields_.size()), fields_.data()} {}
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
  nvinfer1::IPluginV3* clone() noexcept override { return new (std::nothrow) Plugin(shape_, kernels_); }

  const char* getPluginName() const noexcept override { return kName; }
  const char* getPluginVersion() const noexcept override { return kVersion; }
  const char* getPluginNamespace() const noexcept override { return kNamespace; }

  int32_t getNbOutputs() const noexcept override { return 1; }
  int32_t getOutputDataTypes(DataType* out, int32_t outputs, const DataType*, int32_t inputs) const noexcept override {
    if (outputs != 1 || inputs != this->inputs()) return -1;
    out[0] = output_type();
    return 0;
  }
  int32_t getOutputShapes(const nvinfer1::DimsExprs* in, int32_t inputs, const nvinfer1::DimsExprs*, int32_t,
                          nvinfer1::DimsExprs* out, int32_t outputs,
                          nvinfer1::IExprBuilder& expressions) noexcept override {
    if (outputs != 1 || inputs != this->inputs() || in[0].nbDims != 2) {
      complain("ifab_packed_attention: takes " + std::to_string(this->inputs()) +
               " inputs, the first of which has two extents");
      return -1;
    }
    out[0].nbDims = 2;
    out[0].d[0] = in[0].d[0];
    out[0].d[1] = expressions.constant(int64_t{shape_.heads} * shape_.head_size);
    return 0;
  }
  bool supportsFormatCombination(int32_t place, const nvinfer1::DynamicPluginTensorDesc* all, int32_t inputs,
                                 int32_t outputs) noexcept override {
    if (inputs != this->inputs() || outputs != 1) return false;
    const nvinfer1::PluginTensorDesc& tensor = all[place].desc;
    return tensor.format == nvinfer1::TensorFormat::kLINEAR && tensor.type == type_of(place);
  }
  int32_t configurePlugin(const nvinfer1::DynamicPluginTensorDesc* in, int32_t inputs,
                          const nvinfer1::DynamicPluginTensorDesc*, int32_t outputs) noexcept override {
    return guarded<int32_t>(-1, [&]() -> std::string {
      if (inputs != this->inputs() || outputs != 1) return wrong("the number of inputs or outputs");
      return check(0, in[0].max, true);
    });
  }
  size_t getWorkspaceSize(const nvinfer1::DynamicPluginTensorDesc*, int32_t, const nvinfer1::DynamicPluginTensorDesc*,
                          int32_t) const noexcept override {
    return 0;
  }

  int32_t onShapeChange(const nvinfer1::PluginTensorDesc* in, int32_t inputs, const nvinfer1::PluginTensorDesc*,
                        int32_t outputs) noexcept override {
    return guarded<int32_t>(-1, [&]() -> std::string {
      if (inputs != this->inputs() || outputs != 1) return wrong("the number of inputs or outputs");
      for (int32_t i = 0; i < inputs; ++i) {
        if (std::string problem = check(i, in[i].dims, false); !problem.empty()) return problem;
      }
      return {};
    });
  }
  int32_t enqueue(const nvinfer1::PluginTensorDesc* in, const nvinfer1::PluginTensorDesc*, const void* const* inputs,
                  void* const* outputs, void*, cudaStream_t stream) noexcept override {
    return guarded<int32_t>(-1, [&]() -> std::string {
      if (kernels_ == nullptr) {
        std::string problem;
        kernels_ = Kernels::shared(problem);
        if (!problem.empty()) return problem;
      }
      const int64_t tokens = in[0].dims.d[0];
      if (std::string problem = refuse_tokens(shape_, tokens); !problem.empty()) return problem;
      const int32_t tables = shape_.packed != 0 ? 3 : 1;
      Arguments addresses;
      addresses.qkv = static_cast<const uint16_t*>(inputs[0]);
      addresses.positions = shape_.packed != 0 ? static_cast<const int32_t*>(inputs[1]) : nullptr;
      addresses.segments = shape_.packed != 0 ? static_cast<const int32_t*>(inputs[2]) : nullptr;
      addresses.cosine = static_cast<const float*>(inputs[tables]);
      addresses.sine = static_cast<const float*>(inputs[tables + 1]);
      addresses.output = static_cast<uint8_t*>(outputs[0]);
      return kernels_->launch(shape_, tokens / shape_.row_tokens, addresses, stream);
    });
  }
  nvinfer1::IPluginV3* attachToContext(nvinfer1::IPluginResourceContext*) noexcept override {
    std::shared_ptr<Kernels> kernels;
    const int32_t failed = guarded<int32_t>(-1, [&] {
      std::string problem;
      kernels = Kernels::shared(problem);
      return problem;
    });
    return failed != 0 ? nullptr : new (std::nothrow) Plugin(shape_, std::move(kernels));
  }
  const PluginFieldCollection* getFieldsToSerialize() noexcept override { return &collection_; }

 private:
  int32_t inputs() const { return shape_.packed != 0 ? 5 : 3; }
  DataType output_type() const { return shape_.output_scale > 0.0F ? DataType::kFP8 : DataType::kBF16; }
  DataType type_of(int32_t place) const {
    if (place == 0) return DataType::kBF16;
    if (place == inputs()) return output_type();
    return shape_.packed != 0 && place < 3 ? DataType::kINT32 : DataType::kFLOAT;
  }
  static std::string wrong(const char* what) { return std::string("ifab_packed_attention: wrong is ") + what; }

  // An input's extents against the shape; `largest` is the profile's, whose number of tokens need only be possible.
  std::string check(int32_t input, const nvinfer1::Dims& dims, bool largest) const {
    if (dims.nbDims != 2) return wrong("an input that has not two extents");
    if (input == 0) {
      if (dims.d[1] != int64_t{shape_.heads + 2 * shape_.kv_heads} * shape_.head_size) {
        return wrong("qkv's width, which is not (heads + 2 * kv_heads) * head_size");
      }
      return largest ? std::string() : refuse_tokens(shape_, dims.d[0]);
    }
    if (type_of(input) == DataType::kINT32) {
      return dims.d[1] == shape_.row_tokens ? std::string() : wrong("positions' or segments' width, not row_tokens");
    }
    const bool whole = dims.d[0] == shape_.row_tokens && dims.d[1] == shape_.head_size / 2;
    return whole ? std::string() : wrong("cosine's or sine's extents, not row_tokens and half of head_size");
  }

  Shape shape_;
  std::shared_ptr<Kernels> kernels_;
  std::array<PluginField, 6> fields_;
  PluginFieldCollection collection_;
};

class Creator final : public nvinfer1::IPluginCreatorV3One {
 public:
  nvinfer1::IPluginV3* createPlugin(const char*, const PluginFieldCollection* fields,
                                    nvinfer1::TensorRTPhase) noexcept override {
    Shape shape;
    const int32_t failed = guarded<int32_t>(-1, [&] { return read(fields, shape); });
    return failed != 0 ? nullptr : new (std::nothrow) Plugin(shape);
  }
  const PluginFieldCollection* getFieldNames() noexcept override { return &collection_; }
  const char* getPluginName() const noexcept override { return kName; }
  const char* getPluginVersion() const noexcept override { return kVersion; }
  const char* getPluginNamespace() const noexcept override { return kNamespace; }

 private:
  std::string read(const PluginFieldCollection* given, Shape& shape) const {
    const std::array<void*, 6> places = {&shape.heads,      &shape.kv_heads, &shape.head_size,
                                         &shape.row_tokens, &shape.packed,   &shape.output_scale};
    std::array<bool, 6> seen{};
    for (int32_t i = 0; given != nullptr && i < given->nbFields; ++i) {
      const PluginField& field = given->fields[i];
      size_t which = 0;
      while (which < names_.size() && std::strcmp(names_[which].name, field.name) != 0) ++which;
      if (which == names_.size()) return std::string(kName) + " has no field " + field.name;
      if (field.type != names_[which].type || field.length != 1 || field.data == nullptr) {
        return std::string(kName) + ": " + field.name + " must be one " + (which == 5 ? "float32" : "int32");
      }
      std::memcpy(places[which], field.data, 4);
      seen[which] = true;
    }
    for (size_t which = 0; which < seen.size(); ++which) {
      if (!seen[which]) return std::string(kName) + ": the field " + names_[which].name + " is missing";
    }
    return refuse(shape);
  }

  std::array<PluginField, 6> names_{{{"heads", nullptr, PluginFieldType::kINT32, 1},
                                     {"kv_heads", nullptr, PluginFieldType::kINT32, 1},
                                     {"head_size", nullptr, PluginFieldType::kINT32, 1},
                                     {"row_tokens", nullptr, PluginFieldType::kINT32, 1},
                                     {"packed", nullptr, PluginFieldType::kINT32, 1},
                                     {"output_scale", nullptr, PluginFieldType::kFLOAT32, 1}}};
  PluginFieldCollection collection_{static_cast<int32_t>(names_.size()), names_.data()};
};

}  // namespace
}  // namespace ifab::attention

extern "C" __attribute__((visibility("default"))) void setLoggerFinder(nvinfer1::ILoggerFinder* finder) {
  ifab::attention::logger_finder.store(finder);
}

extern "C" __attribute__((visibility("default"))) nvinfer1::IPluginCreatorInterface* const* getCreators(
    int32_t& count) {
  static ifab::attention::Creator creator;
  static std::array<nvinfer1::IPluginCreatorInterface*, 1> creators = {&creator};
  count = 1;
  return creators.data();
}
