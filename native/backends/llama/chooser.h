// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "sampler.h"

namespace ifab::llama {

// Chooses the tokens of all rows of a step. Where a card computes hundreds of rows in some milliseconds, one thread
// that reads all their logits would be a tenth of the step, so that many rows are shared out among several.
//
// A row's choice depends on nothing but the row, so it is the same on any number of threads. One caller; allocates
// nothing after construction.
class Chooser {
 public:
  struct Row {
    std::span<const float> logits;
    Draw draw;
    Choice choice;
  };

  // Rows that are worth a thread of their own: fewer take less time than waking it.
  static constexpr size_t kRowsOfAThread = 16;

  // `threads` is the most that are used, the caller's included; an engine of few slots starts none.
  Chooser(uint32_t vocab_size, uint32_t threads, uint32_t slots);
  ~Chooser();
  Chooser(const Chooser&) = delete;
  Chooser& operator=(const Chooser&) = delete;

  Choice choose(std::span<const float> logits, const Draw& draw) { return samplers_.front().choose(logits, draw); }
  // Fills in every row's choice.
  void choose(std::span<Row> rows);

 private:
  void end_helpers();
  void help(Sampler& sampler);
  void take_rows(Sampler& sampler);

  std::vector<Sampler> samplers_;  // the caller's first
  std::vector<std::thread> helpers_;
  std::mutex mutex_;
  std::condition_variable round_begins_;
  std::condition_variable round_ends_;
  // Under the mutex: rounds begun, helpers that still work on the last one, whether all are to end.
  uint64_t round_ = 0;
  size_t working_ = 0;
  bool ending_ = false;
  std::span<Row> rows_;           // of the round; written while nobody works
  std::atomic<size_t> taken_{0};  // of them
};

}  // namespace ifab::llama
