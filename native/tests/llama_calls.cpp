// SPDX-License-Identifier: Apache-2.0
// llama_calls GROUPS MEMBERS HEAD TAIL OUT SLOTS RESIDENT BUDGET LATE   what the llama backend calls the runtime with,
// on a workload of shared heads: GROUPS times MEMBERS prompts of HEAD shared tokens and TAIL of their own, OUT tokens
// each. Prompts come as a broker sends them: groups in turn, of each one leader first and the others LATE steps after
// its prompt is computed, leaders while what they have to compute stays below two budgets, and at most half as many
// requests beyond the slots; each says where its head ends. The model is a tiny one; admission, backend and runtime are
// what ships. Writes one JSON object: steps, prompt and generated tokens. IFAB_LLAMA_PROFILE names the file of the
// rest.
#include <array>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "admission.h"
#include "llama_support/driver.h"
#include "llama_support/tiny_engine.h"

namespace ifab::test {
namespace {

struct Workload {
  uint32_t groups, members, head, tail, out, slots, resident, budget, late;

  uint32_t prompts() const { return groups * members; }
  uint32_t group_of(uint64_t id) const { return static_cast<uint32_t>(id) / members; }
  bool leads(uint64_t id) const { return id % members == 0; }
};

class Calls final : public Sink {
 public:
  explicit Calls(const Workload& workload)
      : workload_(workload), driver_(engine_of(workload)), backend_(driver_.backend()), admission_(backend_.facts()) {
    for (uint64_t id = 0; id < workload.prompts(); ++id) {
      std::vector<int32_t> prompt = random_prompt(workload.group_of(id), workload.head, tiny_vocab_size());
      const auto tail = random_prompt(1'000'000 + id, workload.tail, tiny_vocab_size());
      prompt.insert(prompt.end(), tail.begin(), tail.end());
      requests_.push_back(plain_request(std::move(prompt), workload.out));
      requests_.back().id = id;
      requests_.back().head_ends = {workload.head};
    }
    waiting_.resize(requests_.size());
    sent_.resize(requests_.size());
    computed_at_.resize(workload.groups, UINT64_MAX);
  }

  int run() {
    while (ended_ < requests_.size()) {
      send();
      admission_.begin_round();
      for (Decision decision; (decision = admission_.next(backend_, {})).kind != Decision::Kind::kNone;) {
        if (decision.kind == Decision::Kind::kFailed) return fail("a request was refused", decision.status);
      }
      const uint32_t ended_before = ended_;
      const StepReport report = backend_.step(admission_.mode(), *this);
      for (uint32_t ended = ended_ - ended_before; ended > 0; --ended) admission_.left();
      if (std::exchange(context_done_, false)) admission_.context_done();
      admission_.stepped(report);
      ++steps_;
      if (!report.engine_failure.ok()) return fail("the engine failed", report.engine_failure);
      if (!failure_.ok()) return fail("a request failed", failure_);
    }
    std::printf("{\"steps\": %" PRIu64 ", \"prompt_tokens\": %" PRIu64 ", \"generated_tokens\": %" PRIu64 "}\n", steps_,
                prompt_tokens_, generated_tokens_);
    return 0;
  }

  // ---- Sink ----
  void prompt_computed(uint64_t id, uint32_t tokens) override {
    prompt_tokens_ += tokens;
    if (workload_.leads(id)) to_lead_ -= tokens;
  }
  void tokens(uint64_t, uint32_t, std::span<const int32_t> tokens, std::span<const float>) override {
    generated_tokens_ += tokens.size();
  }
  void context_done(uint64_t id, uint32_t, uint32_t, std::span<const float>) override {
    context_done_ = true;
    if (workload_.leads(id)) computed_at_[workload_.group_of(id)] = steps_;
  }
  uint8_t* payload(uint64_t) override { return nullptr; }
  void finished(uint64_t, uint32_t, int32_t, int32_t, std::string_view) override { ++ended_; }
  void failed(uint64_t, const Status& status) override { failure_ = status; }

 private:
  static TinyEngine engine_of(const Workload& workload) {
    TinyEngine engine;
    engine.slots = workload.slots;
    engine.resident_heads = workload.resident;
    engine.max_input_tokens = workload.head + workload.tail;
    engine.max_output_tokens = workload.out;
    engine.sequence_tokens = workload.head + workload.tail + workload.out;
    engine.step_token_budget = workload.budget;
    engine.threads = 2;
    engine.reproducible = false;
    return engine;
  }

  static int fail(const char* what, const Status& status) {
    std::fprintf(stderr, "%s: %s\n", what, status.message().c_str());
    return 1;
  }

  void send() {
    for (uint64_t id = first_unsent_; id < requests_.size() && sent_count_ - ended_ < 3 * workload_.slots / 2; ++id) {
      if (sent_[id] || !may_go(id)) continue;
      sent_[id] = true;
      ++sent_count_;
      if (workload_.leads(id)) to_lead_ += workload_.head + workload_.tail;
      waiting_[id].request = &requests_[id];
      admission_.enqueue(waiting_[id]);
      backend_.note_waiting(requests_[id]);
    }
    while (first_unsent_ < requests_.size() && sent_[first_unsent_]) ++first_unsent_;
  }

  bool may_go(uint64_t id) const {
    if (workload_.leads(id)) return to_lead_ + workload_.head + workload_.tail <= 2 * workload_.budget;
    const uint64_t computed = computed_at_[workload_.group_of(id)];
    return computed != UINT64_MAX && steps_ > computed + workload_.late;
  }

  const Workload workload_;
  Driver driver_;
  Backend& backend_;
  Admission admission_;
  std::vector<Request> requests_;
  std::vector<Waiting> waiting_;
  std::vector<bool> sent_;
  std::vector<uint64_t> computed_at_;  // by group: the step that computed its head
  uint64_t first_unsent_ = 0;
  uint64_t sent_count_ = 0;
  uint64_t to_lead_ = 0;  // prompt tokens that leaders have yet to compute
  uint64_t steps_ = 0;
  uint64_t prompt_tokens_ = 0;
  uint64_t generated_tokens_ = 0;
  uint32_t ended_ = 0;
  bool context_done_ = false;
  Status failure_;
};

}  // namespace
}  // namespace ifab::test

int main(int argc, char** argv) {
  std::array<uint32_t, 9> words{};
  bool good = argc == 10;
  for (size_t i = 0; good && i < words.size(); ++i) {
    char* end = nullptr;
    const unsigned long word = std::strtoul(argv[i + 1], &end, 10);
    good = *argv[i + 1] != '\0' && *end == '\0' && word <= 1'000'000 && (word > 0 || i == 6 || i == 8);
    words[i] = static_cast<uint32_t>(word);
  }
  if (!good) {
    std::fprintf(stderr, "usage: %s GROUPS MEMBERS HEAD TAIL OUT SLOTS RESIDENT BUDGET LATE\n", argv[0]);
    return 2;
  }
  return ifab::test::Calls({words[0], words[1], words[2], words[3], words[4], words[5], words[6], words[7], words[8]})
      .run();
}
