// SPDX-License-Identifier: Apache-2.0
// llama_admission [REQUESTS [POOL_TOKENS | DIRECTORY]]   what admission is for, on the real runtime: a llama engine
// whose pool holds two of its requests and a half is sent REQUESTS (32) at once, with admission and without, side by
// side. Writes one JSON object for each side, a line: how many ended, in how many steps, how many of them moved
// nothing, and whether the engine stood still in the end. The model is a tiny one, or that of an engine directory with
// a unified cache; the runtime, its pool and our backend are what ships.
#include <algorithm>
#include <chrono>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <vector>

#include "admission.h"
#include "llama_support/driver.h"
#include "llama_support/tiny_engine.h"

namespace ifab::test {
namespace {

constexpr uint32_t kSlots = 8;
// Steps in a row that move nothing, progress-only ones among them, after which nothing is going to.
constexpr uint32_t kStandstill = 64;

// Every request enters as soon as it has a slot.
struct NoAdmission : AdmissionRules {
  static bool blocks_suffice(const Room&, const Need&) { return true; }
  static bool budget_suffices(const EngineFacts&, const Room&, const Need&) { return true; }
};

class Ends final : public Sink {
 public:
  uint32_t finished_now = 0;
  uint32_t failed_now = 0;
  uint32_t contexts_now = 0;

  void prompt_computed(uint64_t, uint32_t) override {}
  void tokens(uint64_t, uint32_t, std::span<const int32_t>, std::span<const float>) override {}
  void context_done(uint64_t, uint32_t, uint32_t, std::span<const float>) override { ++contexts_now; }
  uint8_t* payload(uint64_t) override { return nullptr; }
  void finished(uint64_t, uint32_t, int32_t, int32_t, std::string_view) override { ++finished_now; }
  void failed(uint64_t, const Status&) override { ++failed_now; }
};

struct Outcome {
  uint32_t finished = 0;
  uint32_t failed = 0;
  uint64_t steps = 0;
  uint64_t still_steps = 0;
  uint64_t generated = 0;
  uint32_t most_inside = 0;
  bool stood_still = false;
  double seconds = 0;
};

void print(const char* admission, size_t requests, const Outcome& outcome) {
  std::printf(
      "{\"admission\": \"%s\", \"requests\": %zu, \"finished\": %u, \"failed\": %u, \"most_inside\": %u, "
      "\"steps\": %" PRIu64 ", \"still_steps\": %" PRIu64 ", \"stood_still\": %s, \"generated_tokens\": %" PRIu64
      ", \"seconds\": %.2f}\n",
      admission, requests, outcome.finished, outcome.failed, outcome.most_inside, outcome.steps, outcome.still_steps,
      outcome.stood_still ? "true" : "false", outcome.generated, outcome.seconds);
}

// Three tenths of the pool are read and one is written, so that two requests fit and three do not.
std::vector<Request> requests_for(const EngineFacts& facts, uint64_t count) {
  const uint64_t pool = facts.kv_pool_blocks * facts.kv_block_tokens;
  std::vector<Request> requests;
  for (uint64_t id = 0; id < count; ++id) {
    requests.push_back(
        plain_request(random_prompt(id, pool * 3 / 10, facts.vocab_size), static_cast<uint32_t>(pool / 10)));
    requests.back().id = id;
  }
  return requests;
}

template <class Rules>
void run(const char* name, const std::filesystem::path& directory, uint64_t count) {
  Driver driver(directory);
  Backend& backend = driver.backend();
  const std::vector<Request> requests = requests_for(backend.facts(), count);
  BasicAdmission<Rules> admission(backend.facts());
  std::vector<Waiting> waiting(requests.size());
  for (size_t i = 0; i < requests.size(); ++i) {
    waiting[i].request = &requests[i];
    admission.enqueue(waiting[i]);
    backend.note_waiting(requests[i]);
  }
  Ends sink;
  Outcome outcome;
  const auto start = std::chrono::steady_clock::now();
  for (uint32_t still = 0; outcome.finished + outcome.failed < requests.size() && still < kStandstill;) {
    admission.begin_round();
    for (Decision decision; (decision = admission.next(backend, {})).kind != Decision::Kind::kNone;) {
      outcome.failed += decision.kind == Decision::Kind::kFailed ? 1 : 0;
    }
    outcome.most_inside = std::max(outcome.most_inside, admission.inside());
    const StepReport report = backend.step(admission.mode(), sink);
    for (uint32_t ended = sink.finished_now + sink.failed_now; ended > 0; --ended) admission.left();
    if (sink.contexts_now > 0) admission.context_done();
    admission.stepped(report);
    outcome.finished += sink.finished_now;
    outcome.failed += sink.failed_now;
    sink = {};
    ++outcome.steps;
    outcome.generated += report.generated_tokens;
    outcome.still_steps += report.progressed ? 0 : 1;
    still = report.progressed ? 0 : still + 1;
    outcome.stood_still = still == kStandstill;
    if (!report.engine_failure.ok()) {
      std::fprintf(stderr, "the engine failed: %s\n", report.engine_failure.message().c_str());
      break;
    }
  }
  outcome.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  print(name, count, outcome);
}

}  // namespace
}  // namespace ifab::test

int main(int argc, char** argv) {
  using namespace ifab;
  const unsigned long count = argc > 1 ? std::strtoul(argv[1], nullptr, 10) : 32;
  char* end = nullptr;
  const unsigned long pool = argc > 2 ? std::strtoul(argv[2], &end, 10) : 1024;
  const bool named = end != nullptr && *end != '\0';
  if (argc > 3 || count == 0 || (!named && (pool < 512 || pool > 1280))) {
    std::fprintf(stderr, "usage: %s [REQUESTS [POOL_TOKENS | DIRECTORY]]   (a pool of 512 to 1280 tokens)\n", argv[0]);
    return 2;
  }
  const test::TemporaryDirectory tiny;
  if (!named) {
    test::TinyEngine engine = test::TinyEngine::unified(static_cast<uint32_t>(pool));
    engine.slots = test::kSlots;
    test::write_tiny_directory(tiny.path(), engine);
  }
  const std::filesystem::path directory = named ? std::filesystem::path(argv[2]) : tiny.path();
  test::run<AdmissionRules>("on", directory, count);
  test::run<test::NoAdmission>("off", directory, count);
  return 0;
}
