// SPDX-License-Identifier: Apache-2.0
// All callers at once: submit, cancel, poll, stats and destroy from five threads. Worth most under ThreadSanitizer.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <set>
#include <thread>
#include <vector>

#include "client.h"
#include "ifab/engine.h"
#include "simulated_directory.h"

namespace ifab::test {
namespace {

constexpr uint64_t kRequests = 3000;

// The ends that a poll brings, as ids; a request with several samples comes once a sample.
std::vector<uint64_t> poll_ends(ifab_engine_t* engine, int32_t timeout_ms) {
  static thread_local std::vector<ifab_event_t> events(128);
  static thread_local std::vector<int32_t> tokens(4096);
  static thread_local std::vector<float> logprobs(4096);
  static thread_local std::array<char, 8192> text{};
  ifab_poll_buffers_t buffers{};
  buffers.struct_size = sizeof buffers;
  buffers.events = events.data();
  buffers.tokens = tokens.data();
  buffers.logprobs = logprobs.data();
  buffers.text = text.data();
  buffers.events_cap = static_cast<uint32_t>(events.size());
  buffers.tokens_cap = static_cast<uint32_t>(tokens.size());
  buffers.text_cap = static_cast<uint32_t>(text.size());
  uint32_t count = 0;
  EXPECT_EQ(ifab_engine_poll(engine, &buffers, &count, timeout_ms, nullptr, 0), IFAB_OK);
  std::vector<uint64_t> ends;
  for (uint32_t i = 0; i < count; ++i) {
    if (events[i].kind == IFAB_EVENT_FINISHED || events[i].kind == IFAB_EVENT_FAILED) {
      ends.push_back(events[i].request_id);
    }
  }
  return ends;
}

void submit_all(ifab_engine_t* engine, uint64_t requests) {
  for (uint64_t id = 0; id < requests; ++id) {
    const Ask ask{
        .id = id, .prompt = prompt_of(1 + id % 60, id / 16), .max_tokens = static_cast<uint32_t>(1 + id % 20)};
    const ifab_request_t request = ask.request();
    ifab_submit_result_t result{};
    EXPECT_EQ(ifab_engine_submit(engine, &request, 1, &result, nullptr, 0), IFAB_OK);
    EXPECT_EQ(result.status, IFAB_OK);
  }
}

TEST(Threads, FiveAtOnceLoseNothing) {
  SimulatedEngine engine;
  engine.step_faults = {{"stall", 50, 0}, {"stall", 200, 3}};
  Client client(engine);
  ifab_engine_t* handle = client.engine();
  std::atomic<bool> done{false};
  std::atomic<uint64_t> seen{0};
  std::vector<std::thread> threads;
  threads.emplace_back(submit_all, handle, kRequests);
  threads.emplace_back([&] {
    std::multiset<uint64_t> ends;
    while (ends.size() < kRequests) {
      for (const uint64_t id : poll_ends(handle, 100)) ends.insert(id);
      seen.store(ends.size(), std::memory_order_relaxed);
    }
    for (uint64_t id = 0; id < kRequests; ++id) EXPECT_EQ(ends.count(id), 1u) << id;
    done.store(true);
  });
  threads.emplace_back([&] {
    for (uint64_t id = 0; !done.load(); id = (id + 7) % kRequests) {
      EXPECT_EQ(ifab_engine_cancel(handle, &id, 1, nullptr), IFAB_OK);
    }
  });
  threads.emplace_back([&] {
    uint64_t tick = 0;
    while (!done.load()) {
      const ifab_stats_t stats = client.stats();
      EXPECT_GE(stats.progress_tick, tick);
      EXPECT_LE(stats.queued, kRequests);
      EXPECT_GE(stats.requests_submitted, stats.requests_finished + stats.requests_cancelled);
      tick = stats.progress_tick;
    }
  });
  threads.emplace_back([&] {
    while (!done.load()) {
      ifab_engine_wake(handle);
      EXPECT_GT(client.describe().size(), 100u);
    }
  });
  for (std::thread& thread : threads) thread.join();
  const ifab_stats_t stats = client.stats();
  EXPECT_EQ(stats.requests_finished + stats.requests_cancelled, kRequests);
  EXPECT_EQ(stats.requests_failed, 0u);
}

TEST(Threads, DestroyMeetsWhateverIsInFlight) {
  const TemporaryDirectory directory;
  SimulatedEngine engine;
  engine.time_scale = 1;
  engine.step_us = 200;
  write_simulated_directory(directory.path(), engine);
  for (int round = 0; round < 20; ++round) {
    ifab_engine_t* handle = nullptr;
    ASSERT_EQ(ifab_engine_create(directory.path().c_str(), &handle, nullptr, 0), IFAB_OK);
    std::vector<std::thread> threads;
    threads.emplace_back(submit_all, handle, 200);
    threads.emplace_back([&] {
      for (int i = 0; i < round; ++i) poll_ends(handle, 1);
    });
    threads.emplace_back([&] {
      for (uint64_t id = 0; id < 200; id += 3) EXPECT_EQ(ifab_engine_cancel(handle, &id, 1, nullptr), IFAB_OK);
    });
    for (std::thread& thread : threads) thread.join();
    std::thread([&] { ifab_engine_destroy(&handle); }).join();  // not the thread that created it
    EXPECT_EQ(handle, nullptr);
  }
}

TEST(Threads, OnlyOnePollsAtATime) {
  Client client({});
  std::atomic<bool> stop{false};
  std::atomic<int> refused{0};
  const auto poll_on = [&] {
    std::array<ifab_event_t, 1> events{};
    std::vector<int32_t> tokens(1024);
    std::vector<float> logprobs(1024);
    std::array<char, 512> text{};
    ifab_poll_buffers_t buffers{
        sizeof buffers, events.data(), tokens.data(), logprobs.data(), nullptr, text.data(), 1, 1024, 0, 512};
    while (!stop.load()) {
      uint32_t count = 0;
      const ifab_status_t status = ifab_engine_poll(client.engine(), &buffers, &count, 20, nullptr, 0);
      if (status == IFAB_FAILED_PRECONDITION && refused.fetch_add(1) > 10) stop.store(true);
    }
  };
  std::thread first(poll_on);
  std::thread second(poll_on);
  first.join();
  second.join();
  EXPECT_GT(refused.load(), 10);
}

}  // namespace
}  // namespace ifab::test
