// SPDX-License-Identifier: Apache-2.0
//
// What the backend knows of its cache, against models of it; and the runtime behind its checks.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>
#include <stdexcept>

#include "ledger.h"
#include "llama_support/driver.h"
#include "prefixes.h"
#include "session.h"

namespace ifab::llama {
namespace {

// A cache that really gives every token of a sequence a cell.
class ModelOfCells {
 public:
  explicit ModelOfCells(size_t sequences) : cells_(sequences) {}
  void begin(int32_t id, int32_t parent, uint32_t shared) {
    auto& mine = cells_[static_cast<size_t>(id)];
    mine.clear();
    if (parent >= 0) mine.assign(of(parent).begin(), of(parent).begin() + shared);
  }
  void grow(int32_t id, uint32_t tokens) {
    for (uint32_t i = 0; i < tokens; ++i) cells_[static_cast<size_t>(id)].push_back(next_++);
  }
  void end(int32_t id) { cells_[static_cast<size_t>(id)].clear(); }
  void rename(int32_t from, int32_t to) {
    std::swap(cells_[static_cast<size_t>(from)], cells_[static_cast<size_t>(to)]);
  }
  uint64_t held(size_t end) const {
    std::set<uint64_t> all;
    for (size_t i = 0; i < end; ++i) all.insert(cells_[i].begin(), cells_[i].end());
    return all.size();
  }
  const std::vector<uint64_t>& of(int32_t id) const { return cells_[static_cast<size_t>(id)]; }

 private:
  std::vector<std::vector<uint64_t>> cells_;
  uint64_t next_ = 0;
};

TEST(Ledger, CountsSharedCellsOnceThroughAnyHistory) {
  constexpr int32_t kSequences = 12;
  constexpr int32_t kLive = 8;
  for (uint64_t seed = 0; seed < 200; ++seed) {
    std::mt19937_64 random(seed);
    Ledger ledger(kSequences);
    ModelOfCells model(kSequences);
    for (int step = 0; step < 200; ++step) {
      const auto id = static_cast<int32_t>(random() % kSequences);
      const auto other = static_cast<int32_t>(random() % kSequences);
      if (model.of(id).empty()) {
        const bool share = id != other && !model.of(other).empty();
        const auto shared = share ? static_cast<uint32_t>(1 + random() % model.of(other).size()) : 0u;
        ledger.begin(id, share ? other : -1, shared);
        model.begin(id, share ? other : -1, shared);
        const auto more = static_cast<uint32_t>(1 + random() % 20);
        ledger.grow(id, more);
        model.grow(id, more);
      } else if (random() % 3 == 0) {
        ledger.end(id);
        model.end(id);
      } else if (random() % 4 == 0 && model.of(other).empty()) {
        ledger.rename(id, other);
        model.rename(id, other);
      } else {
        ledger.grow(id, 1);
        model.grow(id, 1);
      }
      ASSERT_EQ(ledger.cells(), model.held(kSequences)) << "seed " << seed << " step " << step;
      ASSERT_EQ(ledger.cells_of_sequences_below(kLive), model.held(kLive)) << "seed " << seed << " step " << step;
    }
  }
}

TEST(Prefixes, FindsTheLongestSharedPartInWholeBlocks) {
  const std::vector<int32_t> long_prompt = test::random_prompt(1, 400, 1000);
  Prefixes prefixes(4);
  prefixes.set(0, 5, std::span(long_prompt).first(150));
  prefixes.set(2, 5, std::span(long_prompt).first(330));
  prefixes.set(3, 6, long_prompt);
  EXPECT_EQ(prefixes.longest(5, long_prompt, 400).tokens, 320u);
  EXPECT_EQ(prefixes.longest(5, long_prompt, 400).sequence, 2);
  EXPECT_EQ(prefixes.longest(5, long_prompt, 300).tokens, 256u);
  EXPECT_EQ(prefixes.longest(5, long_prompt, 400, 2).tokens, 128u);
  EXPECT_EQ(prefixes.longest_below(2, 5, long_prompt, 400).tokens, 128u);
  EXPECT_EQ(prefixes.longest(6, long_prompt, 400).tokens, 384u);
  EXPECT_EQ(prefixes.longest(7, long_prompt, 400).sequence, -1);
  std::vector<int32_t> other = long_prompt;
  other[70] ^= 1;
  EXPECT_EQ(prefixes.longest(5, other, 400).tokens, 64u);
  prefixes.clear(2);
  EXPECT_EQ(prefixes.longest(5, long_prompt, 400).tokens, 128u);
}

TEST(WaitingHeads, WantsWhatSomebodyBeginsWithUntilNobodyDoes) {
  WaitingHeads waiting;
  std::vector<Request> requests(3000);
  for (size_t i = 0; i < requests.size(); ++i) {
    requests[i].prompt = test::random_prompt(i % 7, 256, 1000);
    const auto tail = test::random_prompt(100 + i, 64, 1000);
    requests[i].prompt.insert(requests[i].prompt.end(), tail.begin(), tail.end());
    waiting.add(requests[i]);
  }
  const auto head = test::random_prompt(3, 256, 1000);
  EXPECT_EQ(waiting.wanted(0, head), 256u);
  EXPECT_EQ(waiting.wanted(1, head), 0u);
  EXPECT_EQ(waiting.wanted(0, requests[5].prompt), 320u);
  EXPECT_EQ(waiting.wanted(0, test::random_prompt(8, 256, 1000)), 0u);
  for (size_t i = 0; i < requests.size(); ++i) {
    if (i % 7 != 3) waiting.remove(requests[i]);
  }
  EXPECT_EQ(waiting.wanted(0, head), 256u);
  EXPECT_EQ(waiting.wanted(0, requests[5].prompt), 0u);
  for (size_t i = 3; i < requests.size(); i += 7) waiting.remove(requests[i]);
  EXPECT_EQ(waiting.wanted(0, head), 0u);
}

class SessionTest : public ::testing::Test {
 protected:
  void open(const test::TinyEngine& engine) {
    test::write_tiny_directory(directory_.path(), engine);
    Config config;
    config.layout = engine.layout == "streams" ? Config::Layout::kStreams : Config::Layout::kUnified;
    config.slots = engine.slots;
    config.resident_heads = engine.resident_heads;
    config.sequence_tokens = engine.sequence_tokens;
    config.pool_tokens = engine.pool_tokens;
    config.step_token_budget = engine.step_token_budget;
    config.threads = config.batch_threads = 1;
    const Status status = Session::open(config, directory_.path() / "model.gguf", nullptr, session_);
    ASSERT_TRUE(status.ok()) << status.message();
  }
  // Appends so many tokens to a sequence; the outcome of the step.
  Session::Outcome append(int32_t sequence, uint32_t tokens) {
    session_->clear_batch();
    const uint32_t start = session_->length(sequence);
    for (uint32_t i = 0; i < tokens; ++i) session_->add_row(sequence, 20, start + i, i + 1 == tokens);
    return session_->decode();
  }

  test::TemporaryDirectory directory_;
  std::unique_ptr<Session> session_;
};

TEST_F(SessionTest, RefusesEveryArgumentThatWouldEndTheProcess) {
  open({});
  const auto most = static_cast<int32_t>(test::TinyEngine{}.slots + test::TinyEngine{}.resident_heads);
  session_->clear_batch();
  EXPECT_THROW(session_->decode(), std::logic_error) << "an empty batch";
  EXPECT_THROW(session_->add_row(-1, 5, 0, true), std::logic_error);
  EXPECT_THROW(session_->add_row(most, 5, 0, true), std::logic_error);
  EXPECT_THROW(session_->add_row(0, -1, 0, true), std::logic_error);
  EXPECT_THROW(session_->add_row(0, static_cast<int32_t>(test::tiny_vocab_size()), 0, true), std::logic_error);
  for (uint32_t i = 0; i < 256; ++i) session_->add_row(0, 5, i, false);
  EXPECT_THROW(session_->add_row(0, 5, 256, false), std::logic_error) << "more rows than a batch holds";
  session_->clear_batch();
  for (uint32_t i = 0; i < session_->most_outputs(); ++i) session_->add_row(0, 5, i, true);
  EXPECT_THROW(session_->add_row(0, 5, session_->most_outputs(), true), std::logic_error)
      << "more outputs than there is room for";
  ASSERT_EQ(append(0, 3), Session::Outcome::kDone);
  EXPECT_THROW(session_->logits(0), std::logic_error) << "a row that asked for no output";
  EXPECT_THROW(session_->logits(3), std::logic_error);
  EXPECT_NO_THROW(session_->logits(2));
  EXPECT_THROW(session_->copy(0, 0, 2), std::logic_error);
  EXPECT_THROW(session_->copy(0, 1, 4), std::logic_error) << "more than there is";
  EXPECT_THROW(session_->copy(0, most, 2), std::logic_error);
  EXPECT_THROW(session_->copy(2, 1, 1), std::logic_error) << "of an empty sequence";
  EXPECT_THROW(session_->trim(most, 0), std::logic_error);
  EXPECT_THROW(session_->length(-1), std::logic_error);
}

TEST_F(SessionTest, CopiesPartsOfSequencesInBothLayouts) {
  for (const bool unified : {false, true}) {
    session_.reset();
    open(unified ? test::TinyEngine::unified(1024) : test::TinyEngine{});
    ASSERT_EQ(append(0, 200), Session::Outcome::kDone);
    ASSERT_EQ(append(1, 50), Session::Outcome::kDone);
    session_->copy(0, 1, 128);
    EXPECT_EQ(session_->length(0), 200u);
    EXPECT_EQ(session_->length(1), 128u) << "what it held before is gone";
    ASSERT_EQ(append(1, 5), Session::Outcome::kDone);
    session_->drop(0);
    EXPECT_EQ(session_->length(0), 0u);
    EXPECT_EQ(session_->length(1), 133u);
  }
}

TEST_F(SessionTest, NoRoomChangesNothing) {
  open(test::TinyEngine::unified(256));
  ASSERT_EQ(append(0, 200), Session::Outcome::kDone);
  EXPECT_EQ(append(1, 60), Session::Outcome::kNoRoom);
  EXPECT_EQ(session_->length(0), 200u);
  EXPECT_EQ(session_->length(1), 0u);
  EXPECT_EQ(append(1, 56), Session::Outcome::kDone);
  EXPECT_EQ(append(0, 1), Session::Outcome::kNoRoom);
  session_->drop(1);
  EXPECT_EQ(append(0, 1), Session::Outcome::kDone);
}

TEST_F(SessionTest, SaysWhyAModelCannotBeLoaded) {
  std::unique_ptr<Session> session;
  const Status status = Session::open(Config{}, directory_.path() / "absent.gguf", nullptr, session);
  EXPECT_EQ(status.code(), IFAB_FAILED_PRECONDITION);
  EXPECT_NE(status.message().find("absent.gguf"), std::string::npos) << status.message();
}

}  // namespace
}  // namespace ifab::llama
