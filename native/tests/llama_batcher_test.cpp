// SPDX-License-Identifier: Apache-2.0
//
// What the llama backend does with requests: heads, samples, scores, stops, cancellations, a pool that is too small.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>

#include "llama_support/driver.h"

namespace ifab::test {
namespace {

std::vector<int32_t> joined(std::vector<int32_t> head, const std::vector<int32_t>& tail) {
  head.insert(head.end(), tail.begin(), tail.end());
  return head;
}

std::vector<int32_t> tiny_prompt(uint64_t seed, size_t size) {
  return random_prompt(seed, size, tiny_vocab_size());
}

Request with_stops(std::vector<int32_t> prompt, uint32_t max_tokens) {
  Request request = plain_request(std::move(prompt), max_tokens);
  request.stop_ids = {kTinyEnd};
  return request;
}

class LlamaBatcher : public ::testing::Test {
 protected:
  static void expect_clean(Driver& driver) {
    EXPECT_TRUE(driver.violations().empty()) << driver.violations().front();
    EXPECT_EQ(driver.backend().room().slots, driver.backend().facts().slots);
    EXPECT_EQ(driver.backend().room().promised, 0u);
  }
};

TEST_F(LlamaBatcher, ComputesAHeadOnceForAllWhoShareIt) {
  Driver driver(TinyEngine{});
  const auto head = tiny_prompt(1, 400);
  for (uint64_t i = 0; i < 32; ++i) driver.ask(joined(head, tiny_prompt(100 + i, 30)), 6);
  ASSERT_TRUE(driver.run());
  // 384 of the head's 400 tokens are whole blocks; the other 16 are each prompt's own.
  EXPECT_EQ(driver.prompt_tokens, 384u + 32u * 46u);
  uint32_t leaders = 0;
  for (uint64_t id = 0; id < 32; ++id) {
    EXPECT_EQ(driver.told(id).cached + driver.told(id).computed, 430u);
    leaders += driver.told(id).cached == 0 ? 1 : 0;
  }
  EXPECT_EQ(leaders, 1u);
  expect_clean(driver);
}

// Their values are those of each prompt alone, but for the last bits: a card would make no others.
TEST_F(LlamaBatcher, ComputesPromptsTogetherWhereNothingIsPromisedOfLastBits) {
  TinyEngine engine;
  engine.reproducible = false;
  Driver together(engine);
  Driver alone(engine);
  std::vector<uint64_t> ids;
  for (const size_t size : {60u, 60u, 60u, 25u, 60u, 60u, 100u, 100u}) {
    Request request = with_stops(tiny_prompt(ids.size() + 1, size), 2);
    request.logprobs = true;
    Request same = request;
    ids.push_back(together.ask(std::move(request)));
    alone.ask(std::move(same));
    ASSERT_TRUE(alone.run());
  }
  ASSERT_TRUE(together.run());
  EXPECT_LT(together.steps, alone.steps / 2);
  for (const uint64_t id : ids) {
    EXPECT_EQ(together.told(id).computed, together.request(id).prompt.size());
    ASSERT_FALSE(together.told(id).samples[0].logprobs.empty());
    EXPECT_NEAR(together.told(id).samples[0].logprobs[0], alone.told(id).samples[0].logprobs[0], 0.02) << id;
  }
  expect_clean(together);
}

TEST_F(LlamaBatcher, SharesNestedHeadsAsFarAsTheyGo) {
  Driver driver(TinyEngine{});
  const auto outer = tiny_prompt(1, 128);
  const auto left = joined(outer, tiny_prompt(2, 128));
  const auto right = joined(outer, tiny_prompt(3, 128));
  for (const auto& head : {left, right, left, right}) driver.ask(joined(head, tiny_prompt(driver.steps + 9, 10)), 3);
  ASSERT_TRUE(driver.run());
  EXPECT_EQ(driver.told(0).cached, 0u);
  EXPECT_EQ(driver.told(1).cached, 128u);
  EXPECT_EQ(driver.told(2).cached, 256u);
  EXPECT_EQ(driver.told(3).cached, 256u);
}

TEST_F(LlamaBatcher, KeepsAHeadThatAHintNamesAfterItsRequestHasEnded) {
  Driver driver(TinyEngine{});
  const auto head = tiny_prompt(1, 200);
  Request first = with_stops(joined(head, tiny_prompt(2, 20)), 2);
  first.head_ends = {100, 200};
  driver.ask(std::move(first));
  ASSERT_TRUE(driver.run());
  driver.ask(joined(head, tiny_prompt(3, 20)), 2);
  driver.ask(joined(tiny_prompt(4, 64), tiny_prompt(5, 20)), 2);
  ASSERT_TRUE(driver.run());
  EXPECT_EQ(driver.told(1).cached, 192u);
  EXPECT_EQ(driver.told(2).cached, 0u);
  EXPECT_EQ(driver.backend().kv_blocks_used(), 3u) << "the head is all that is held";
}

TEST_F(LlamaBatcher, KeepsAHeadThatSomebodyStillWaitsFor) {
  TinyEngine engine;
  engine.slots = 2;
  Driver driver(engine);
  const auto head = tiny_prompt(1, 128);
  driver.ask(joined(head, tiny_prompt(2, 5)), 1);
  for (uint64_t i = 0; i < 6; ++i) driver.ask(tiny_prompt(50 + i, 90), 12);  // others take the slots meanwhile
  driver.ask(joined(head, tiny_prompt(3, 5)), 1);
  ASSERT_TRUE(driver.run());
  EXPECT_EQ(driver.told(7).cached, 128u);
}

TEST_F(LlamaBatcher, SharesWithinOneSaltOnly) {
  Driver driver(TinyEngine{});
  const auto prompt = tiny_prompt(1, 200);
  for (const uint64_t salt : {7u, 7u, 8u}) {
    Request request = with_stops(prompt, 4);
    request.salt = salt;
    driver.ask(std::move(request));
    driver.step();
  }
  ASSERT_TRUE(driver.run());
  EXPECT_EQ(driver.told(1).cached, 192u);
  EXPECT_EQ(driver.told(2).cached, 0u);
}

TEST_F(LlamaBatcher, ComputesAtLeastOneTokenOfAPromptItHoldsWhole) {
  Driver driver(TinyEngine{});
  const auto prompt = tiny_prompt(1, 128);
  driver.ask(prompt, 20);
  driver.step();
  driver.ask(prompt, 4);
  ASSERT_TRUE(driver.run());
  EXPECT_EQ(driver.told(1).cached, 64u);
  EXPECT_EQ(driver.told(1).computed, 64u);
}

TEST_F(LlamaBatcher, GivesUpTheHeadUsedLongestAgo) {
  TinyEngine engine;
  engine.resident_heads = 2;
  Driver driver(engine);
  const auto ask_with_head = [&](uint64_t head) {
    Request request = with_stops(joined(tiny_prompt(head, 64), tiny_prompt(head + 100, 8)), 1);
    request.head_ends = {64};
    const uint64_t id = driver.ask(std::move(request));
    EXPECT_TRUE(driver.run());
    return driver.told(id).cached;
  };
  EXPECT_EQ(ask_with_head(1), 0u);
  EXPECT_EQ(ask_with_head(2), 0u);
  EXPECT_EQ(ask_with_head(1), 64u);
  EXPECT_EQ(ask_with_head(3), 0u);  // in place of 2
  EXPECT_EQ(ask_with_head(1), 64u);
  EXPECT_EQ(ask_with_head(2), 0u);
}

TEST_F(LlamaBatcher, SamplesOfAPromptShareItsPrefillAndAreThoseOfTheirNumber) {
  Driver driver(TinyEngine{});
  const auto prompt = tiny_prompt(1, 200);
  Request several = with_stops(prompt, 12);
  several.samples = 5;
  several.sampling.temperature = 1.0f;
  several.sampling.seed = 42;
  driver.ask(several);
  ASSERT_TRUE(driver.run());
  EXPECT_EQ(driver.prompt_tokens, 200u);
  Request one = several;
  one.samples = 1;
  driver.ask(one);
  ASSERT_TRUE(driver.run());
  EXPECT_EQ(driver.told(0).samples[0], driver.told(1).samples[0]);
  for (uint32_t i = 1; i < 5; ++i) {
    EXPECT_FALSE(driver.told(0).samples[i].tokens.empty() && driver.told(0).samples[i].stop_id < 0);
    EXPECT_NE(driver.told(0).samples[i].tokens, driver.told(0).samples[0].tokens);
  }
  expect_clean(driver);
}

TEST_F(LlamaBatcher, ScoresOfAPromptAreTheLogProbabilitiesOfItsTokens) {
  Driver driver(TinyEngine{});
  Request generating = with_stops(tiny_prompt(1, 150), 30);
  generating.stop_ids.clear();
  generating.logprobs = true;
  driver.ask(generating);
  ASSERT_TRUE(driver.run());
  const Told::Sample& generated = driver.told(0).samples[0];
  Request scored = with_stops(joined(generating.prompt, generated.tokens), 1);
  scored.prompt_logprobs = true;
  driver.ask(scored);
  ASSERT_TRUE(driver.run());
  const std::vector<float>& scores = driver.told(1).scores;
  ASSERT_EQ(scores.size(), 180u);
  EXPECT_TRUE(std::isnan(scores[0]));
  for (size_t i = 1; i < scores.size(); ++i) EXPECT_LE(scores[i], 0.0f);
  for (size_t i = 0; i < 30; ++i) EXPECT_NEAR(scores[150 + i], generated.logprobs[i], 0.02f) << i;
  EXPECT_EQ(driver.told(1).cached, 0u) << "a scored prompt is computed whole";
}

TEST_F(LlamaBatcher, EndsAtStopTokensAndLimits) {
  Driver driver(TinyEngine{});
  const auto prompt = tiny_prompt(1, 40);
  Request free = with_stops(prompt, 10);
  free.stop_ids.clear();
  driver.ask(free);
  ASSERT_TRUE(driver.run());
  const std::vector<int32_t> tokens = driver.told(0).samples[0].tokens;
  EXPECT_EQ(tokens.size(), 10u);
  EXPECT_EQ(driver.told(0).samples[0].reason, IFAB_FINISH_LENGTH);

  Request stopped = with_stops(prompt, 10);
  stopped.stop_ids = {tokens[3]};
  driver.ask(stopped);
  ASSERT_TRUE(driver.run());
  const Told::Sample& sample = driver.told(1).samples[0];
  EXPECT_EQ(sample.reason, IFAB_FINISH_STOP);
  EXPECT_EQ(sample.stop_id, tokens[3]);
  const auto first = std::find(tokens.begin(), tokens.end(), tokens[3]);
  EXPECT_EQ(sample.tokens, std::vector<int32_t>(tokens.begin(), first));

  Request longest = with_stops(tiny_prompt(2, 640), 128);
  longest.stop_ids.clear();
  driver.ask(longest);
  ASSERT_TRUE(driver.run());
  EXPECT_EQ(driver.told(2).samples[0].tokens.size(), 128u) << "a sequence may fill its stream to the last token";
}

TEST_F(LlamaBatcher, CancelIsSafeAtEveryStage) {
  for (uint32_t steps_before = 0; steps_before < 14; ++steps_before) {
    Driver driver(TinyEngine{});
    const auto head = tiny_prompt(1, 300);
    Request several = with_stops(joined(head, tiny_prompt(2, 40)), 8);
    several.samples = 3;
    driver.ask(several);
    driver.ask(joined(head, tiny_prompt(3, 40)), 8);
    driver.ask(joined(head, tiny_prompt(4, 40)), 8);
    for (uint32_t i = 0; i < steps_before; ++i) driver.step();
    driver.cancel(0);
    driver.cancel(2);
    ASSERT_TRUE(driver.run()) << steps_before;
    EXPECT_FALSE(driver.told(1).failed);
    expect_clean(driver);
  }
}

TEST_F(LlamaBatcher, TakesAnyRandomLifeOfRequests) {
  std::mt19937_64 random(7);
  for (const bool unified : {false, true}) {
    Driver driver(unified ? TinyEngine::unified(2048) : TinyEngine{});
    std::vector<std::vector<int32_t>> heads;
    for (uint64_t i = 0; i < 3; ++i) heads.push_back(tiny_prompt(i, 70 + 60 * i));
    uint64_t asked = 0;
    while (asked < 150 || !driver.idle()) {
      if (asked < 150 && random() % 2 == 0) {
        Request request = with_stops(joined(heads[random() % 3], tiny_prompt(random(), 1 + random() % 150)),
                                     static_cast<uint32_t>(1 + random() % 40));
        request.samples = static_cast<uint32_t>(1 + random() % 3);
        request.sampling.temperature = static_cast<float>(random() % 3) * 0.5f;
        request.prompt_logprobs = random() % 8 == 0;
        if (random() % 4 == 0) request.head_ends = {64};
        driver.ask(std::move(request));
        ++asked;
      }
      if (asked > 0 && random() % 6 == 0) driver.cancel(random() % asked);
      driver.step(random() % 10 == 0 ? StepMode::kProgressOnly : StepMode::kNormal);
      ASSERT_TRUE(driver.violations().empty()) << driver.violations().front();
    }
    for (uint64_t id = 0; id < asked; ++id) {
      EXPECT_TRUE(driver.told(id).ended());
      EXPECT_FALSE(driver.told(id).failed);
    }
    expect_clean(driver);
  }
}

// ---- A pool that is too small

TEST_F(LlamaBatcher, APoolThatIsTooSmallIsNoErrorWithAdmission) {
  Driver driver(TinyEngine::unified(768));
  for (uint64_t i = 0; i < 16; ++i) driver.ask(tiny_prompt(i, 100), 120);
  ASSERT_TRUE(driver.run());
  for (uint64_t id = 0; id < 16; ++id) EXPECT_FALSE(driver.told(id).failed);
  expect_clean(driver);
}

TEST_F(LlamaBatcher, WithoutAdmissionAnOvercommittedPoolStandsStillAndSaysSo) {
  Driver driver(TinyEngine::unified(768));
  driver.admission = false;
  for (uint64_t i = 0; i < 8; ++i) {
    Request request = with_stops(tiny_prompt(i, 90), 128);
    request.stop_ids.clear();
    driver.ask(std::move(request));
  }
  // 8 sequences of up to 217 cells share 768: each gets some, none its last.
  bool stood_still = false;
  for (uint32_t i = 0; i < 400 && !driver.idle() && !stood_still; ++i) stood_still = !driver.step().progressed;
  EXPECT_TRUE(stood_still);
  EXPECT_TRUE(driver.violations().empty());
  // Taking one out is enough for all others to end.
  for (uint64_t id = 0; id < 8 && !driver.idle(); ++id) {
    driver.cancel(id);
    driver.run(400);
  }
  EXPECT_TRUE(driver.idle());
  expect_clean(driver);
}

TEST_F(LlamaBatcher, CountsTheCellsOfAUnifiedPoolOnce) {
  Driver driver(TinyEngine::unified(4096));
  const auto head = tiny_prompt(1, 256);
  for (uint64_t i = 0; i < 4; ++i) driver.ask(joined(head, tiny_prompt(10 + i, 64)), 30);
  driver.step();
  for (uint32_t i = 0; i < 6; ++i) driver.step();
  ASSERT_EQ(driver.inside(), 4u);
  // The head once, four tails, and what was generated.
  const uint64_t used = driver.backend().kv_blocks_used();
  EXPECT_GE(used, 8u);
  EXPECT_LE(used, 9u);
  ASSERT_TRUE(driver.run());
  EXPECT_EQ(driver.backend().kv_blocks_used(), 0u);
}

// ---- Hidden states

std::vector<float> floats(const std::vector<uint8_t>& bytes) {
  std::vector<float> out(bytes.size() / sizeof(float));
  std::memcpy(out.data(), bytes.data(), bytes.size());
  return out;
}

TEST_F(LlamaBatcher, PayloadIsTheStateOfTheLastTokenWhateverRunsBesideIt) {
  Driver driver(TinyEngine::mining({-1, 0, 1}));
  const auto prompt = tiny_prompt(1, 100);
  driver.ask(prompt, 0);
  ASSERT_TRUE(driver.run());
  const std::vector<float> alone = floats(driver.told(0).payload);
  ASSERT_EQ(alone.size(), 3u * kTinyHidden);
  for (uint64_t i = 0; i < 20; ++i) driver.ask(i == 13 ? prompt : tiny_prompt(50 + i, 20 + 5 * i), 0);
  ASSERT_TRUE(driver.run());
  EXPECT_EQ(floats(driver.told(14).payload), alone);
  EXPECT_NE(floats(driver.told(13).payload), alone);
  EXPECT_EQ(driver.told(14).samples[0].reason, IFAB_FINISH_COMPLETE);
  EXPECT_TRUE(driver.told(14).samples[0].tokens.empty());
  // The final norm of the state behind the last block is the state before the output head.
  double square = 0;
  for (size_t i = 2 * kTinyHidden; i < alone.size(); ++i)
    square += static_cast<double>(alone[i]) * static_cast<double>(alone[i]);
  const auto rms = static_cast<float>(std::sqrt(square / kTinyHidden + 1e-5));
  for (size_t i = 0; i < kTinyHidden; ++i) EXPECT_NEAR(alone[i], alone[2 * kTinyHidden + i] / rms, 1e-3f);
  expect_clean(driver);
}

TEST_F(LlamaBatcher, AMiningEngineScoresPromptsBesideTheirPayloads) {
  Driver driver(TinyEngine::mining({-1}));
  Driver generating(TinyEngine{});
  for (uint64_t i = 0; i < 3; ++i) {
    Request scored = plain_request(tiny_prompt(i, 40 + 40 * i), 0);
    scored.prompt_logprobs = true;
    scored.want_payload = true;
    driver.ask(scored);
    driver.ask(scored.prompt, 0);
    scored.max_tokens = 1;
    scored.want_payload = false;
    generating.ask(scored);
  }
  ASSERT_TRUE(driver.run());
  ASSERT_TRUE(generating.run());
  for (uint64_t i = 0; i < 3; ++i) {
    const std::vector<float>& scores = driver.told(2 * i).scores;
    const std::vector<float>& expected = generating.told(i).scores;
    ASSERT_EQ(scores.size(), expected.size());
    for (size_t k = 1; k < scores.size(); ++k) EXPECT_EQ(scores[k], expected[k]) << k;
    EXPECT_EQ(driver.told(2 * i).payload, driver.told(2 * i + 1).payload);
  }
}

TEST_F(LlamaBatcher, PayloadComesInTheFormThatTheEngineSays) {
  const auto prompt = tiny_prompt(1, 100);
  Driver exact(TinyEngine::mining({-1}));
  exact.ask(prompt, 0);
  ASSERT_TRUE(exact.run());
  const std::vector<float> states = floats(exact.told(0).payload);
  for (const char* dtype : {"float16", "bfloat16"}) {
    TinyEngine engine = TinyEngine::mining({-1});
    engine.payload_dtype = dtype;
    Driver driver(engine);
    driver.ask(prompt, 0);
    ASSERT_TRUE(driver.run());
    ASSERT_EQ(driver.told(0).payload.size(), 2 * states.size());
    for (size_t i = 0; i < states.size(); ++i) {
      uint16_t half = 0;
      std::memcpy(&half, driver.told(0).payload.data() + 2 * i, sizeof half);
      float value = 0;
      if (std::string(dtype) == "bfloat16") {
        const uint32_t bits = uint32_t{half} << 16;
        std::memcpy(&value, &bits, sizeof value);
      } else {
        const int exponent = (half >> 10) & 31;
        const auto mantissa = static_cast<float>(half & 1023);
        value = exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
        value = (half >> 15) != 0 ? -value : value;
      }
      EXPECT_NEAR(value, states[i], std::fabs(states[i]) * 0.01f + 1e-4f);
    }
  }
}

// Prompts that hold the broken token, and others beside and after them in the same slots.
std::vector<int32_t> maybe_broken(uint64_t seed, bool broken, int32_t token) {
  std::vector<int32_t> prompt = tiny_prompt(seed, 70 + seed % 50);
  std::replace(prompt.begin(), prompt.end(), token, token + 1);
  if (broken) prompt[prompt.size() - 20] = token;
  return prompt;
}

TEST_F(LlamaBatcher, AnExtractionThatFailsCompletesItsSequenceWithTheReason) {
  TinyEngine engine = TinyEngine::mining({-1});
  engine.broken_token = 200;
  Driver driver(engine);
  for (uint64_t i = 0; i < 40; ++i) driver.ask(maybe_broken(i, i % 5 == 2, 200), 0);
  ASSERT_TRUE(driver.run());
  for (uint64_t id = 0; id < 40; ++id) {
    const Told::Sample& sample = driver.told(id).samples[0];
    EXPECT_EQ(sample.reason, IFAB_FINISH_COMPLETE);
    const bool failed = sample.payload_failure.find("not finite") != std::string::npos;
    EXPECT_EQ(failed, id % 5 == 2) << id << ": " << sample.payload_failure;
  }
  expect_clean(driver);
}

TEST_F(LlamaBatcher, LogitsThatAreNoNumbersFailTheirRequestAndNoOther) {
  TinyEngine engine;
  engine.broken_token = 200;
  Driver driver(engine);
  Driver whole(TinyEngine{});
  for (uint64_t i = 0; i < 40; ++i) {
    driver.ask(maybe_broken(i, i % 5 == 2, 200), 6);
    whole.ask(maybe_broken(i, false, 200), 6);
  }
  ASSERT_TRUE(driver.run());
  ASSERT_TRUE(whole.run());
  for (uint64_t id = 0; id < 40; ++id) {
    ASSERT_EQ(driver.told(id).failed, id % 5 == 2) << id;
    if (driver.told(id).failed) {
      EXPECT_EQ(driver.told(id).status.code(), IFAB_INTERNAL);
    } else {
      EXPECT_EQ(driver.told(id).samples[0], whole.told(id).samples[0]) << id;
    }
  }
  expect_clean(driver);
}

TEST_F(LlamaBatcher, AGeneratingEngineCarriesThePayloadToTheEnd) {
  TinyEngine engine;
  engine.payload_layers = {-1};
  Driver driver(engine);
  Driver mining(TinyEngine::mining({-1}));
  std::vector<std::vector<int32_t>> prompts;
  for (uint64_t i = 0; i < 5; ++i) {
    prompts.push_back(tiny_prompt(i, 50 + 10 * i));
    driver.ask(prompts.back(), 10);
    mining.ask(prompts.back(), 0);
  }
  ASSERT_TRUE(driver.run());
  ASSERT_TRUE(mining.run());
  for (uint64_t id = 0; id < 5; ++id) {
    EXPECT_EQ(driver.told(id).payload, mining.told(id).payload);
    EXPECT_FALSE(driver.told(id).samples[0].tokens.empty());
  }
}

TEST_F(LlamaBatcher, InterruptEndsAStepEarly) {
  Driver driver(TinyEngine{});
  driver.ask(tiny_prompt(1, 100), 10);
  driver.backend().interrupt();
  const StepReport report = driver.backend().step(StepMode::kNormal, driver);
  driver.step();
  ASSERT_FALSE(driver.violations().empty());
  EXPECT_NE(driver.violations().front().find("being destroyed"), std::string::npos);
  EXPECT_TRUE(report.engine_failure.ok()) << "nothing had entered yet";
}

}  // namespace
}  // namespace ifab::test
