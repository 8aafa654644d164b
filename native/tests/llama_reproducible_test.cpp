// SPDX-License-Identifier: Apache-2.0
//
// The same prompt, sampling and seed give the same tokens: alone, in any batch, and whether a head was shared or
// computed. On a tiny model always; on the engine that IFAB_TEST_LLAMA_ENGINE names where it names one.
#include <gtest/gtest.h>

#include <map>
#include <random>

#include "llama_support/driver.h"

namespace ifab::test {
namespace {

struct Case {
  std::vector<int32_t> prompt;
  ifab_sampling_t sampling{};
  uint32_t max_tokens = 0;
  uint32_t samples = 1;
};

// Prompts under nested heads, of lengths on and around the borders of blocks.
class Cases {
 public:
  Cases(uint64_t seed, const ContractValues& contract, uint32_t longest_prompt, uint32_t longest_output)
      : random_(seed),
        vocab_(contract.model.vocab_size),
        longest_prompt_(longest_prompt),
        longest_output_(longest_output) {
    for (int i = 0; i < 3; ++i)
      heads_.push_back(random_prompt(random_(), 64 + random_() % (longest_prompt / 2), vocab_));
  }

  Case next() {
    Case made;
    if (random_() % 4 != 0) {
      const auto& head = heads_[random_() % heads_.size()];
      const size_t part = random_() % 3 == 0 ? head.size() / 2 : head.size();
      made.prompt.assign(head.begin(), head.begin() + static_cast<ptrdiff_t>(part));
    }
    static constexpr size_t kTails[] = {1, 2, 31, 63, 64, 65, 127, 128, 129, 190};
    const size_t room = longest_prompt_ - made.prompt.size();
    const size_t tail =
        std::min(room, random_() % 2 == 0 ? kTails[random_() % std::size(kTails)] : 1 + random_() % room);
    const auto rest = random_prompt(random_(), std::max<size_t>(tail, 1), vocab_);
    made.prompt.insert(made.prompt.end(), rest.begin(), rest.end());
    made.max_tokens = static_cast<uint32_t>(1 + random_() % longest_output_);
    made.samples = random_() % 8 == 0 ? 2 : 1;
    made.sampling.top_p = random_() % 3 == 0 ? 0.9f : 1.0f;
    made.sampling.top_k = random_() % 3 == 0 ? 20 : 0;
    made.sampling.temperature = random_() % 2 == 0 ? 0.0f : 0.8f;
    made.sampling.repetition_penalty = random_() % 4 == 0 ? 1.1f : 1.0f;
    made.sampling.seed = random_();
    return made;
  }

 private:
  std::mt19937_64 random_;
  uint32_t vocab_;
  uint32_t longest_prompt_;
  uint32_t longest_output_;
  std::vector<std::vector<int32_t>> heads_;
};

Request request_of(const Case& made, const ContractValues& contract) {
  Request request = plain_request(made.prompt, made.max_tokens);
  request.sampling = made.sampling;
  request.samples = made.samples;
  request.stop_ids = contract.tokenizer.end_token_ids;
  request.logprobs = true;
  return request;
}

// Runs `batches` random batches: arrivals at random steps, cancellations, hints. Every request of a batch is run alone
// on an engine of its own that remembers nothing of the others (another salt).
void expect_same_in_any_batch(Driver& driver, uint32_t batches, uint32_t longest_prompt, uint32_t longest_output,
                              uint64_t first_seed) {
  uint64_t alone_salt = uint64_t{1} << 32;
  uint64_t shared = 0;
  for (uint32_t batch = 0; batch < batches; ++batch) {
    const uint64_t seed = first_seed + batch;
    SCOPED_TRACE("seed " + std::to_string(seed));
    Cases cases(seed, driver.contract(), longest_prompt, longest_output);
    std::mt19937_64 random(seed);
    std::map<uint64_t, Case> asked;
    const size_t count = 2 + random() % 11;
    uint64_t victim = UINT64_MAX;
    while (asked.size() < count || !driver.idle()) {
      while (asked.size() < count && random() % 2 == 0) {
        const Case made = cases.next();
        Request request = request_of(made, driver.contract());
        request.salt = seed;
        if (random() % 3 == 0 && made.prompt.size() > 64) request.head_ends = {64};
        asked.emplace(driver.ask(std::move(request)), made);
      }
      if (victim == UINT64_MAX && !asked.empty() && random() % 24 == 0) {
        victim = asked.begin()->first + random() % asked.size();
        driver.cancel(victim);
      }
      driver.step();
      ASSERT_TRUE(driver.violations().empty()) << driver.violations().front();
    }
    for (const auto& [id, made] : asked) {
      if (id == victim) continue;
      Request request = request_of(made, driver.contract());
      request.salt = ++alone_salt;
      const uint64_t alone = driver.ask(std::move(request));
      ASSERT_TRUE(driver.run());
      shared += driver.told(id).cached;
      ASSERT_EQ(driver.told(alone).cached, 0u);
      for (uint32_t sample = 0; sample < made.samples; ++sample) {
        ASSERT_EQ(driver.told(id).samples[sample].tokens, driver.told(alone).samples[sample].tokens)
            << "prompt of " << made.prompt.size() << " tokens, " << driver.told(id).cached << " of them shared";
        ASSERT_EQ(driver.told(id).samples[sample].logprobs, driver.told(alone).samples[sample].logprobs);
        ASSERT_EQ(driver.told(id).samples[sample].reason, driver.told(alone).samples[sample].reason);
      }
    }
  }
  EXPECT_GT(shared, 0u) << "no batch shared a head";
}

TEST(LlamaReproducible, TinyEngineInRandomBatches) {
  Driver driver(TinyEngine{});
  expect_same_in_any_batch(driver, long_tests() ? 200 : 30, 600, 40, 1);
}

TEST(LlamaReproducible, TinyEngineWithTwoThreads) {
  TinyEngine engine;
  engine.threads = 2;
  Driver driver(engine);
  expect_same_in_any_batch(driver, long_tests() ? 40 : 2, 600, 40, 500);
}

TEST(LlamaReproducible, TinyEngineWithManySlots) {
  TinyEngine engine;
  engine.slots = 80;
  engine.resident_heads = 3;
  engine.step_token_budget = 400;
  Driver driver(engine);
  expect_same_in_any_batch(driver, long_tests() ? 40 : 4, 600, 30, 1000);
}

TEST(LlamaReproducible, RealEngineInRandomBatches) {
  if (real_engine().empty()) GTEST_SKIP() << "IFAB_TEST_LLAMA_ENGINE names no engine directory: make engine makes one";
  Driver driver(real_engine());
  ASSERT_TRUE(driver.contract().capabilities.reproducible);
  // The one batch of the short run is one that shares a head, which that of the first seed does not.
  expect_same_in_any_batch(driver, long_tests() ? 200 : 1, long_tests() ? 600 : 330, long_tests() ? 24 : 8, 4);
}

}  // namespace
}  // namespace ifab::test
