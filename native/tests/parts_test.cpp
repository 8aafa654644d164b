// SPDX-License-Identifier: Apache-2.0
// The small parts that everything else stands on: maps, rings, payload slots, the event store, checksums, cut texts.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "backend.h"
#include "crc32.h"
#include "detect.h"
#include "directory.h"
#include "doorbell.h"
#include "events.h"
#include "guard.h"
#include "id_map.h"
#include "payload_ring.h"
#include "ring.h"
#include "simulated_directory.h"
#include "stats.h"
#include "text.h"

namespace ifab {
namespace {

TEST(IdMap, HoldsWhatAMapHolds) {
  IdMap<uint32_t> map(64);
  std::unordered_map<uint64_t, uint32_t> model;
  uint64_t state = 1;
  for (uint32_t i = 0; i < 200'000; ++i) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    const uint64_t id = (state >> 40) % 100;  // more ids than fit
    if ((state >> 33) % 2 == 0) {
      const bool inserted = map.insert(id, i);
      ASSERT_EQ(inserted, model.size() < 64 && !model.contains(id));
      if (inserted) model[id] = i;
    } else {
      ASSERT_EQ(map.erase(id), model.erase(id) == 1);
    }
    ASSERT_EQ(map.size(), model.size());
  }
  for (uint64_t id = 0; id < 100; ++id) {
    const uint32_t* found = map.find(id);
    ASSERT_EQ(found != nullptr, model.contains(id));
    if (found == nullptr) continue;
    EXPECT_EQ(*found, model[id]);
  }
  size_t visited = 0;
  map.for_each([&](uint64_t id, uint32_t value) {
    EXPECT_EQ(model.at(id), value);
    ++visited;
  });
  EXPECT_EQ(visited, model.size());
}

TEST(IdMap, TakesAnyId) {
  IdMap<int> map(2);
  EXPECT_TRUE(map.insert(0, 1));
  EXPECT_TRUE(map.insert(UINT64_MAX, 2));
  EXPECT_FALSE(map.insert(5, 3));
  EXPECT_EQ(*map.find(0), 1);
  EXPECT_EQ(*map.find(UINT64_MAX), 2);
}

TEST(Ring, ReadsAcrossItsEnd) {
  Ring<int> ring(5);
  EXPECT_EQ(ring.capacity(), 8u);
  const std::array<int, 5> values = {1, 2, 3, 4, 5};
  ring.write(6, values);
  std::array<int, 5> read{};
  ring.read(6, 5, read.data());
  EXPECT_EQ(read, values);
  EXPECT_EQ(ring.at(8), 3);
}

TEST(PayloadRing, GivesEachSlotToOne) {
  PayloadRing ring(3, 100);
  EXPECT_EQ(ring.available(), 3u);
  const uint32_t first = ring.take();
  const uint32_t second = ring.take();
  EXPECT_NE(first, second);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(ring.data(second)) % 64, 0u);
  EXPECT_GE(ring.data(first) > ring.data(second) ? ring.data(first) - ring.data(second)
                                                 : ring.data(second) - ring.data(first),
            100);
  ring.release(first);
  EXPECT_EQ(ring.used(), 1u);
  EXPECT_EQ(ring.available(), 2u);
  ring.give_back(second);
  EXPECT_EQ(ring.available(), 3u);
  EXPECT_EQ(ring.used(), 0u);
}

TEST(PayloadRing, OfAnEngineWithoutPayloadIsEmpty) {
  PayloadRing ring(8, 0);
  EXPECT_EQ(ring.slots(), 0u);
  EXPECT_EQ(ring.available(), 0u);
}

TEST(Crc32, IsTheOneOfZlib) {
  const std::string check = "123456789";
  EXPECT_EQ(crc32(reinterpret_cast<const uint8_t*>(check.data()), 9), 0xCBF43926u);
  EXPECT_EQ(crc32(nullptr, 0), 0u);
  const std::string fox = "The quick brown fox jumps over the lazy dog";
  EXPECT_EQ(crc32(reinterpret_cast<const uint8_t*>(fox.data()), fox.size()), 0x414FA339u);
}

TEST(Text, IsCutBetweenCharacters) {
  const std::string text = "a\u00e4\u20ac\U0001F600";  // of 1, 2, 3 and 4 bytes
  EXPECT_EQ(cut_text(text, 100), text);
  EXPECT_EQ(cut_text(text, 9), text.substr(0, 6));
  EXPECT_EQ(cut_text(text, 6), text.substr(0, 6));
  EXPECT_EQ(cut_text(text, 5), text.substr(0, 3));
  EXPECT_EQ(cut_text(text, 2), text.substr(0, 1));
  EXPECT_EQ(cut_text(text, 0), "");
}

TEST(Guard, LetsNothingThrough) {
  std::array<char, 16> err{};
  EXPECT_EQ(guard(err.data(), err.size(), []() -> Status { return {IFAB_NOT_FOUND, "gone"}; }), IFAB_NOT_FOUND);
  EXPECT_STREQ(err.data(), "gone");
  EXPECT_EQ(guard(err.data(), err.size(), []() -> Status { throw std::bad_alloc(); }), IFAB_RESOURCE_EXHAUSTED);
  EXPECT_STREQ(err.data(), "out of memory");
  EXPECT_EQ(guard(err.data(), err.size(), []() -> Status { throw std::runtime_error("a text that is too long"); }),
            IFAB_INTERNAL);
  EXPECT_STREQ(err.data(), "a text that is ");
  EXPECT_EQ(guard(nullptr, 0, []() -> Status { throw 7; }), IFAB_INTERNAL);
}

TEST(Stats, PutDurationsAndFillsIntoBuckets) {
  EXPECT_EQ(duration_bucket(0), 0u);
  EXPECT_EQ(duration_bucket(1), 0u);
  EXPECT_EQ(duration_bucket(2), 1u);
  EXPECT_EQ(duration_bucket(3), 1u);
  EXPECT_EQ(duration_bucket(1024), 10u);
  EXPECT_EQ(duration_bucket(UINT64_MAX), 23u);
  EXPECT_EQ(fill_bucket(0, 512), 0u);
  EXPECT_EQ(fill_bucket(256, 512), 12u);
  EXPECT_EQ(fill_bucket(511, 512), 23u);
  EXPECT_EQ(fill_bucket(512, 512), 23u);
}

TEST(Doorbell, NeverLosesARing) {
  Doorbell bell;
  bell.ring();
  EXPECT_TRUE(bell.wait_until(Clock::now() + std::chrono::hours(1)));
  const auto start = Clock::now();
  EXPECT_FALSE(bell.wait_until(start + std::chrono::milliseconds(5)));
  EXPECT_GE(Clock::now(), start + std::chrono::milliseconds(5));
}

class Events : public ::testing::Test {
 protected:
  Events() {
    buffers_.struct_size = sizeof buffers_;
    buffers_.events = events_.data();
    buffers_.tokens = tokens_.data();
    buffers_.logprobs = logprobs_.data();
    buffers_.payload = payload_.data();
    buffers_.text = text_.data();
    buffers_.events_cap = 8;
    buffers_.tokens_cap = 16;
    buffers_.payload_cap = 256;
    buffers_.text_cap = 1024;
  }

  uint32_t poll() { return store_.poll(buffers_, Clock::now()); }
  static ifab_event_t failed(uint64_t id) {
    ifab_event_t event{};
    event.request_id = id;
    event.kind = IFAB_EVENT_FAILED;
    return event;
  }

  Doorbell bell_;
  PayloadRing payloads_{4, 100};
  EventStore store_{{.step_tokens = 8,
                     .step_token_events = 8,
                     .step_others = 4,
                     .event_tokens = 8,
                     .prompt_scores = 16,
                     .payload_bytes = 100},
                    payloads_,
                    bell_};
  std::array<ifab_event_t, 8> events_{};
  std::array<int32_t, 16> tokens_{};
  std::array<float, 16> logprobs_{};
  alignas(64) std::array<uint8_t, 256> payload_{};
  std::array<char, 1024> text_{};
  ifab_poll_buffers_t buffers_{};
};

TEST_F(Events, AreSeenWhenTheyAreCommitted) {
  ASSERT_TRUE(store_.room_for_step());
  const std::array<int32_t, 3> tokens = {5, 6, 7};
  const std::array<float, 3> logprobs = {-1, -2, -3};
  ASSERT_TRUE(store_.push_tokens(9, 2, tokens, logprobs));
  EXPECT_EQ(poll(), 0u);
  store_.commit();
  ASSERT_EQ(poll(), 1u);
  EXPECT_EQ(events_[0].request_id, 9u);
  EXPECT_EQ(events_[0].sample, 2u);
  EXPECT_EQ(events_[0].token_count, 3u);
  EXPECT_EQ(events_[0].has_logprobs, 1u);
  EXPECT_EQ(tokens_[2], 7);
  EXPECT_EQ(logprobs_[1], -2.0F);
  EXPECT_EQ(poll(), 0u);
}

TEST_F(Events, StopBeforeOneThatDoesNotFit) {
  const std::array<int32_t, 7> tokens{};
  for (uint64_t id = 0; id < 3; ++id) {
    ASSERT_TRUE(store_.room_for_step());
    ASSERT_TRUE(store_.push_tokens(id, 0, tokens, {}));
  }
  store_.commit();
  EXPECT_EQ(poll(), 2u);  // 14 of 16 tokens
  EXPECT_EQ(poll(), 1u);
  EXPECT_EQ(events_[0].request_id, 2u);
  EXPECT_EQ(events_[0].token_offset, 0u);
}

TEST_F(Events, RefuseTokensBeyondTheBudgetOfAStep) {
  const std::array<int32_t, 5> tokens{};
  ASSERT_TRUE(store_.room_for_step());
  EXPECT_TRUE(store_.push_tokens(1, 0, tokens, {}));
  EXPECT_FALSE(store_.push_tokens(1, 0, tokens, {}));
  ASSERT_TRUE(store_.room_for_step());
  EXPECT_TRUE(store_.push_tokens(1, 0, tokens, {}));
}

TEST_F(Events, KeepRoomForEveryEndOfAStep) {
  const std::array<int32_t, 1> token{};
  uint32_t steps = 0;
  for (; store_.room_for_step(); ++steps) {
    for (int i = 0; i < 8; ++i) ASSERT_TRUE(store_.push_tokens(1, 0, token, {}));
    for (int i = 0; i < 4; ++i) ASSERT_TRUE(store_.push(failed(1), {}, std::string(2000, 'x')));
    store_.commit();
    ASSERT_LT(steps, 100u);
  }
  EXPECT_GE(steps, 1u);
  EXPECT_EQ(poll(), 8u);
  EXPECT_EQ(store_.pending(), steps * 12 - 8);
}

// Every ring costs the poll a wake of the owner, which finds that it still has to wait.
TEST_F(Events, RingTheOwnerWhenThereIsTheRoomThatItWaitsFor) {
  const std::array<int32_t, 1> token{};
  while (store_.room_for_step()) {
    for (int i = 0; i < 8; ++i) ASSERT_TRUE(store_.push_tokens(1, 0, token, {}));
    for (int i = 0; i < 4; ++i) ASSERT_TRUE(store_.push(failed(1), {}, std::string(2000, 'x')));
    store_.commit();
  }
  buffers_.events_cap = 1;
  uint32_t polls = 0;
  for (bool room = false; !room; ++polls) {
    ASSERT_EQ(poll(), 1u);
    const bool rung = bell_.wait_until(Clock::now());
    room = store_.room_for_step();
    ASSERT_EQ(rung, room);
  }
  EXPECT_GT(polls, 1u);
  ASSERT_EQ(poll(), 1u);
  EXPECT_TRUE(bell_.wait_until(Clock::now()));  // who waits for nothing in the store may wait for a payload's slot
}

TEST_F(Events, CarryTextsAndPayloadsAligned) {
  const uint32_t first = payloads_.take();
  const uint32_t second = payloads_.take();
  std::memset(payloads_.data(first), 1, 100);
  std::memset(payloads_.data(second), 2, 100);
  ASSERT_TRUE(store_.push(failed(1), {}, "why", first));
  ASSERT_TRUE(store_.push(failed(2), {}, "and why", second));
  store_.commit();
  ASSERT_EQ(poll(), 2u);
  EXPECT_EQ(std::string(text_.data() + events_[1].text_offset, events_[1].text_size), "and why");
  EXPECT_EQ(events_[1].payload_offset, 128u);
  EXPECT_EQ(events_[1].payload_size, 100u);
  EXPECT_EQ(payload_[128], 2);
  EXPECT_EQ(events_[1].payload_crc32, crc32(payload_.data() + 128, 100));
  EXPECT_EQ(payloads_.used(), 0u);
}

TEST_F(Events, CountPromptScoresUntilTheyArePolled) {
  const uint64_t all = store_.scores_available();
  EXPECT_GE(all, 16u);
  store_.reserve_scores(10);
  store_.reserve_scores(6);
  EXPECT_EQ(store_.scores_available(), all - 16);
  const std::array<float, 10> scores = {1, 2, 3};
  ifab_event_t event{};
  event.kind = IFAB_EVENT_CONTEXT_DONE;
  ASSERT_TRUE(store_.push(event, scores, {}));
  store_.give_back_scores(6);
  EXPECT_EQ(store_.scores_available(), all - 10);
  store_.commit();
  ASSERT_EQ(poll(), 1u);
  EXPECT_EQ(events_[0].token_count, 10u);
  EXPECT_EQ(logprobs_[2], 3.0F);
  EXPECT_EQ(store_.scores_available(), all);
}

TEST_F(Events, WakeAPollThatWaits) {
  std::thread waker([this] { store_.wake(); });
  EXPECT_EQ(store_.poll(buffers_, Clock::now() + std::chrono::hours(1)), 0u);
  waker.join();
  std::thread publisher([this] {
    EXPECT_TRUE(store_.push(failed(3), {}, {}));
    store_.commit();
  });
  EXPECT_EQ(store_.poll(buffers_, Clock::now() + std::chrono::hours(1)), 1u);
  publisher.join();
}

// A directory of a backend that is not there looks like one of nobody; what would read it is said.
TEST(Detect, SaysWhichBackendTheLibraryIsBuiltWithout) {
  for (const AbsentBackend& absent : absent_backends()) {
    const test::TemporaryDirectory folder;
    std::ofstream(folder.path() / "contract.json") << "{}";
    std::ofstream(folder.path() / absent.file) << "{}";
    std::unique_ptr<const EngineDirectory> directory;
    ASSERT_TRUE(EngineDirectory::open(folder.path(), directory).ok());
    const std::vector<Finding> findings = inspect(*directory).findings;
    EXPECT_TRUE(std::any_of(findings.begin(), findings.end(), [&](const Finding& finding) {
      return finding.found == absent.file && finding.expected.find(absent.runs) != std::string::npos;
    })) << absent.file;
  }
  EXPECT_EQ(absent_backends().empty(), IFAB_EVERY_BACKEND);
}

}  // namespace
}  // namespace ifab
