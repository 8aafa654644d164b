// SPDX-License-Identifier: Apache-2.0
//
// What an engine says of its own tensors, free of any vendor's types. Everything that the backend believes about an
// engine starts here: no tensor is assumed that is not in this list.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace ifab::tensorrt {

enum class ElementType { kFloat32, kFloat16, kBfloat16, kInt32, kInt64, kInt8, kBool, kFp8, kOther };

// Bytes of one element; 0 for kOther.
uint32_t element_bytes(ElementType type);
const char* element_name(ElementType type);

struct TensorInfo {
  std::string name;
  bool is_input = false;
  ElementType type = ElementType::kOther;
  std::vector<int64_t> extents;   // -1: dynamic
  bool reported_on_host = false;  // what the runtime reports, which is not always where the pointer has to lead
  bool shape_tensor = false;      // its values decide extents: read on the host while binding
  std::vector<int64_t> smallest;  // extents of profile 0; inputs only
  std::vector<int64_t> largest;
  uint64_t most_bytes = 0;  // of an output, with the largest inputs; 0: the runtime does not say
};

struct Enumeration {
  std::vector<TensorInfo> tensors;  // in the engine's order
  int32_t profiles = 0;
};

}  // namespace ifab::tensorrt
