// SPDX-License-Identifier: Apache-2.0
//
// Our own code allocates nothing on the step path once it is warm. What the runtime allocates for itself is not ours:
// the linker puts the functions below between it and the backend, and nothing is counted inside them.
#include <gtest/gtest.h>

#include <cstdlib>
#include <new>

#include "llama.h"
#include "llama_support/driver.h"

namespace {

thread_local bool counting = false;
thread_local uint64_t allocations = 0;

// Nothing is counted while one of these lives.
class Pause {
 public:
  Pause() : before_(counting) { counting = false; }
  ~Pause() { counting = before_; }
  Pause(const Pause&) = delete;
  Pause& operator=(const Pause&) = delete;

 private:
  bool before_;
};

void* allocate(size_t size) {
  if (counting) ++allocations;
  void* memory = std::malloc(size == 0 ? 1 : size);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace

void* operator new(size_t size) {
  return allocate(size);
}
void* operator new[](size_t size) {
  return allocate(size);
}
void operator delete(void* memory) noexcept {
  std::free(memory);
}
void operator delete[](void* memory) noexcept {
  std::free(memory);
}
void operator delete(void* memory, size_t) noexcept {
  std::free(memory);
}
void operator delete[](void* memory, size_t) noexcept {
  std::free(memory);
}

extern "C" {
int32_t __real_llama_decode(llama_context* context, llama_batch batch);
int32_t __wrap_llama_decode(llama_context* context, llama_batch batch);
int32_t __wrap_llama_decode(llama_context* context, llama_batch batch) {
  const Pause pause;
  return __real_llama_decode(context, batch);
}
void __real_llama_memory_seq_cp(llama_memory_t memory, llama_seq_id from, llama_seq_id to, llama_pos p0, llama_pos p1);
void __wrap_llama_memory_seq_cp(llama_memory_t memory, llama_seq_id from, llama_seq_id to, llama_pos p0, llama_pos p1);
void __wrap_llama_memory_seq_cp(llama_memory_t memory, llama_seq_id from, llama_seq_id to, llama_pos p0, llama_pos p1) {
  const Pause pause;
  __real_llama_memory_seq_cp(memory, from, to, p0, p1);
}
bool __real_llama_memory_seq_rm(llama_memory_t memory, llama_seq_id sequence, llama_pos p0, llama_pos p1);
bool __wrap_llama_memory_seq_rm(llama_memory_t memory, llama_seq_id sequence, llama_pos p0, llama_pos p1);
bool __wrap_llama_memory_seq_rm(llama_memory_t memory, llama_seq_id sequence, llama_pos p0, llama_pos p1) {
  const Pause pause;
  return __real_llama_memory_seq_rm(memory, sequence, p0, p1);
}
}

namespace ifab::test {
namespace {

// Counts ends and gives payloads their room, without memory of its own.
class CountingSink final : public Sink {
 public:
  explicit CountingSink(size_t payload_bytes) : payload_(payload_bytes) {}
  void prompt_computed(uint64_t, uint32_t) override {}
  void tokens(uint64_t, uint32_t, std::span<const int32_t> tokens, std::span<const float>) override {
    generated += tokens.size();
  }
  void context_done(uint64_t, uint32_t, uint32_t, std::span<const float>) override {}
  uint8_t* payload(uint64_t) override { return payload_.data(); }
  void finished(uint64_t, uint32_t, int32_t, int32_t, std::string_view) override { ++ended; }
  void failed(uint64_t, const Status& status) override { ADD_FAILURE() << status.message(); }

  uint64_t generated = 0;
  uint64_t ended = 0;

 private:
  std::vector<uint8_t> payload_;
};

// Runs the same requests once to warm up and once counted.
void expect_no_allocation(const TinyEngine& engine, const std::vector<Request>& requests) {
  Driver driver(engine);
  Backend& backend = driver.backend();
  CountingSink sink(backend.facts().payload_bytes);
  uint64_t samples = 0;
  for (const Request& request : requests) samples += request.samples;
  for (const bool counted : {false, true}) {
    sink.ended = sink.generated = 0;
    allocations = 0;
    size_t next = 0;
    for (const Request& request : requests) backend.note_waiting(request);
    while (sink.ended < samples) {
      counting = counted;
      while (next < requests.size() && backend.admit(requests[next]).outcome == AdmitOutcome::kAdmitted) ++next;
      const StepReport report = backend.step(StepMode::kNormal, sink);
      const Room room = backend.room();
      const Need need = backend.need(requests.front());
      counting = false;
      ASSERT_TRUE(report.progressed);
      ASSERT_LE(room.step_tokens, engine.step_token_budget);
      ASSERT_GT(need.slots, 0u);
    }
    EXPECT_EQ(allocations, 0u);
  }
}

std::vector<Request> varied_requests(bool generate) {
  std::vector<Request> requests;
  const auto head = random_prompt(1, 128, tiny_vocab_size());
  for (uint64_t i = 0; i < 24; ++i) {
    std::vector<int32_t> prompt;
    if (generate && i % 2 == 0) prompt = head;
    const auto tail = random_prompt(10 + i, 20 + 4 * i, tiny_vocab_size());
    prompt.insert(prompt.end(), tail.begin(), tail.end());
    Request request = plain_request(std::move(prompt), generate ? static_cast<uint32_t>(4 + i) : 0);
    request.id = i;
    request.want_payload = !generate;
    request.head_ends = {64};
    if (generate) {
      request.samples = i % 5 == 0 ? 2 : 1;
      request.logprobs = i % 3 == 0;
      request.prompt_logprobs = i % 7 == 0;
      request.sampling.temperature = static_cast<float>(i % 3);
      request.sampling.top_p = i % 4 == 0 ? 0.8f : 1.0f;
      request.sampling.frequency_penalty = i % 4 == 1 ? 0.5f : 0.0f;
    }
    requests.push_back(std::move(request));
  }
  return requests;
}

TEST(LlamaAllocation, CountsWhatIsAllocated) {
  counting = true;
  delete new int(3);
  counting = false;
  EXPECT_EQ(allocations, 1u);
  allocations = 0;
}

TEST(LlamaAllocation, StepsOfStreamsAllocateNothing) {
  expect_no_allocation({}, varied_requests(true));
}

TEST(LlamaAllocation, StepsOfAUnifiedPoolAllocateNothing) {
  expect_no_allocation(TinyEngine::unified(4096), varied_requests(true));
}

TEST(LlamaAllocation, ExtractionAllocatesNothing) {
  expect_no_allocation(TinyEngine::mining({-1, 0}), varied_requests(false));
}

}  // namespace
}  // namespace ifab::test
