// SPDX-License-Identifier: Apache-2.0
#include "bare_loop.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>

namespace ifab::bench {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

[[noreturn]] void fail(const char* what) {
  std::fprintf(stderr, "bare loop: %s\n", what);
  std::exit(1);
}

size_t shared_blocks(const std::vector<int32_t>& a, const std::vector<int32_t>& b) {
  const size_t most = std::min(a.size(), b.size());
  size_t shared = 0;
  while (shared < most && a[shared] == b[shared]) ++shared;
  return shared / llama::kBlockTokens * llama::kBlockTokens;
}

}  // namespace

BareLoop::BareLoop(const llama::Config& config, const std::string& gguf_path) : config_(config) {
  llama_log_set([](ggml_log_level, const char*, void*) {}, nullptr);
  model_ = llama_model_load_from_file(gguf_path.c_str(), llama_model_default_params());
  if (model_ == nullptr) fail("cannot load the model");
  vocab_size_ = llama_vocab_n_tokens(llama_model_get_vocab(model_));
  head_sequence_ = static_cast<llama_seq_id>(config.slots);
  live_.resize(config.slots);

  llama_context_params params = llama_context_default_params();
  params.n_seq_max = config.slots + 1;
  params.n_ctx = (config.sequence_tokens + llama::kCacheGranule - 1) / llama::kCacheGranule * llama::kCacheGranule *
                 params.n_seq_max;
  params.n_batch = params.n_ubatch = std::max(config.step_token_budget, config.sequence_tokens);
  params.n_threads = static_cast<int32_t>(config.threads);
  params.n_threads_batch = static_cast<int32_t>(config.batch_threads);
  params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
  params.kv_unified = false;
  params.no_perf = true;
  context_ = llama_init_from_model(model_, params);
  if (context_ == nullptr) fail("cannot make a context");
  ggml_threadpool_params pool =
      ggml_threadpool_params_default(static_cast<int>(std::max(config.threads, config.batch_threads)));
  pool.poll = 0;
  threads_ = ggml_threadpool_new(&pool);
  llama_attach_threadpool(context_, threads_, threads_);
  memory_ = llama_get_memory(context_);
  batch_ = llama_batch_init(static_cast<int32_t>(params.n_batch), 0, 1);
}

BareLoop::~BareLoop() {
  llama_batch_free(batch_);
  llama_free(context_);
  ggml_threadpool_free(threads_);
  llama_model_free(model_);
}

void BareLoop::add(llama_token token, llama_pos position, llama_seq_id sequence, bool output) {
  const int32_t row = batch_.n_tokens++;
  batch_.token[row] = token;
  batch_.pos[row] = position;
  batch_.n_seq_id[row] = 1;
  batch_.seq_id[row][0] = sequence;
  batch_.logits[row] = output ? 1 : 0;
}

void BareLoop::decode() {
  if (llama_decode(context_, batch_) != 0) fail("a step failed");
  llama_synchronize(context_);
}

llama_token BareLoop::choose(int32_t row) const {
  const float* logits = llama_get_logits_ith(context_, row);
  return static_cast<llama_token>(std::max_element(logits, logits + vocab_size_) - logits);
}

void BareLoop::start(const std::vector<int32_t>& prompt, const std::vector<int32_t>* next, llama_seq_id slot,
                     uint32_t tokens, Result& result) {
  // The last token is computed in any case, for its logits.
  const size_t shared =
      std::min(shared_blocks(head_, prompt), (prompt.size() - 1) / llama::kBlockTokens * llama::kBlockTokens);
  if (shared > 0) {
    llama_memory_seq_cp(memory_, head_sequence_, slot, -1, -1);
    llama_memory_seq_rm(memory_, slot, static_cast<llama_pos>(shared), -1);
  }
  batch_.n_tokens = 0;
  for (size_t i = shared; i < prompt.size(); ++i) {
    add(prompt[i], static_cast<llama_pos>(i), slot, i + 1 == prompt.size());
  }
  decode();
  result.prompt_tokens_computed += prompt.size() - shared;
  live_[static_cast<size_t>(slot)] = {static_cast<llama_pos>(prompt.size()), choose(batch_.n_tokens - 1), tokens - 1};
  const size_t keep = next != nullptr ? shared_blocks(prompt, *next) : 0;
  if (keep > 0 && keep != shared_blocks(head_, *next)) {
    llama_memory_seq_cp(memory_, slot, head_sequence_, -1, -1);
    llama_memory_seq_rm(memory_, head_sequence_, static_cast<llama_pos>(keep), -1);
    head_.assign(prompt.begin(), prompt.begin() + static_cast<ptrdiff_t>(keep));
  }
  if (live_[static_cast<size_t>(slot)].left == 0) llama_memory_seq_rm(memory_, slot, -1, -1);
}

// Sequences are stepped together only where their ids have no gaps.
void BareLoop::close_gaps() {
  size_t end = live_.size();
  for (size_t slot = 0; slot < end; ++slot) {
    if (live_[slot].left > 0) continue;
    while (end > slot && live_[end - 1].left == 0) --end;
    if (end <= slot) return;
    llama_memory_seq_cp(memory_, static_cast<llama_seq_id>(end - 1), static_cast<llama_seq_id>(slot), -1, -1);
    llama_memory_seq_rm(memory_, static_cast<llama_seq_id>(end - 1), -1, -1);
    std::swap(live_[slot], live_[end - 1]);
  }
}

void BareLoop::generate(Result& result) {
  const Clock::time_point begin = Clock::now();
  batch_.n_tokens = 0;
  for (size_t slot = 0; slot < live_.size(); ++slot) {
    if (live_[slot].left > 0) add(live_[slot].token, live_[slot].position, static_cast<llama_seq_id>(slot), true);
  }
  decode();
  for (int32_t row = 0; row < batch_.n_tokens; ++row) {
    Live& live = live_[static_cast<size_t>(batch_.seq_id[row][0])];
    live.token = choose(row);
    ++live.position;
    if (--live.left == 0) llama_memory_seq_rm(memory_, batch_.seq_id[row][0], -1, -1);
  }
  ++result.steps;
  result.generating_s += seconds_since(begin);
}

BareLoop::Result BareLoop::run(const std::vector<std::vector<int32_t>>& prompts, uint32_t tokens) {
  Result result;
  llama_memory_clear(memory_, false);
  head_.clear();
  const Clock::time_point begin = Clock::now();
  size_t next = 0;
  const auto is_live = [](const Live& live) { return live.left > 0; };
  for (;;) {
    for (size_t slot = 0; slot < live_.size() && next < prompts.size(); ++slot) {
      if (live_[slot].left > 0) continue;
      const auto* following = next + 1 < prompts.size() ? &prompts[next + 1] : nullptr;
      start(prompts[next++], following, static_cast<llama_seq_id>(slot), tokens, result);
    }
    if (std::none_of(live_.begin(), live_.end(), is_live)) {
      if (next == prompts.size()) break;
      continue;
    }
    close_gaps();
    generate(result);
  }
  result.wall_s = seconds_since(begin);
  return result;
}

}  // namespace ifab::bench
