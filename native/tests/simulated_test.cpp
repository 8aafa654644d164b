// SPDX-License-Identifier: Apache-2.0
// The simulated engine by itself: its formulas, its pool, its time.
#include "simulated.h"

#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <chrono>
#include <csignal>
#include <cstring>
#include <map>
#include <memory>
#include <stdexcept>
#include <vector>

#include "block_pool.h"
#include "client.h"
#include "formula.h"
#include "ifab/engine.h"

namespace ifab::simulated {
namespace {

// Figures from an independent implementation of formula.h, engines/simulated.py.
TEST(Formula, GivesTheDocumentedFigures) {
  EXPECT_EQ(mix(0), 0xE220A8397B1DCDAFu);
  uint64_t chain = chain_start(1);
  for (const int32_t id : {5, 6, 7}) chain = chain_next(chain, id);
  EXPECT_EQ(chain, 0x7FC0E83DA8687A1Eu);
  const std::array<int32_t, 1> ends = {256};
  std::vector<int32_t> tokens;
  for (uint32_t k = 0; k < 5; ++k) tokens.push_back(token_of(token_word(sample_key(chain, 9, 1), k), 512, ends, 0));
  EXPECT_EQ(tokens, (std::vector<int32_t>{179, 93, 6, 194, 487}));
}

TEST(Formula, NeverGivesAnEndTokenUnlessToldTo) {
  const std::array<int32_t, 3> ends = {0, 2, 7};
  std::map<int32_t, int> counts;
  for (uint64_t word = 0; word < 8000; ++word) ++counts[token_of(mix(word), 8, ends, 0)];
  EXPECT_EQ(counts.size(), 5u);
  for (const int32_t end : ends) EXPECT_EQ(counts.count(end), 0u);
  int stops = 0;
  for (uint64_t word = 0; word < 8000; ++word) stops += token_of(mix(word), 8, ends, 10) == 0 ? 1 : 0;
  EXPECT_NEAR(stops, 800, 100);
}

TEST(Formula, WritesPayloadsExactly) {
  const uint64_t chain = 12345;
  std::array<uint8_t, 4 * 64> wide{};
  std::array<uint8_t, 2 * 64> brain{};
  write_payload(chain, 64, IFAB_DTYPE_FLOAT32, wide.data());
  write_payload(chain, 64, IFAB_DTYPE_BFLOAT16, brain.data());
  for (uint32_t i = 0; i < 64; ++i) {
    const uint64_t word = mix(chain ^ i);
    float value = 0;
    std::memcpy(&value, wide.data() + 4 * i, 4);
    EXPECT_EQ(value, static_cast<float>(static_cast<double>(word >> 40) / 8388608.0 - 1));
    uint32_t upper = 0;
    std::memcpy(reinterpret_cast<uint8_t*>(&upper) + 2, brain.data() + 2 * i, 2);
    EXPECT_EQ(std::bit_cast<float>(upper), static_cast<float>(static_cast<double>(word >> 56) / 128.0 - 1));
  }
}

TEST(Formula, WritesHalvesAsTheirFormatSays) {
  // 1/2, -1, and the smallest step, by hand: sign, five bits of exponent, ten of fraction.
  const auto half_of = [](uint64_t k) {
    uint64_t chain = 0;
    while (mix(chain) >> 53 != k) ++chain;
    std::array<uint8_t, 2> bytes{};
    write_payload(chain, 1, IFAB_DTYPE_FLOAT16, bytes.data());
    return static_cast<unsigned>(bytes[0] | (bytes[1] << 8));
  };
  EXPECT_EQ(half_of(1024 + 512), 0x3800u);
  EXPECT_EQ(half_of(0), 0xBC00u);
  EXPECT_EQ(half_of(1024), 0x0000u);
  EXPECT_EQ(half_of(1025), 0x1400u);
}

class Pool : public ::testing::Test {
 protected:
  uint32_t holding(uint32_t before, std::array<int32_t, 2> ids, uint64_t salt = 0) {
    const uint32_t block = pool_.take();
    pool_.announce(block, before, salt, ids);
    pool_.complete(block, 7);
    return block;
  }
  uint32_t find(uint32_t before, std::array<int32_t, 2> ids, uint64_t salt = 0) {
    return pool_.find(before, salt, ids);
  }

  static constexpr uint32_t kNone = BlockPool::kNone;
  BlockPool pool_{4, 2};
};

TEST_F(Pool, FindsBlocksByContentPlaceAndSalt) {
  const uint32_t first = holding(kNone, {1, 2});
  const uint32_t second = holding(first, {3, 4});
  EXPECT_EQ(find(kNone, {1, 2}), first);
  EXPECT_EQ(find(first, {3, 4}), second);
  EXPECT_EQ(find(kNone, {3, 4}), kNone);
  EXPECT_EQ(find(kNone, {1, 3}), kNone);
  EXPECT_EQ(find(kNone, {1, 2}, 1), kNone);
}

TEST_F(Pool, KeepsWhatNobodyHoldsUntilItsPlaceIsNeeded) {
  const uint32_t first = holding(kNone, {1, 2});
  const uint32_t second = holding(first, {3, 4});
  pool_.release(second);
  pool_.release(first);
  EXPECT_EQ(pool_.available(), 4u);
  EXPECT_EQ(pool_.used(), 2u);
  EXPECT_EQ(find(kNone, {1, 2}), first);
  pool_.take();
  pool_.take();
  EXPECT_EQ(find(first, {3, 4}), second);
  pool_.take();  // the one let go of first
  EXPECT_EQ(find(first, {3, 4}), kNone);
  EXPECT_EQ(find(kNone, {1, 2}), first);
  pool_.hold(first);
  EXPECT_EQ(pool_.take(), kNone);
}

TEST_F(Pool, FreesAPrivateBlockAtOnce) {
  const uint32_t block = pool_.take();
  EXPECT_EQ(pool_.used(), 1u);
  pool_.release(block);
  EXPECT_EQ(pool_.used(), 0u);
}

TEST_F(Pool, ShowsThatABlockIsBeingComputed) {
  const std::array<int32_t, 2> ids = {1, 2};
  const uint32_t block = pool_.take();
  pool_.announce(block, kNone, 0, ids);
  EXPECT_TRUE(pool_.announced(find(kNone, ids)));
  pool_.retract(block);
  EXPECT_EQ(find(kNone, ids), kNone);
  pool_.release(block);
  EXPECT_EQ(pool_.used(), 0u);
}

// ---- the batcher ----

class Batcher : public ::testing::Test, protected Sink {
 protected:
  static Config config() {
    Config config;
    config.seed = 1;
    config.vocab_size = 64;
    config.hidden_size = 4;
    config.layers = 1;
    config.slots = 4;
    config.sequence_tokens = 64;
    config.step_token_budget = 16;
    config.splits_prompts = true;
    config.kv_block_tokens = 4;
    config.kv_pool_blocks = 12;
    config.samples_max = 4;
    config.max_input_tokens = 48;
    config.time = {.scale = 0,
                   .step_ns = 1'000'000,
                   .prompt_token_ns = 1000,
                   .generated_token_ns = 10'000,
                   .context_token_ns = 100};
    return config;
  }
  static Request request(uint64_t id, uint32_t prompt, uint32_t max_tokens, uint32_t samples = 1) {
    Request request;
    request.id = id;
    request.prompt = test::prompt_of(prompt, id);
    for (int32_t& token : request.prompt) token %= 64;
    request.max_tokens = max_tokens;
    request.samples = samples;
    return request;
  }
  void SetUp() override { make(config()); }
  void make(const Config& config) { backend_ = std::make_unique<SimulatedBackend>(config); }
  StepReport step(StepMode mode = StepMode::kNormal) { return backend_->step(mode, *this); }
  void admit(const Request& request) { ASSERT_EQ(backend_->admit(request).outcome, AdmitOutcome::kAdmitted); }

  void prompt_computed(uint64_t id, uint32_t tokens) override { computed_[id] += tokens; }
  void context_done(uint64_t id, uint32_t cached, uint32_t computed, std::span<const float>) override {
    EXPECT_EQ(computed_[id], computed);
    cached_[id] = cached;
  }
  void tokens(uint64_t id, uint32_t, std::span<const int32_t> tokens, std::span<const float>) override {
    tokens_[id] += tokens.size();
  }
  uint8_t* payload(uint64_t) override { return nullptr; }
  void finished(uint64_t id, uint32_t, int32_t, int32_t, std::string_view) override { ++ends_[id]; }
  void failed(uint64_t id, const Status&) override { ++failures_[id]; }

  std::unique_ptr<SimulatedBackend> backend_;
  std::map<uint64_t, uint64_t> computed_, cached_, tokens_, ends_, failures_;
};

TEST_F(Batcher, CutsPromptsToTheBudgetInOrder) {
  const Request first = request(1, 20, 2);
  const Request second = request(2, 6, 2);
  admit(first);
  admit(second);
  EXPECT_EQ(backend_->room().step_tokens, 16u);
  EXPECT_EQ(step().prompt_tokens, 16u);
  EXPECT_EQ(backend_->room().step_tokens, 10u);
  const StepReport report = step();
  EXPECT_EQ(report.prompt_tokens, 10u);
  EXPECT_EQ(report.generated_tokens, 0u);
  EXPECT_EQ(step().generated_tokens, 2u);
  EXPECT_EQ(step().generated_tokens, 2u);
  EXPECT_EQ(ends_[1] + ends_[2], 2u);
  EXPECT_FALSE(step().progressed);
}

TEST_F(Batcher, ComputesAPromptInOneStepWhereItCannotBeSplit) {
  Config whole = config();
  whole.splits_prompts = false;
  make(whole);
  const Request first = request(1, 10, 4);
  const Request second = request(2, 10, 4);
  admit(first);
  admit(second);
  EXPECT_EQ(step().prompt_tokens, 10u);
  const StepReport report = step();
  EXPECT_EQ(report.generated_tokens, 1u);
  EXPECT_EQ(report.prompt_tokens, 10u);
}

TEST_F(Batcher, SaysWhatARequestNeedsAndWhatItHasPromised) {
  const Request first = request(1, 10, 10, 2);  // 2 full blocks, 3 behind them for each sample
  EXPECT_EQ(backend_->need(first).blocks, 8u);
  EXPECT_EQ(backend_->need(first).blocks_ever, 8u);
  EXPECT_EQ(backend_->need(first).slots, 2u);
  admit(first);
  EXPECT_EQ(backend_->room().blocks, 9u);    // 3 hold the prompt
  EXPECT_EQ(backend_->room().promised, 5u);  // the rest of the need
  EXPECT_EQ(backend_->room().slots, 2u);
  while (ends_[1] < 2) {
    step();
    ASSERT_EQ(backend_->room().blocks - backend_->room().promised, 4u + (ends_[1] == 2 ? 8 : 0));
  }
  EXPECT_EQ(backend_->room().blocks, 12u);
  EXPECT_EQ(backend_->room().promised, 0u);
  EXPECT_EQ(backend_->kv_blocks_used(), 2u);  // the prompt's full blocks stay
}

TEST_F(Batcher, SubtractsOnlyBlocksThatSomebodyHolds) {
  const Request first = request(1, 9, 30);
  admit(first);
  step();
  Request second = first;
  second.id = 2;
  second.max_tokens = 2;
  EXPECT_EQ(backend_->need(second).blocks, 1u);  // 3, and 2 of them the first one holds
  EXPECT_EQ(backend_->need(second).prompt_tokens, 1u);
  backend_->cancel(1);
  EXPECT_EQ(backend_->need(second).blocks, 3u);  // free to be taken, and so to be counted
  EXPECT_EQ(backend_->need(second).prompt_tokens, 1u);
  admit(second);
  step();
  EXPECT_EQ(cached_[2], 8u);
}

TEST_F(Batcher, TellsThatALeaderComputes) {
  const Request first = request(1, 40, 2);
  admit(first);
  step();
  Request second = first;
  second.id = 2;
  EXPECT_TRUE(backend_->need(second).leader_computes);
  EXPECT_EQ(backend_->need(second).prompt_tokens, 24u);
  second.salt = 1;
  EXPECT_FALSE(backend_->need(second).leader_computes);
  second.salt = 0;
  backend_->cancel(1);
  EXPECT_FALSE(backend_->need(second).leader_computes);  // what it had begun stays, nobody goes on with it
  EXPECT_EQ(backend_->need(second).prompt_tokens, 24u);
}

TEST_F(Batcher, StandsStillWhereNobodyKeptItsPromises) {
  const Request first = request(1, 20, 28);
  const Request second = request(2, 20, 28);
  admit(first);
  admit(second);  // nobody asked whether 24 blocks are there: 12 are
  StepReport report;
  for (int i = 0; i < 100 && (report = step()).progressed; ++i) {
  }
  EXPECT_FALSE(report.progressed);
  EXPECT_EQ(ends_[1] + ends_[2], 0u);
  backend_->cancel(2);
  while (ends_[1] == 0) ASSERT_TRUE(step().progressed);
}

TEST_F(Batcher, CountsItsTime) {
  const Request first = request(1, 10, 2);
  admit(first);
  EXPECT_EQ(step().clock_us, 1000u + 10);      // ten prompt tokens
  EXPECT_EQ(step().clock_us, 1000u + 10 + 1);  // a token that looks at ten
  EXPECT_EQ(step().clock_us, 1000u + 10 + 1);  // and one at eleven, rounded down
  EXPECT_EQ(step().clock_us, 1000u);
}

TEST_F(Batcher, TakesRealTimeAndCanBeInterrupted) {
  Config real = config();
  real.time.scale = 2;
  make(real);
  auto start = std::chrono::steady_clock::now();
  EXPECT_EQ(step().clock_us, 0u);
  EXPECT_GE(std::chrono::steady_clock::now() - start, std::chrono::milliseconds(2));
  real.time.step_ns = uint64_t{3600} * 1'000'000'000;
  make(real);
  backend_->interrupt();
  start = std::chrono::steady_clock::now();
  step();
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::minutes(1));
}

TEST_F(Batcher, HasFaultsAsTold) {
  Config faulty = config();
  faulty.step_faults = {{FaultKind::kStall, 2, 3}, {FaultKind::kStall, 10, 0}, {FaultKind::kThrow, 20, 0}};
  make(faulty);
  const Request first = request(1, 30, 18);
  admit(first);
  std::vector<bool> progressed;
  for (int i = 0; i < 12; ++i) progressed.push_back(step().progressed);
  EXPECT_EQ(progressed,
            (std::vector<bool>{true, false, false, false, true, true, true, true, true, false, false, false}));
  EXPECT_TRUE(step(StepMode::kProgressOnly).progressed);
  for (int i = 14; i < 20; ++i) EXPECT_TRUE(step().progressed);
  EXPECT_THROW(step(), std::runtime_error);
}

TEST_F(Batcher, KillsItsProcessWhenToldTo) {
  Config faulty = config();
  faulty.request_faults = {{FaultKind::kKillProcess, RequestFault::Trigger::kPromptToken, 63, 0}};
  make(faulty);
  Request harmless = request(1, 8, 2);
  for (int32_t& token : harmless.prompt) token %= 60;
  admit(harmless);
  while (ends_[1] == 0) step();
  Request deadly = harmless;
  deadly.id = 2;
  deadly.prompt[3] = 63;
  admit(deadly);
  EXPECT_EXIT(step(), ::testing::KilledBySignal(SIGKILL), "");
}

}  // namespace
}  // namespace ifab::simulated
