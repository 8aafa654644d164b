// SPDX-License-Identifier: Apache-2.0
#include "engine_tensors.h"

#include <algorithm>

#include "document.h"

namespace ifab::executor {
namespace {

tensorrt::ElementType type_of(int32_t dtype) {
  return dtype == IFAB_DTYPE_FLOAT32   ? tensorrt::ElementType::kFloat32
         : dtype == IFAB_DTYPE_FLOAT16 ? tensorrt::ElementType::kFloat16
                                       : tensorrt::ElementType::kBfloat16;
}

std::string outputs_of(const std::vector<tensorrt::TensorInfo>& tensors) {
  std::string names;
  for (const tensorrt::TensorInfo& tensor : tensors) {
    if (!tensor.is_input) names += (names.empty() ? "" : ", ") + tensor.name;
  }
  return names;
}

std::string extents_of(const tensorrt::TensorInfo& tensor) {
  std::string text;
  for (const int64_t extent : tensor.extents) text += (text.empty() ? "" : ", ") + std::to_string(extent);
  return "[" + text + "]";
}

}  // namespace

void check_outputs(const std::vector<std::string>& names, const std::vector<tensorrt::TensorInfo>& tensors,
                   const ContractValues& contract, std::vector<Finding>& findings) {
  for (size_t i = 0; i < names.size(); ++i) {
    const std::string path = "executor.json:payload_outputs[" + std::to_string(i) + "]";
    const auto found = std::find_if(tensors.begin(), tensors.end(), [&](const tensorrt::TensorInfo& tensor) {
      return !tensor.is_input && tensor.name == names[i];
    });
    if (found == tensors.end()) {
      add_finding(findings, {path, render_text(names[i]), "an output of the engine: " + outputs_of(tensors)});
      continue;
    }
    const auto hidden = static_cast<int64_t>(contract.model.hidden_size);
    if (found->extents != std::vector<int64_t>{-1, hidden}) {
      add_finding(findings, {path, names[i] + " is " + extents_of(*found),
                             "[-1, " + std::to_string(hidden) + "], a row for each sequence"});
    }
    if (const auto type = type_of(contract.capabilities.payload->dtype); found->type != type) {
      add_finding(findings, {path, names[i] + " is " + tensorrt::element_name(found->type),
                             std::string(tensorrt::element_name(type)) + ", as the contract says"});
    }
  }
}

}  // namespace ifab::executor
