// SPDX-License-Identifier: Apache-2.0
// What the library allocates: nothing on the step path once it is warm, and nothing for a payload in flight but its
// place in the ring that was there from the start.
#include <gtest/gtest.h>
#include <malloc.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

#include "client.h"
#include "engine.h"
#include "simulated_directory.h"

namespace {

// Threads that may allocate: those of the callers. All others are the library's.
thread_local bool is_caller = false;
std::atomic<uint64_t> owner_allocations{0};
std::atomic<int64_t> bytes_held{0};

void* allocate(size_t size, size_t alignment) {
  void* memory = alignment <= alignof(std::max_align_t)
                     ? std::malloc(size)
                     : std::aligned_alloc(alignment, (size + alignment - 1) / alignment * alignment);
  if (memory == nullptr) throw std::bad_alloc();
  if (!is_caller) owner_allocations.fetch_add(1, std::memory_order_relaxed);
  bytes_held.fetch_add(static_cast<int64_t>(malloc_usable_size(memory)), std::memory_order_relaxed);
  return memory;
}

void release(void* memory) {
  if (memory == nullptr) return;
  bytes_held.fetch_sub(static_cast<int64_t>(malloc_usable_size(memory)), std::memory_order_relaxed);
  std::free(memory);
}

}  // namespace

void* operator new(size_t size) {
  return allocate(size, 1);
}
void* operator new[](size_t size) {
  return allocate(size, 1);
}
void* operator new(size_t size, std::align_val_t alignment) {
  return allocate(size, static_cast<size_t>(alignment));
}
void operator delete(void* memory) noexcept {
  release(memory);
}
void operator delete[](void* memory) noexcept {
  release(memory);
}
void operator delete(void* memory, size_t) noexcept {
  release(memory);
}
void operator delete[](void* memory, size_t) noexcept {
  release(memory);
}
void operator delete(void* memory, std::align_val_t) noexcept {
  release(memory);
}
void operator delete(void* memory, size_t, std::align_val_t) noexcept {
  release(memory);
}

namespace ifab::test {
namespace {

// The engine without the C interface in between, so that its code is in this program and its allocations are seen.
class Loaded {
 public:
  explicit Loaded(const SimulatedEngine& simulated) : payload_(1 << 20) {
    write_simulated_directory(directory_.path(), simulated);
    const Status status = Engine::create(directory_.path().string(), engine_);
    EXPECT_TRUE(status.ok()) << status.message();
  }

  void submit(const std::vector<Ask>& asks) {
    std::vector<ifab_request_t> requests;
    for (const Ask& ask : asks) requests.push_back(ask.request());
    std::vector<ifab_submit_result_t> results(asks.size());
    engine_->submit(requests, results, {});
    for (const ifab_submit_result_t& result : results) EXPECT_EQ(result.status, IFAB_OK);
  }

  // Returns the number of ends.
  uint32_t poll() {
    uint8_t* aligned = payload_.data() + (64 - reinterpret_cast<uintptr_t>(payload_.data()) % 64);
    const ifab_poll_buffers_t buffers{
        sizeof buffers, events_.data(), tokens_.data(), logprobs_.data(), aligned, text_.data(), 64,
        8192,           1 << 19,        1 << 16};
    uint32_t count = 0;
    EXPECT_TRUE(engine_->poll(buffers, 100, count).ok());
    uint32_t ends = 0;
    for (uint32_t i = 0; i < count; ++i) ends += events_[i].kind == IFAB_EVENT_FINISHED ? 1 : 0;
    return ends;
  }

  Engine& engine() { return *engine_; }

 private:
  TemporaryDirectory directory_;
  std::unique_ptr<Engine> engine_;
  std::array<ifab_event_t, 64> events_{};
  std::vector<int32_t> tokens_ = std::vector<int32_t>(8192);
  std::vector<float> logprobs_ = std::vector<float>(8192);
  std::vector<uint8_t> payload_;
  std::vector<char> text_ = std::vector<char>(1 << 16);
};

// Requests of every kind: shared heads, samples, scores, priorities, and some that are cancelled on their way.
void work_through(Loaded& loaded, uint64_t first_id, uint64_t requests) {
  std::vector<Ask> asks;
  uint64_t samples = 0;
  for (uint64_t id = first_id; id < first_id + requests; ++id) {
    asks.push_back({.id = id,
                    .prompt = prompt_of(1 + id % 300, id / 4),
                    .max_tokens = static_cast<uint32_t>(1 + id % 20),
                    .samples = static_cast<uint32_t>(1 + id % 4),
                    .flags = id % 7 == 0 ? IFAB_REQUEST_LOGPROBS | IFAB_REQUEST_PROMPT_LOGPROBS : 0,
                    .priority = static_cast<int32_t>(id % 5)});
    samples += 1 + id % 4;
  }
  loaded.submit(asks);
  uint64_t ends = 0;
  for (uint64_t id = first_id; ends < samples; ++id) {
    ends += loaded.poll();
    if (id % 3 == 0) loaded.engine().cancel(std::array<uint64_t, 1>{id});
  }
}

TEST(Allocations, NoneOnTheStepPathOnceItIsWarm) {
  is_caller = true;
  SimulatedEngine engine;
  engine.end_one_in = 30;
  engine.kv_pool_blocks = 200;  // blocks are pushed out and reused
  engine.payload_dtype = "float16";
  engine.step_faults = {{"stall", 400, 0}, {"stall", 500, 5}};
  Loaded loaded(engine);
  work_through(loaded, 0, 500);
  EXPECT_GT(owner_allocations.exchange(0), 0u);  // loading does
  work_through(loaded, 1000, 3000);
  EXPECT_EQ(owner_allocations.load(), 0u);
  EXPECT_GT(loaded.engine().stats().requests_cancelled, 0u);
  EXPECT_GT(loaded.engine().stats().progress_only_steps, 0u);
}

TEST(Allocations, TwoThousandPayloadsInFlightTakeTheirPlacesInTheRing) {
  is_caller = true;
  constexpr uint32_t kSequences = 2000;
  constexpr uint32_t kPayloadBytes = 4096 * 2;
  SimulatedEngine engine = SimulatedEngine::mining(4096);
  engine.slots = kSequences;
  engine.step_token_budget = kSequences * 128;
  engine.time_scale = 1;
  engine.step_us = 300'000;  // so that all of them are in flight together
  const int64_t before = bytes_held.load();
  Loaded loaded(engine);
  const int64_t loaded_bytes = bytes_held.load() - before;
  EXPECT_GE(loaded_bytes, int64_t{2} * kSequences * kPayloadBytes);               // the ring
  EXPECT_LT(loaded_bytes, int64_t{2} * kSequences * kPayloadBytes + (32 << 20));  // and what else is there at load
  std::vector<Ask> asks;
  for (uint64_t id = 0; id < kSequences; ++id) {
    asks.push_back({.id = id, .prompt = prompt_of(128, id), .max_tokens = 0});
  }
  loaded.submit(asks);
  asks.clear();
  asks.shrink_to_fit();
  while (loaded.engine().stats().payload_slots_used < kSequences) {
  }
  // The prompts themselves, 512 bytes each, and what is known of a request; nothing of the size of a payload.
  EXPECT_LT(bytes_held.load() - before - loaded_bytes, int64_t{kSequences} * 1536);
  uint32_t ends = 0;
  while (ends < kSequences) ends += loaded.poll();
  EXPECT_EQ(loaded.engine().stats().payload_bytes, uint64_t{kSequences} * kPayloadBytes);
  EXPECT_LT(bytes_held.load() - before - loaded_bytes, int64_t{1} << 20);
}

}  // namespace
}  // namespace ifab::test
