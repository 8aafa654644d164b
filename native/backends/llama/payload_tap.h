// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "config.h"
#include "ggml.h"

namespace ifab::llama {

// Takes hidden states out of the graph while it is computed. Asking the runtime for embeddings would make it compute
// the output of every token; this looks at the few rows that a payload consists of and copies those.
//
// A payload is the chosen layers of one token, in the configured order: layers() times hidden_size() values of the
// configured format. Layer -1 is the state after the final norm, before the output head; layer n the output of block n.
class PayloadTap {
 public:
  explicit PayloadTap(const Config::Payload& payload);

  // Called once the model is loaded.
  void set_hidden_size(uint32_t hidden_size) { hidden_size_ = hidden_size; }
  uint32_t payload_bytes() const { return static_cast<uint32_t>(layers_.size()) * hidden_size_ * value_bytes(); }

  // The next decode() fills `out` (payload_bytes() of it) with the state of one row: `row` is its number in the batch
  // of `rows` rows, `output_row` its number among those that ask for output. Unless `logits_wanted`, the graph is not
  // computed further than the state.
  void want(uint32_t row, uint32_t rows, uint32_t output_row, bool logits_wanted, std::span<uint8_t> out);
  // Takes back a wish whose decode() did not take place.
  void forget() { armed_ = false; }
  // Ends the wish of the last decode(). Empty where the payload is filled; else why it is not.
  std::string take_failure();

  // For the runtime: `data` is the tap.
  static bool on_tensor(ggml_tensor* tensor, bool ask, void* data);

 private:
  struct Layer {
    std::string tensor;
    bool seen = false;
  };

  uint32_t value_bytes() const;
  bool wants(const ggml_tensor* tensor) const;
  bool take(const ggml_tensor* tensor);
  void store(std::span<const float> state, std::span<uint8_t> out) const;

  std::vector<Layer> layers_;
  int32_t dtype_;
  uint32_t hidden_size_ = 0;
  std::vector<float> state_;

  bool armed_ = false;
  uint32_t row_ = 0;
  uint32_t rows_ = 0;
  uint32_t output_row_ = 0;
  bool logits_wanted_ = true;
  std::span<uint8_t> out_;
  std::string failure_;
};

}  // namespace ifab::llama
