// SPDX-License-Identifier: Apache-2.0
//
// Proves a build of libllama on the processor that it was built on: matrix products of every weight format that an
// engine may use, in every memory layout that the library would choose for them, against products in double; and that
// with integer weights a row has the same bits in whatever company of two rows or more it is computed, which is what
// reproducible engines stand on. scripts/libllama runs it as a process of its own, since a bad build may be killed by
// an illegal instruction.
//
// Exit status 0 where everything holds; 1 where a product is wrong, 2 where only company changes bits; with a line on
// standard error for each case.

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

#include "ggml-backend.h"
#include "ggml.h"

namespace {

constexpr int64_t kInner = 576;
constexpr int64_t kRows = 96;
constexpr ggml_type kFormats[] = {GGML_TYPE_Q8_0, GGML_TYPE_Q4_1, GGML_TYPE_Q4_0,
                                  GGML_TYPE_F16,  GGML_TYPE_BF16, GGML_TYPE_F32};
// The last is the whole that the others are parts of: blocks of prompts, their remainders, and steps of many sequences.
constexpr int64_t kColumns[] = {1, 2, 3, 7, 16, 17, 33, 63, 64, 128, 192};
constexpr int64_t kMostColumns = 192;

std::vector<float> pseudo_random(size_t count, uint32_t seed) {
  std::vector<float> values(count);
  for (float& value : values) {
    seed = seed * 1664525u + 1013904223u;
    value = static_cast<float>(seed >> 8) / 8388608.0f - 1.0f;
  }
  return values;
}

// Layouts that hold weights: the plain one, and those that the processor has kernels of its own for.
std::vector<ggml_backend_buffer_type_t> layouts(ggml_backend_dev_t cpu) {
  std::vector<ggml_backend_buffer_type_t> found{ggml_backend_dev_buffer_type(cpu)};
  auto get_extra = reinterpret_cast<ggml_backend_dev_get_extra_bufts_t>(
      ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(cpu), "ggml_backend_dev_get_extra_bufts"));
  for (auto* extra = get_extra != nullptr ? get_extra(cpu) : nullptr; extra != nullptr && *extra != nullptr; ++extra) {
    found.push_back(*extra);
  }
  return found;
}

struct Machine {
  ggml_backend_dev_t cpu;
  ggml_backend_t backend;
  ggml_backend_buffer_type_t layout;
};

// Weights of a format times some columns, with the weights as the format keeps them. Empty where the layout has no
// kernels for the format: loading a model asks in the same way.
std::vector<float> product(const Machine& machine, ggml_type format, int64_t columns, std::vector<float>& kept) {
  const ggml_init_params params{ggml_tensor_overhead() * 8 + ggml_graph_overhead(), nullptr, true};
  ggml_context* weights_context = ggml_init(params);
  ggml_context* context = ggml_init(params);
  ggml_tensor* weights = ggml_new_tensor_2d(weights_context, format, kInner, kRows);
  ggml_tensor* input = ggml_new_tensor_2d(context, GGML_TYPE_F32, kInner, columns);
  ggml_tensor* output = ggml_mul_mat(context, weights, input);
  ggml_backend_buffer_t weights_buffer = ggml_backend_alloc_ctx_tensors_from_buft(weights_context, machine.layout);
  ggml_backend_buffer_t buffer = ggml_backend_alloc_ctx_tensors(context, machine.backend);
  std::vector<float> result;
  if (weights_buffer != nullptr && buffer != nullptr && ggml_backend_dev_supports_op(machine.cpu, output)) {
    kept = pseudo_random(static_cast<size_t>(kInner * kRows), 7);
    const std::vector<float> activations = pseudo_random(static_cast<size_t>(kInner * columns), 11);
    std::vector<uint8_t> packed(ggml_nbytes(weights));
    ggml_quantize_chunk(format, kept.data(), packed.data(), 0, kRows, kInner, nullptr);
    if (format != GGML_TYPE_F32) ggml_get_type_traits(format)->to_float(packed.data(), kept.data(), kInner * kRows);
    ggml_backend_tensor_set(weights, packed.data(), 0, packed.size());
    ggml_backend_tensor_set(input, activations.data(), 0, ggml_nbytes(input));
    ggml_cgraph* graph = ggml_new_graph(context);
    ggml_build_forward_expand(graph, output);
    result.resize(static_cast<size_t>(kRows * columns), NAN);
    if (ggml_backend_graph_compute(machine.backend, graph) == GGML_STATUS_SUCCESS) {
      ggml_backend_tensor_get(output, result.data(), 0, ggml_nbytes(output));
    }
  }
  ggml_backend_buffer_free(weights_buffer);
  ggml_backend_buffer_free(buffer);
  ggml_free(context);
  ggml_free(weights_context);
  return result;
}

bool is_right(const std::vector<float>& result, const std::vector<float>& weights, int64_t columns) {
  const std::vector<float> activations = pseudo_random(static_cast<size_t>(kInner * columns), 11);
  for (int64_t column = 0; column < columns; ++column) {
    for (int64_t row = 0; row < kRows; ++row) {
      double expected = 0;
      for (int64_t i = 0; i < kInner; ++i) {
        expected += static_cast<double>(weights[static_cast<size_t>(row * kInner + i)]) *
                    static_cast<double>(activations[static_cast<size_t>(column * kInner + i)]);
      }
      // The input is rounded to 8 bits beside integer weights: an error of some hundredths of the norm of a row.
      const double error = std::fabs(expected - static_cast<double>(result[static_cast<size_t>(column * kRows + row)]));
      if (!(error < 0.5)) return false;
    }
  }
  return true;
}

}  // namespace

int main() {
  ggml_log_set([](ggml_log_level, const char*, void*) {}, nullptr);
  Machine machine{};
  machine.cpu = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
  machine.backend = machine.cpu != nullptr ? ggml_backend_dev_init(machine.cpu, nullptr) : nullptr;
  if (machine.backend == nullptr) {
    std::fprintf(stderr, "libllama has no CPU backend\n");
    return 1;
  }
  int wrong = 0;
  int depends = 0;
  for (ggml_backend_buffer_type_t layout : layouts(machine.cpu)) {
    machine.layout = layout;
    for (ggml_type format : kFormats) {
      std::vector<float> weights;
      const std::vector<float> whole = product(machine, format, kMostColumns, weights);
      if (whole.empty()) continue;
      for (int64_t columns : kColumns) {
        const std::vector<float> part = product(machine, format, columns, weights);
        if (!is_right(part, weights, columns)) {
          std::fprintf(stderr, "wrong product: %s weights in %s, %d columns\n", ggml_type_name(format),
                       ggml_backend_buft_name(layout), static_cast<int>(columns));
          ++wrong;
        } else if ((format == GGML_TYPE_Q8_0 || format == GGML_TYPE_Q4_1) && columns > 1 &&
                   std::memcmp(part.data(), whole.data(), part.size() * sizeof(float)) != 0) {
          std::fprintf(stderr, "other bits in other company: %s weights in %s, %d columns\n", ggml_type_name(format),
                       ggml_backend_buft_name(layout), static_cast<int>(columns));
          ++depends;
        }
      }
    }
  }
  ggml_backend_free(machine.backend);
  return wrong > 0 ? 1 : depends > 0 ? 2 : 0;
}
