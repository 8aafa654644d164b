// SPDX-License-Identifier: Apache-2.0
//
//   bench_native ENGINE_DIR [SEQUENCES [TOKENS [RUNS]]]      (16 64 7)
//
// What our library adds to a step of llama.cpp: SEQUENCES prompts of 64 tokens generate TOKENS tokens each, through the
// C interface and through the bare loop, in turns; the time from the last computed prompt to the last token, by the
// number of steps. Writes one JSON object: sequences, tokens, bare_step_us and library_step_us (medians), overhead (the
// median over the runs of the one over the other, minus 1), and each run's in overhead_runs.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "bare_loop.h"
#include "engine_files.h"
#include "ifab/engine.h"

namespace {

using Clock = std::chrono::steady_clock;
using Prompts = std::vector<std::vector<int32_t>>;

constexpr uint32_t kEvents = 1024;
constexpr uint32_t kTokens = 65'536;

[[noreturn]] void fail(const char* what, const char* why) {
  std::fprintf(stderr, "bench_native: %s: %s\n", what, why);
  std::exit(1);
}

class Library {
 public:
  explicit Library(const std::string& directory) {
    if (ifab_engine_create(directory.c_str(), &engine_, error_, sizeof error_) != IFAB_OK) fail("load", error_);
    buffers_.struct_size = sizeof buffers_;
    buffers_.events = events_.data();
    buffers_.tokens = tokens_.data();
    buffers_.logprobs = logprobs_.data();
    buffers_.text = text_.data();
    buffers_.events_cap = kEvents;
    buffers_.tokens_cap = kTokens;
    buffers_.text_cap = static_cast<uint32_t>(text_.size());
  }
  ~Library() { ifab_engine_destroy(&engine_); }
  Library(const Library&) = delete;
  Library& operator=(const Library&) = delete;

  // Microseconds a step.
  double run(const Prompts& prompts, uint32_t tokens) {
    std::vector<ifab_request_t> requests(prompts.size());
    for (size_t i = 0; i < prompts.size(); ++i) {
      ifab_request_t& request = requests[i];
      request = {};
      request.id = i;
      request.token_ids = prompts[i].data();
      request.token_count = static_cast<uint32_t>(prompts[i].size());
      request.max_tokens = tokens;
      request.samples = 1;
      request.flags = IFAB_REQUEST_IGNORE_END;
      request.sampling.top_p = 1;
      request.sampling.repetition_penalty = 1;
    }
    std::vector<ifab_submit_result_t> results(prompts.size());
    if (ifab_engine_submit(engine_, requests.data(), static_cast<uint32_t>(requests.size()), results.data(), nullptr,
                           0) != IFAB_OK ||
        std::any_of(results.begin(), results.end(), [](const auto& result) { return result.status != IFAB_OK; })) {
      fail("submit", "a request was refused");
    }
    size_t contexts = 0;
    size_t ended = 0;
    Clock::time_point computed;
    while (ended < prompts.size()) {
      uint32_t count = 0;
      if (ifab_engine_poll(engine_, &buffers_, &count, 1000, error_, sizeof error_) != IFAB_OK) fail("poll", error_);
      for (uint32_t i = 0; i < count; ++i) {
        if (events_[i].kind == IFAB_EVENT_FAILED) fail("run", "a request failed");
        contexts += events_[i].kind == IFAB_EVENT_CONTEXT_DONE ? 1 : 0;
        ended += events_[i].kind == IFAB_EVENT_FINISHED ? 1 : 0;
      }
      if (contexts == prompts.size() && computed == Clock::time_point{}) computed = Clock::now();
    }
    // The step that computed the last prompt generated a second token for everybody as well.
    return std::chrono::duration<double, std::micro>(Clock::now() - computed).count() / (tokens - 2);
  }

 private:
  ifab_engine_t* engine_ = nullptr;
  char error_[4096] = "";
  std::vector<ifab_event_t> events_ = std::vector<ifab_event_t>(kEvents);
  std::vector<int32_t> tokens_ = std::vector<int32_t>(kTokens);
  std::vector<float> logprobs_ = std::vector<float>(kTokens);
  std::vector<char> text_ = std::vector<char>(65'536);
  ifab_poll_buffers_t buffers_{};
};

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t half = values.size() / 2;
  return values.size() % 2 == 1 ? values[half] : (values[half - 1] + values[half]) / 2;
}

}  // namespace

int main(int argc, char** argv) {
  const auto number = [&](int index, long otherwise) {
    return argc > index ? std::strtol(argv[index], nullptr, 10) : otherwise;
  };
  const long sequences = number(2, 16);
  const long tokens = number(3, 64);
  const long runs = number(4, 7);
  if (argc < 2 || argc > 5 || sequences < 1 || tokens < 3 || runs < 1) {
    std::fprintf(stderr, "usage: %s ENGINE_DIR [SEQUENCES [TOKENS [RUNS]]]\n", argv[0]);
    return 2;
  }
  const auto engine = ifab::bench::EngineFiles::read(argv[1]);
  if (static_cast<uint32_t>(sequences) > engine.config.slots) fail("sequences", "more than the engine has slots");
  Prompts prompts(static_cast<size_t>(sequences));
  for (size_t i = 0; i < prompts.size(); ++i) {
    for (size_t k = 0; k < 64; ++k)
      prompts[i].push_back(static_cast<int32_t>((i * 131 + k * 17 + 100) % engine.vocab_size));
  }
  ifab::bench::BareLoop bare(engine.config, engine.gguf_path);
  Library library(argv[1]);
  std::vector<double> bare_us, library_us, overhead;
  for (long run = -1; run < runs; ++run) {  // the first one warms up
    const auto result = bare.run(prompts, static_cast<uint32_t>(tokens));
    const double bare_step = result.generating_s * 1e6 / static_cast<double>(result.steps);
    const double library_step = library.run(prompts, static_cast<uint32_t>(tokens));
    if (run < 0) continue;
    bare_us.push_back(bare_step);
    library_us.push_back(library_step);
    overhead.push_back(library_step / bare_step - 1);
  }
  std::printf(
      "{\"sequences\": %ld, \"tokens\": %ld, \"bare_step_us\": %.1f, \"library_step_us\": %.1f, \"overhead\": %.4f, "
      "\"overhead_runs\": [",
      sequences, tokens, median(bare_us), median(library_us), median(overhead));
  for (size_t i = 0; i < overhead.size(); ++i) std::printf("%s%.4f", i > 0 ? ", " : "", overhead[i]);
  std::printf("]}\n");
  return 0;
}
