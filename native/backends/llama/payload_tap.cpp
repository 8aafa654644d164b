// SPDX-License-Identifier: Apache-2.0
#include "payload_tap.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "ggml-backend.h"
#include "ifab/engine.h"

namespace ifab::llama {

PayloadTap::PayloadTap(const Config::Payload& payload) : dtype_(payload.dtype) {
  for (const int32_t layer : payload.layers) {
    layers_.push_back({layer < 0 ? "result_norm" : "l_out-" + std::to_string(layer), false});
  }
}

uint32_t PayloadTap::value_bytes() const {
  return dtype_ == IFAB_DTYPE_FLOAT32 ? 4 : 2;
}

void PayloadTap::want(uint32_t row, uint32_t rows, uint32_t output_row, bool logits_wanted, std::span<uint8_t> out) {
  armed_ = true;
  row_ = row;
  rows_ = rows;
  output_row_ = output_row;
  logits_wanted_ = logits_wanted;
  out_ = out;
  failure_.clear();
  state_.resize(hidden_size_);
  for (Layer& layer : layers_) layer.seen = false;
}

std::string PayloadTap::take_failure() {
  armed_ = false;
  for (const Layer& layer : layers_) {
    if (!layer.seen && failure_.empty()) failure_ = "the model computes no " + layer.tensor;
  }
  return std::move(failure_);
}

bool PayloadTap::on_tensor(ggml_tensor* tensor, bool ask, void* data) {
  auto* tap = static_cast<PayloadTap*>(data);
  return ask ? tap->wants(tensor) : tap->take(tensor);
}

bool PayloadTap::wants(const ggml_tensor* tensor) const {
  // Asked for every node of the graph: most names differ in their first letter.
  if (!armed_ || (tensor->name[0] != 'r' && tensor->name[0] != 'l')) return false;
  return std::any_of(layers_.begin(), layers_.end(),
                     [&](const Layer& layer) { return !layer.seen && layer.tensor == tensor->name; });
}

// Returns whether the rest of the graph is wanted.
bool PayloadTap::take(const ggml_tensor* tensor) {
  for (size_t i = 0; i < layers_.size(); ++i) {
    if (layers_[i].tensor != tensor->name) continue;
    layers_[i].seen = true;
    // The last block computes only the rows that ask for output.
    const int64_t row = tensor->ne[1] == static_cast<int64_t>(rows_) ? row_ : output_row_;
    if (tensor->type != GGML_TYPE_F32 || tensor->ne[0] != static_cast<int64_t>(hidden_size_) || row >= tensor->ne[1]) {
      failure_ = "the tensor " + layers_[i].tensor + " has another form than a hidden state";
      continue;
    }
    ggml_backend_tensor_get(tensor, state_.data(), static_cast<size_t>(row) * tensor->nb[1],
                            state_.size() * sizeof(float));
    if (!std::all_of(state_.begin(), state_.end(), [](float value) { return std::isfinite(value); })) {
      failure_ = "the hidden state " + layers_[i].tensor + " has a value that is not finite";
    }
    const size_t bytes = size_t{hidden_size_} * value_bytes();
    store(state_, out_.subspan(i * bytes, bytes));
  }
  return logits_wanted_ || std::any_of(layers_.begin(), layers_.end(), [](const Layer& layer) { return !layer.seen; });
}

void PayloadTap::store(std::span<const float> state, std::span<uint8_t> out) const {
  const auto count = static_cast<int64_t>(state.size());
  if (dtype_ == IFAB_DTYPE_FLOAT32) {
    std::memcpy(out.data(), state.data(), out.size());
  } else if (dtype_ == IFAB_DTYPE_FLOAT16) {
    ggml_fp32_to_fp16_row(state.data(), reinterpret_cast<ggml_fp16_t*>(out.data()), count);
  } else {
    ggml_fp32_to_bf16_row(state.data(), reinterpret_cast<ggml_bf16_t*>(out.data()), count);
  }
}

}  // namespace ifab::llama
