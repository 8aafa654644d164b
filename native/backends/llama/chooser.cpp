// SPDX-License-Identifier: Apache-2.0
#include "chooser.h"

#include <algorithm>

namespace ifab::llama {
namespace {

constexpr size_t kRowsAtOnce = 4;

}  // namespace

Chooser::Chooser(uint32_t vocab_size, uint32_t threads, uint32_t slots) {
  const size_t useful = std::clamp<size_t>(slots / kRowsOfAThread, 1, threads);
  samplers_.reserve(useful);
  for (size_t i = 0; i < useful; ++i) samplers_.emplace_back(vocab_size);
  helpers_.reserve(useful - 1);
  try {
    for (size_t i = 1; i < useful; ++i) helpers_.emplace_back([this, i] { help(samplers_[i]); });
  } catch (...) {  // no thread more to be had: those that run must not outlive what they use
    end_helpers();
    throw;
  }
}

Chooser::~Chooser() {
  end_helpers();
}

void Chooser::end_helpers() {
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
  }
  round_begins_.notify_all();
  for (std::thread& helper : helpers_) helper.join();
}

void Chooser::choose(std::span<Row> rows) {
  if (helpers_.empty() || rows.size() < 2 * kRowsOfAThread) {
    for (Row& row : rows) row.choice = choose(row.logits, row.draw);
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    rows_ = rows;
    taken_.store(0, std::memory_order_relaxed);
    working_ = helpers_.size();
    ++round_;
  }
  round_begins_.notify_all();
  take_rows(samplers_.front());
  {
    std::unique_lock lock(mutex_);
    round_ends_.wait(lock, [this] { return working_ == 0; });
  }
  // What a grammar allows is worked out in memory that samples share.
  for (Row& row : rows) {
    if (row.draw.filter != nullptr) row.choice = choose(row.logits, row.draw);
  }
}

void Chooser::help(Sampler& sampler) {
  uint64_t done = 0;
  std::unique_lock lock(mutex_);
  for (;;) {
    round_begins_.wait(lock, [&] { return ending_ || round_ != done; });
    if (ending_) return;
    done = round_;
    lock.unlock();
    take_rows(sampler);
    lock.lock();
    if (--working_ == 0) round_ends_.notify_one();
  }
}

void Chooser::take_rows(Sampler& sampler) {
  for (;;) {
    const size_t first = taken_.fetch_add(kRowsAtOnce, std::memory_order_relaxed);
    if (first >= rows_.size()) return;
    for (Row& row : rows_.subspan(first, std::min(kRowsAtOnce, rows_.size() - first))) {
      if (row.draw.filter == nullptr) row.choice = sampler.choose(row.logits, row.draw);
    }
  }
}

}  // namespace ifab::llama
