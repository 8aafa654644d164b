// SPDX-License-Identifier: Apache-2.0
//
// Choosing for many rows on several threads: the same as for each row alone.
#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "chooser.h"

namespace ifab::llama {
namespace {

constexpr uint32_t kVocabulary = 500;

// Allows odd tokens only.
class OddTokens final : public TokenFilter {
 public:
  bool allows(int32_t token) override { return token % 2 == 1; }
  void mask(std::span<float> logits) override {
    for (size_t id = 0; id < logits.size(); id += 2) logits[id] = -1e30f;
  }
};

TEST(Chooser, ManyRowsOnSeveralThreadsAreChosenAsEachAlone) {
  std::mt19937_64 random(7);
  std::normal_distribution<float> normal(0, 3);
  Sampler alone(kVocabulary);
  OddTokens odd;
  for (const uint32_t slots : {8u, 64u, 256u}) {
    Chooser chooser(kVocabulary, 4, slots);
    for (uint32_t round = 0; round < 20; ++round) {
      const size_t count = 1 + random() % slots;
      std::vector<std::vector<float>> logits(count, std::vector<float>(kVocabulary));
      std::vector<ifab_sampling_t> samplings(count);
      std::vector<Chooser::Row> rows(count);
      for (size_t i = 0; i < count; ++i) {
        for (float& value : logits[i]) value = normal(random);
        samplings[i].temperature = i % 3 == 0 ? 0.0f : 0.8f;
        samplings[i].top_p = 1;
        samplings[i].top_k = i % 5 == 0 ? 10 : 0;
        samplings[i].repetition_penalty = 1;
        samplings[i].seed = i;
        rows[i].logits = logits[i];
        rows[i].draw.sampling = &samplings[i];
        rows[i].draw.logprob = true;
        if (i % 7 == 0) rows[i].draw.filter = &odd;
      }
      chooser.choose(rows);
      for (size_t i = 0; i < count; ++i) {
        const Choice expected = alone.choose(rows[i].logits, rows[i].draw);
        ASSERT_EQ(rows[i].choice.token, expected.token) << "row " << i << " of " << count;
        ASSERT_EQ(rows[i].choice.logprob, expected.logprob);
        if (rows[i].draw.filter != nullptr) {
          ASSERT_EQ(expected.token % 2, 1);
        }
      }
    }
  }
}

}  // namespace
}  // namespace ifab::llama
