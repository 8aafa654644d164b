// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "config.h"
#include "llama.h"

namespace ifab::bench {

// llama.cpp stepped directly, in as few lines as continuous batching takes: what our library is measured against. One
// stream a slot and one more that keeps the head of the last prompt; greedy; every prompt generates the same number of
// tokens. Layout, threads and batch are those of an engine's llama.json. Errors end the program.
class BareLoop {
 public:
  struct Result {
    uint64_t prompt_tokens_computed = 0;
    uint64_t steps = 0;  // calls that generated
    double wall_s = 0;
    double generating_s = 0;  // of it, in those calls and in choosing their tokens
  };

  BareLoop(const llama::Config& config, const std::string& gguf_path);
  ~BareLoop();
  BareLoop(const BareLoop&) = delete;
  BareLoop& operator=(const BareLoop&) = delete;

  // Runs the prompts in order, which is best the order of their tokens: each starts from what it shares with the last.
  Result run(const std::vector<std::vector<int32_t>>& prompts, uint32_t tokens);

 private:
  struct Live {
    llama_pos position = 0;
    llama_token token = 0;
    uint32_t left = 0;  // 0: the slot is free
  };

  void add(llama_token token, llama_pos position, llama_seq_id sequence, bool output);
  void decode();
  llama_token choose(int32_t row) const;
  void start(const std::vector<int32_t>& prompt, const std::vector<int32_t>* next, llama_seq_id slot, uint32_t tokens,
             Result& result);
  void generate(Result& result);
  void close_gaps();

  const llama::Config config_;
  llama_model* model_;
  llama_context* context_;
  ggml_threadpool* threads_;
  llama_memory_t memory_;
  llama_batch batch_;
  int32_t vocab_size_;
  llama_seq_id head_sequence_;
  std::vector<int32_t> head_;
  std::vector<Live> live_;
};

}  // namespace ifab::bench
