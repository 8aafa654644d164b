// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace ifab::test {

// An engine directory with a real model that is too small to say anything: two layers of pseudo-random Q8_0 weights,
// heads of 64 values as in larger models, and a byte-level vocabulary. It runs the same kernels as a real one in a
// hundredth of the time.
struct TinyEngine {
  std::string layout = "streams";
  uint32_t slots = 8;
  uint32_t resident_heads = 4;
  uint32_t sequence_tokens = 768;
  uint32_t pool_tokens = 0;  // unified only
  uint32_t step_token_budget = 256;
  uint32_t threads = 1;
  bool reproducible = true;
  uint32_t max_input_tokens = 640;
  uint32_t max_output_tokens = 128;
  std::vector<int32_t> payload_layers;  // empty: no payload
  std::string payload_dtype = "float32";
  int32_t broken_token = -1;  // a token whose embedding is no number, so that nothing that reads it is; -1: none
  uint64_t seed = 1;

  // Generates nothing; gives the state of each prompt's last token.
  static TinyEngine mining(std::vector<int32_t> layers);
  static TinyEngine unified(uint32_t pool_tokens);
};

inline constexpr uint32_t kTinyLayers = 2;
inline constexpr uint32_t kTinyHidden = 128;
inline constexpr int32_t kTinyEnd = 2;        // the engine's end token
inline constexpr int32_t kTinyFirstByte = 3;  // the token of byte b is kTinyFirstByte + b
uint32_t tiny_vocab_size();
// Bytes of each token; empty for the special ones.
std::vector<std::string> tiny_pieces();

// Writes contract.json, llama.json, model.gguf and tokenizer.json. Throws std::runtime_error where that fails.
void write_tiny_directory(const std::filesystem::path& directory, const TinyEngine& engine);

}  // namespace ifab::test
