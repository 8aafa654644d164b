// SPDX-License-Identifier: Apache-2.0
//
// Choosing tokens: against plain arithmetic in double.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>
#include <random>

#include "sampler.h"
#include "vocabulary_math.h"

namespace ifab::llama {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNotANumber = std::numeric_limits<float>::quiet_NaN();

std::vector<float> random_logits(uint64_t seed, size_t size, float spread) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal(0, spread);
  std::vector<float> out(size);
  for (float& value : out) value = normal(random);
  return out;
}

ifab_sampling_t greedy() {
  ifab_sampling_t sampling{};
  sampling.top_p = 1;
  sampling.repetition_penalty = 1;
  return sampling;
}

int32_t choose(Sampler& sampler, const std::vector<float>& logits, const ifab_sampling_t& sampling,
               std::vector<int32_t> prompt = {}, std::vector<int32_t> generated = {}, uint32_t sample = 0) {
  Draw draw;
  draw.sampling = &sampling;
  draw.prompt = prompt;
  draw.generated = generated;
  draw.sample = sample;
  return sampler.choose(logits, draw).token;
}

TEST(VocabularyMath, LargestIsTheLowestIdOfTheLargestValueAtEveryPlace) {
  for (const size_t size : {1u, 15u, 16u, 17u, 1023u, 1024u, 1025u, 5000u}) {
    for (size_t place = 0; place < size; place += 1 + size / 37) {
      std::vector<float> logits(size, -3.0f);
      logits[place] = 2.0f;
      if (place + 5 < size) logits[place + 5] = 2.0f;
      EXPECT_EQ(largest(logits).id, static_cast<int32_t>(place)) << size;
    }
  }
}

TEST(VocabularyMath, LargestPassesOverWhatIsNoNumber) {
  std::vector<float> logits(100, kNotANumber);
  EXPECT_EQ(largest(logits).id, -1);
  logits[40] = -7.0f;
  EXPECT_EQ(largest(logits).id, 40);
  EXPECT_EQ(largest(std::vector<float>(100, -kInfinity)).id, -1);
  logits[41] = kInfinity;
  EXPECT_EQ(largest(logits).id, 41);
}

TEST(VocabularyMath, ExponentialsAreRightToARoundingError) {
  for (const size_t size : {1u, 31u, 1024u, 49152u}) {
    const std::vector<float> logits = random_logits(size, size, 12);
    const float top = largest(logits).value;
    std::vector<float> weights(size);
    const double sum = exponentials(logits, top, 1.5f, weights);
    double expected_sum = 0;
    for (size_t i = 0; i < size; ++i) {
      const double x = (static_cast<double>(logits[i]) - static_cast<double>(top)) * 1.5;
      const double expected = x < -87.0 ? 0.0 : std::exp(x);
      EXPECT_NEAR(weights[i], expected, expected * 2e-5 + 1e-37) << x;
      expected_sum += expected;
    }
    EXPECT_NEAR(sum, expected_sum, expected_sum * 1e-5);
    EXPECT_DOUBLE_EQ(sum_of_exponentials(logits, top, 1.5f), sum);
  }
  std::vector<float> weights(3);
  exponentials(std::vector<float>{0.0f, -kInfinity, kNotANumber}, 0.0f, 1.0f, weights);
  EXPECT_EQ(weights, (std::vector<float>{1.0f, 0.0f, 0.0f}));
}

TEST(VocabularyMath, AtLeastFindsAllInOrder) {
  const std::vector<float> logits = random_logits(3, 1007, 2);
  std::vector<int32_t> ids(logits.size());
  ids.resize(at_least(logits, 1.5f, ids.data()));
  std::vector<int32_t> expected;
  for (size_t i = 0; i < logits.size(); ++i) {
    if (logits[i] >= 1.5f) expected.push_back(static_cast<int32_t>(i));
  }
  EXPECT_EQ(ids, expected);
}

TEST(Sampler, GreedyTakesTheLargestAndRefusesWhatIsNoNumber) {
  Sampler sampler(64);
  std::vector<float> logits = random_logits(1, 64, 1);
  logits[17] = 9.0f;
  logits[33] = 9.0f;
  EXPECT_EQ(choose(sampler, logits, greedy()), 17);
  EXPECT_EQ(choose(sampler, std::vector<float>(64, kNotANumber), greedy()), -1);
  logits[5] = kInfinity;
  EXPECT_EQ(choose(sampler, logits, greedy()), -1) << "an infinite logit is a fault of the engine";
}

TEST(Sampler, PenaltiesChangeWhatTheySayTheyChange) {
  Sampler sampler(4);
  ifab_sampling_t sampling = greedy();
  sampling.repetition_penalty = 2.0f;
  EXPECT_EQ(choose(sampler, {3.0f, 2.0f, -1.0f, -9.0f}, sampling, {0}), 1) << "3 / 2 is less than 2";
  EXPECT_EQ(choose(sampler, {-1.0f, -1.5f, -9.0f, -9.0f}, sampling, {}, {0}), 1) << "-1 * 2 is less than -1.5";
  sampling = greedy();
  sampling.presence_penalty = 0.6f;
  EXPECT_EQ(choose(sampler, {1.0f, 0.5f, 0.0f, 0.0f}, sampling, {0}), 0) << "the prompt does not count";
  EXPECT_EQ(choose(sampler, {1.0f, 0.5f, 0.0f, 0.0f}, sampling, {}, {0, 0, 0}), 1);
  sampling = greedy();
  sampling.frequency_penalty = 0.2f;
  EXPECT_EQ(choose(sampler, {1.0f, 0.5f, 0.0f, 0.0f}, sampling, {}, {0, 0}), 0);
  EXPECT_EQ(choose(sampler, {1.0f, 0.5f, 0.0f, 0.0f}, sampling, {}, {0, 0, 0}), 1);
}

// The distribution that the settings define, worked out the slow way.
std::map<int32_t, double> distribution(const std::vector<float>& logits, const ifab_sampling_t& sampling) {
  std::vector<int32_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    return logits[static_cast<size_t>(a)] > logits[static_cast<size_t>(b)];
  });
  const double top = static_cast<double>(logits[static_cast<size_t>(order[0])]);
  std::vector<std::pair<int32_t, double>> kept;
  for (const int32_t id : order) {
    const double weight = std::exp((static_cast<double>(logits[static_cast<size_t>(id)]) - top) /
                                   static_cast<double>(sampling.temperature));
    if (weight < static_cast<double>(sampling.min_p)) break;
    kept.emplace_back(id, weight);
    if (sampling.top_k > 0 && kept.size() == static_cast<size_t>(sampling.top_k)) break;
  }
  double total = 0;
  for (const auto& [id, weight] : kept) total += weight;
  double nucleus = 0;
  std::map<int32_t, double> out;
  for (const auto& [id, weight] : kept) {
    if (!out.empty() && nucleus >= static_cast<double>(sampling.top_p) * total) break;
    out[id] = weight;
    nucleus += weight;
  }
  for (auto& [id, weight] : out) weight /= nucleus;
  return out;
}

class SamplerDistribution : public ::testing::TestWithParam<std::tuple<float, int32_t, float, float>> {};

TEST_P(SamplerDistribution, IsTheOneThatTheSettingsDefine) {
  ifab_sampling_t sampling = greedy();
  std::tie(sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) = GetParam();
  constexpr size_t kVocabulary = 300;
  constexpr uint64_t kDraws = 20'000;
  Sampler sampler(kVocabulary);
  const std::vector<float> logits = random_logits(11, kVocabulary, 2.5f);
  const std::map<int32_t, double> expected = distribution(logits, sampling);
  std::map<int32_t, uint64_t> seen;
  for (sampling.seed = 0; sampling.seed < kDraws; ++sampling.seed) ++seen[choose(sampler, logits, sampling)];
  for (const auto& [id, count] : seen) EXPECT_TRUE(expected.contains(id)) << id << " is never kept";
  for (const auto& [id, probability] : expected) {
    const double error = 5 * std::sqrt(probability * (1 - probability) / kDraws) + 1e-4;
    EXPECT_NEAR(static_cast<double>(seen[id]) / kDraws, probability, error) << id;
  }
}

INSTANTIATE_TEST_SUITE_P(Settings, SamplerDistribution,
                         ::testing::Values(std::tuple{1.0f, 0, 1.0f, 0.0f}, std::tuple{0.7f, 0, 1.0f, 0.0f},
                                           std::tuple{1.0f, 5, 1.0f, 0.0f}, std::tuple{1.0f, 0, 0.6f, 0.0f},
                                           std::tuple{1.0f, 0, 0.99f, 0.0f}, std::tuple{1.5f, 0, 1.0f, 0.1f},
                                           std::tuple{2.0f, 40, 0.8f, 0.02f}, std::tuple{5.0f, 200, 0.95f, 0.0f},
                                           std::tuple{1.0f, 1, 1.0f, 0.0f}, std::tuple{0.05f, 0, 0.9f, 0.5f}));

TEST(Sampler, DrawsDependOnSeedSampleAndPositionAndOnNothingElse) {
  Sampler sampler(500);
  const std::vector<float> logits = random_logits(5, 500, 0.5f);
  ifab_sampling_t sampling = greedy();
  sampling.temperature = 1;
  std::map<int32_t, int> by_seed, by_sample, by_position;
  for (uint32_t i = 0; i < 50; ++i) {
    sampling.seed = i;
    ++by_seed[choose(sampler, logits, sampling)];
    sampling.seed = 7;
    ++by_sample[choose(sampler, logits, sampling, {}, {}, i)];
    ++by_position[choose(sampler, logits, sampling, {}, std::vector<int32_t>(i, 3))];
  }
  EXPECT_GT(by_seed.size(), 30u);
  EXPECT_GT(by_sample.size(), 30u);
  EXPECT_GT(by_position.size(), 30u);
  Sampler other(500);
  choose(other, random_logits(6, 500, 3), greedy(), {1, 2}, {3});
  EXPECT_EQ(choose(other, logits, sampling), choose(sampler, logits, sampling));
  EXPECT_EQ(counter_uniform(1, 2, 3, 0), 0.34997242232556913) << "fixed for ever: answers depend on it";
}

TEST(Sampler, LogProbabilityIsThatOfTheModelAlone) {
  Sampler sampler(1000);
  const std::vector<float> logits = random_logits(9, 1000, 3);
  ifab_sampling_t sampling = greedy();
  sampling.temperature = 3;
  sampling.top_k = 50;
  sampling.seed = 4;
  Draw draw;
  draw.sampling = &sampling;
  draw.logprob = true;
  const Choice choice = sampler.choose(logits, draw);
  double sum = 0;
  for (const float logit : logits) sum += std::exp(static_cast<double>(logit));
  EXPECT_NEAR(choice.logprob, static_cast<double>(logits[static_cast<size_t>(choice.token)]) - std::log(sum), 1e-4);
}

// Allows even tokens only.
class EvenTokens final : public TokenFilter {
 public:
  bool allows(int32_t token) override { return token % 2 == 0; }
  void mask(std::span<float> logits) override {
    ++passes;
    for (size_t id = 1; id < logits.size(); id += 2) logits[id] = -kInfinity;
  }
  int passes = 0;
};

TEST(Sampler, AFilterCostsAPassOnlyWhereTheFirstChoiceIsForbidden) {
  Sampler sampler(100);
  std::vector<float> logits = random_logits(2, 100, 1);
  logits[42] = 10;
  EvenTokens filter;
  ifab_sampling_t sampling = greedy();
  Draw draw;
  draw.sampling = &sampling;
  draw.filter = &filter;
  EXPECT_EQ(sampler.choose(logits, draw).token, 42);
  EXPECT_EQ(filter.passes, 0);
  logits[41] = 11;
  EXPECT_EQ(sampler.choose(logits, draw).token, 42);
  EXPECT_EQ(filter.passes, 1);
  sampling.temperature = 2;
  for (sampling.seed = 0; sampling.seed < 500; ++sampling.seed) {
    EXPECT_EQ(sampler.choose(logits, draw).token % 2, 0);
  }
}

}  // namespace
}  // namespace ifab::llama
