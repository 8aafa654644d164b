// SPDX-License-Identifier: Apache-2.0
//
// Stand-in: see types.h. A tensor on the card has no address that the processor may read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <numeric>
#include <vector>

#include "tensorrt_llm/executor/types.h"

namespace tensorrt_llm::executor {

using Shape = std::vector<std::int64_t>;

class Tensor {
 public:
  static Tensor cpu(DataType type, Shape shape) { return {type, MemoryType::kCPU, std::move(shape)}; }
  static Tensor card(DataType type, Shape shape) { return {type, MemoryType::kGPU, std::move(shape)}; }

  [[nodiscard]] Tensor copyToCpu() const {
    Tensor copy = *this;
    copy.memory_ = MemoryType::kCPU;
    return copy;
  }
  [[nodiscard]] void const* getData() const { return memory_ == MemoryType::kGPU ? nullptr : bytes_->data(); }
  [[nodiscard]] DataType getDataType() const { return type_; }
  [[nodiscard]] MemoryType getMemoryType() const { return memory_; }
  [[nodiscard]] Shape const& getShape() const { return shape_; }
  [[nodiscard]] std::size_t getSizeInBytes() const { return bytes_->size(); }
  // For whoever makes it.
  [[nodiscard]] std::uint8_t* bytes() { return bytes_->data(); }

 private:
  Tensor(DataType type, MemoryType memory, Shape shape) : type_(type), memory_(memory), shape_(std::move(shape)) {
    const auto values = std::accumulate(shape_.begin(), shape_.end(), std::int64_t{1}, std::multiplies<>());
    const std::size_t each = type == DataType::kFP32 ? 4 : 2;
    bytes_ = std::make_shared<std::vector<std::uint8_t>>(static_cast<std::size_t>(values) * each);
  }

  DataType type_;
  MemoryType memory_;
  Shape shape_;
  std::shared_ptr<std::vector<std::uint8_t>> bytes_;
};

}  // namespace tensorrt_llm::executor
