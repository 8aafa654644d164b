// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace ifab::test {

// Everything that the directory of a simulated engine says; engines/simulated.py is the same in Python.
struct SimulatedEngine {
  struct StepFault {
    std::string kind;
    uint64_t step = 1;
    uint32_t count = 0;
  };
  struct RequestFault {
    std::string kind;
    std::string trigger;  // "prompt_token" or "one_in"
    uint32_t value = 0;
    uint32_t count = 0;
  };

  std::string engine_id = "simulated-test";
  uint64_t seed = 1;
  uint32_t vocab_size = 512;
  uint32_t hidden_size = 64;
  uint32_t layers = 4;
  std::vector<int32_t> end_token_ids = {256};
  uint32_t max_input_tokens = 1024;
  uint32_t max_sequence_tokens = 1280;
  uint32_t max_output_tokens = 256;
  uint32_t slots = 16;
  uint32_t step_token_budget = 512;
  bool splits_prompts = true;
  uint32_t kv_block_tokens = 16;  // 0: no cache
  uint32_t kv_pool_blocks = 2048;
  uint32_t longest_step_ms = 10'000;
  uint32_t samples_max = 8;
  bool scoring = true;
  std::string payload_dtype;  // empty: no payload
  uint32_t end_one_in = 0;
  double time_scale = 0;  // 0: virtual time
  uint32_t load_ms = 0;
  uint32_t step_us = 0;
  uint32_t prompt_token_ns = 0;
  uint32_t generated_token_ns = 0;
  uint32_t context_token_ns = 0;
  std::vector<StepFault> step_faults;
  std::vector<RequestFault> request_faults;

  // An engine that generates nothing and gives each prompt's payload.
  static SimulatedEngine mining(uint32_t hidden_size);
};

// Writes contract.json, simulated.json and tokenizer.json.
void write_simulated_directory(const std::filesystem::path& directory, const SimulatedEngine& engine);

// A directory of its own that goes with the object.
class TemporaryDirectory {
 public:
  TemporaryDirectory();
  ~TemporaryDirectory();
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

}  // namespace ifab::test
