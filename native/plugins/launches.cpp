// SPDX-License-Identifier: Apache-2.0
//
// For who has no TensorRT: each launches one kernel on a stream of the current context. They return null, or a sentence
// that is valid until this thread's next call.
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "attention_shape.h"
#include "kernels.h"
#include "rows_shape.h"

#define IFAB_SHOWN extern "C" __attribute__((visibility("default")))

namespace ifab::plugins {
namespace {

// Launches unless `problem` says why not; the kernels stay loaded for as long as the library does.
template <class Launch>
const char* told(std::string problem, Launch launch) {
  static thread_local std::string kept_problem;
  static std::shared_ptr<Kernels> kept;
  static std::mutex mutex;
  if (problem.empty()) {
    const std::lock_guard lock(mutex);
    if (kept == nullptr) kept = Kernels::shared(problem);
  }
  if (problem.empty()) problem = launch(*kept);
  kept_problem = std::move(problem);
  return kept_problem.empty() ? nullptr : kept_problem.c_str();
}

}  // namespace
}  // namespace ifab::plugins

IFAB_SHOWN const char* ifab_attention_launch(const void* qkv, const int32_t* positions, const int32_t* segments,
                                             const float* cosine, const float* sine, void* output, int64_t rows,
                                             int32_t heads, int32_t kv_heads, int32_t head_size, int32_t row_tokens,
                                             float output_scale, void* stream) {
  using namespace ifab::plugins;
  const AttentionShape shape{heads, kv_heads, head_size, row_tokens, positions != nullptr ? 1 : 0, output_scale};
  std::string problem = refuse(shape);
  if (problem.empty()) problem = refuse_tokens(shape, rows * row_tokens);
  return told(std::move(problem), [&](Kernels& kernels) {
    AttentionArguments addresses;
    addresses.qkv = static_cast<const uint16_t*>(qkv);
    addresses.positions = positions;
    addresses.segments = segments;
    addresses.cosine = cosine;
    addresses.sine = sine;
    addresses.output = static_cast<uint8_t*>(output);
    return kernels.launch(shape, rows, addresses, stream);
  });
}

// Without `addend` nothing is added, and `sum` is not written.
IFAB_SHOWN const char* ifab_norm_launch(const void* x, const void* addend, const void* weight, void* sum, void* output,
                                        int64_t tokens, int32_t width, float epsilon, float output_scale,
                                        void* stream) {
  using namespace ifab::plugins;
  const Norm norm{epsilon, addend != nullptr ? 1 : 0, output_scale};
  std::string problem = refuse(norm);
  if (problem.empty()) problem = refuse_rows("ifab_norm", width, tokens);
  return told(std::move(problem), [&](Kernels& kernels) {
    NormArguments addresses;
    addresses.x = static_cast<const uint16_t*>(x);
    addresses.addend = static_cast<const uint16_t*>(addend);
    addresses.weight = static_cast<const uint16_t*>(weight);
    addresses.sum = static_cast<uint16_t*>(sum);
    addresses.output = static_cast<uint8_t*>(output);
    return kernels.launch(norm, tokens, width, addresses, stream);
  });
}

// `x` is [tokens, 2 * width].
IFAB_SHOWN const char* ifab_gated_unit_launch(const void* x, void* output, int64_t tokens, int32_t width,
                                              float output_scale, void* stream) {
  using namespace ifab::plugins;
  const GatedUnit unit{output_scale};
  std::string problem = refuse(unit);
  if (problem.empty()) problem = refuse_rows("ifab_gated_unit", width, tokens);
  return told(std::move(problem), [&](Kernels& kernels) {
    GatedUnitArguments addresses;
    addresses.x = static_cast<const uint16_t*>(x);
    addresses.output = static_cast<uint8_t*>(output);
    return kernels.launch(unit, tokens, width, addresses, stream);
  });
}
