// SPDX-License-Identifier: Apache-2.0
//
// The runtime, held safely.
//
// libllama answers several wrong arguments by ending the process: more tokens than a batch holds, a partial copy
// between streams, a row without logits, a sequence id out of range. Every call into it is made in session.cpp, and
// none of them is reachable with such an argument: what would be one throws std::logic_error here instead, which is a
// fault of this backend and fails the engine, not the process.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "config.h"
#include "llama.h"
#include "status.h"

namespace ifab::llama {

class PayloadTap;

// A loaded model with one context, its cache and its threads. One thread, but for interrupt().
class Session {
 public:
  enum class Outcome {
    kDone,         // every row is in the cache; flagged rows have logits until the next decode()
    kNoRoom,       // the cache has no room for these rows together; nothing changed
    kInterrupted,  // interrupt() was called
    kFailed,       // the runtime cannot go on
  };

  // Loads the model and makes room for every sequence of the configuration. `tap` receives what the graph computes
  // where it is not null; it outlives the session. IFAB_FAILED_PRECONDITION: no model that this runtime can run, or one
  // that would not be run as configured. IFAB_RESOURCE_EXHAUSTED: the cache cannot be allocated.
  static Status open(const Config& config, const std::string& gguf_path, PayloadTap* tap,
                     std::unique_ptr<Session>& out);
  ~Session();

  uint32_t vocab_size() const { return vocab_size_; }
  uint32_t hidden_size() const { return hidden_size_; }
  uint32_t layers() const { return layers_; }
  // "q8_0", "q4_1", ...: the format that most weights have.
  std::string weights_dtype() const;
  // The bytes that each token stands for; empty for control tokens and others without text.
  std::vector<std::string> token_pieces() const;

  // ---- The batch of the next decode() ----

  void clear_batch();
  // Rows that can still be added.
  uint32_t batch_room() const { return capacity_ - rows(); }
  uint32_t rows() const { return static_cast<uint32_t>(batch_.n_tokens); }
  // Adds a row: the token at the next position of the sequence. Returns the row's number.
  uint32_t add_row(int32_t sequence, int32_t token, uint32_t position, bool output);
  // Rows that ask for output, and how many may.
  uint32_t outputs() const { return outputs_; }
  uint32_t most_outputs() const { return most_outputs_; }
  // Sequences that the batch has rows of, and how many parts the runtime computes it in, one after the other, each at
  // the price of reading all weights: between streams a part takes sequences of consecutive ids, in the order of their
  // rows, and as many rows of each as the one with the fewest has. Copies between streams are made in the next
  // decode().
  struct Shape {
    uint32_t sequences = 0;
    uint32_t reads = 0;
    uint32_t copies = 0;
  };
  Shape shape();

  Outcome decode();

  // Logits of a row that asked for output in the last decode(), vocab_size() of them.
  std::span<const float> logits(uint32_t row) const;

  // ---- The cache ----

  // Tokens that a sequence holds.
  uint32_t length(int32_t sequence) const;
  // Makes `to` hold the first `tokens` tokens of `from`, and nothing else. Between streams this copies their memory.
  void copy(int32_t from, int32_t to, uint32_t tokens);
  // Keeps the first `tokens` tokens.
  void trim(int32_t sequence, uint32_t tokens);
  void drop(int32_t sequence) { trim(sequence, 0); }

  // Makes a decode() that runs, and every later one, end early. Any thread.
  void interrupt() noexcept { interrupted_.store(true, std::memory_order_relaxed); }

 private:
  Session() = default;
  const llama_vocab* vocab() const;
  Status make_context(const Config& config, PayloadTap* tap);
  void check_sequence(int32_t sequence) const;

  struct FreeModel {
    void operator()(llama_model* model) const { llama_model_free(model); }
  };
  struct FreeContext {
    void operator()(llama_context* context) const { llama_free(context); }
  };
  struct FreeThreads {
    void operator()(ggml_threadpool* threads) const { ggml_threadpool_free(threads); }
  };

  std::unique_ptr<llama_model, FreeModel> model_;
  std::unique_ptr<ggml_threadpool, FreeThreads> threads_;  // outlive the context that uses them
  std::unique_ptr<ggml_threadpool, FreeThreads> batch_threads_;
  std::unique_ptr<llama_context, FreeContext> context_;
  llama_memory_t memory_ = nullptr;
  llama_batch batch_{};
  std::atomic<bool> interrupted_{false};
  bool streams_ = true;
  uint32_t vocab_size_ = 0;
  uint32_t hidden_size_ = 0;
  uint32_t layers_ = 0;
  uint32_t sequences_ = 0;
  uint32_t capacity_ = 0;
  uint32_t most_outputs_ = 0;
  uint32_t outputs_ = 0;                                 // flagged rows of the batch
  uint32_t copies_ = 0;                                  // since the last decode()
  std::vector<std::pair<int32_t, uint32_t>> rows_left_;  // shape(): sequences of the batch, and their rows
  std::vector<uint8_t> decoded_;                         // per row of the last decode(): whether it has logits
};

}  // namespace ifab::llama
