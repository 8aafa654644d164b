// SPDX-License-Identifier: Apache-2.0
//
// What the runtime is called with: how often it reads the weights, how prompts share a read, what a profile says of it.
// The linker puts a counter between the runtime and its computing of one graph, which is one read of all weights.
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>

#include "ggml-backend.h"
#include "llama_support/driver.h"
#include "session.h"
#include "step_profile.h"

namespace {

uint64_t reads = 0;

}  // namespace

extern "C" {
ggml_status __real_ggml_backend_sched_graph_compute_async(ggml_backend_sched_t scheduler, ggml_cgraph* graph);
ggml_status __wrap_ggml_backend_sched_graph_compute_async(ggml_backend_sched_t scheduler, ggml_cgraph* graph);
ggml_status __wrap_ggml_backend_sched_graph_compute_async(ggml_backend_sched_t scheduler, ggml_cgraph* graph) {
  ++reads;
  return __real_ggml_backend_sched_graph_compute_async(scheduler, graph);
}
}

namespace ifab::test {
namespace {

constexpr uint32_t kHead = 128, kTail = 20;

class LlamaCalls : public ::testing::Test {
 protected:
  static TinyEngine engine() {
    TinyEngine engine;
    engine.reproducible = false;
    return engine;
  }

  // A prompt that begins with the head of a group, and goes on alone.
  static Request prompt(uint64_t group, uint64_t seed, uint32_t max_tokens) {
    std::vector<int32_t> tokens = random_prompt(group, kHead, tiny_vocab_size());
    const auto tail = random_prompt(1000 + seed, kTail, tiny_vocab_size());
    tokens.insert(tokens.end(), tail.begin(), tail.end());
    return plain_request(std::move(tokens), max_tokens);
  }

  // Reads of a step that computes prompts, those of its sequences that generate left out.
  static uint64_t reads_for_prompts(Driver& driver) {
    const uint64_t before = reads;
    driver.step();
    return reads - before - 1;
  }
};

TEST_F(LlamaCalls, FollowersOfAHeadEnterTogetherAndAreComputedInOneRead) {
  Driver driver(engine());
  driver.ask(prompt(1, 0, 50));
  driver.step();
  for (uint64_t i = 1; i < 8; ++i) driver.ask(prompt(1, i, 50));
  EXPECT_EQ(reads_for_prompts(driver), 1u);
  EXPECT_EQ(driver.inside(), 8u);
  for (uint64_t id = 1; id < 8; ++id) EXPECT_EQ(driver.told(id).computed, kTail);
  EXPECT_TRUE(driver.violations().empty());
}

TEST_F(LlamaCalls, PromptsThatBeginTogetherTakeTheRunOfFreeIdsThatFitsThem) {
  for (const uint64_t begin : {1u, 2u, 3u, 4u}) {
    Driver driver(engine());
    // Ids 0 to 7, and then free: 1, 3 and 4, 6.
    for (uint64_t i = 0; i < 8; ++i) driver.ask(prompt(1, i, i == 1 || i == 3 || i == 4 || i == 6 ? 4 : 60));
    while (driver.inside() > 4 || driver.steps < 2) driver.step();
    for (uint64_t i = 0; i < begin; ++i) driver.ask(prompt(1, 20 + i, 60));
    // One takes 1; two take 3 and 4; more take these and then the others.
    EXPECT_EQ(reads_for_prompts(driver), begin <= 2 ? 1 : begin - 1) << begin;
    ASSERT_TRUE(driver.run());
    for (uint64_t id = 8; id < 8 + begin; ++id) EXPECT_EQ(driver.told(id).samples[0].tokens.size(), 60u);
    EXPECT_TRUE(driver.violations().empty());
  }
}

TEST_F(LlamaCalls, RoomIsWhatAStepWillCompute) {
  Driver driver(engine());
  driver.ask(prompt(1, 0, 50));
  driver.step();
  const Request follower = prompt(1, 1, 50);
  ASSERT_EQ(driver.backend().admit(follower).outcome, AdmitOutcome::kAdmitted);
  EXPECT_EQ(driver.backend().room().step_tokens, 1 + kTail) << "and not the head, which is there";
  driver.backend().cancel(follower.id);
}

TEST_F(LlamaCalls, ShapesTellHowOftenTheWeightsAreRead) {
  TemporaryDirectory directory;
  TinyEngine tiny = engine();
  tiny.sequence_tokens = 256;
  write_tiny_directory(directory.path(), tiny);
  llama::Config config;
  config.slots = config.resident_heads = 8;
  config.sequence_tokens = config.step_token_budget = 256;
  config.threads = config.batch_threads = 1;
  std::unique_ptr<llama::Session> session;
  ASSERT_TRUE(llama::Session::open(config, directory.path() / "model.gguf", nullptr, session).ok());
  std::mt19937_64 random(3);
  for (int round = 0; round < 60; ++round) {
    session->clear_batch();
    for (int32_t id = 0; id < 16; ++id) {
      session->drop(id);
      if (random() % 3 == 0) continue;
      const auto rows = static_cast<uint32_t>(1 + random() % 3);
      for (uint32_t row = 0; row < rows; ++row) session->add_row(id, 5, row, row + 1 == rows);
    }
    if (session->rows() == 0) continue;
    const uint32_t told = session->shape().reads;
    const uint64_t before = reads;
    ASSERT_EQ(session->decode(), llama::Session::Outcome::kDone);
    EXPECT_EQ(told, reads - before);
  }
}

TEST_F(LlamaCalls, AProfileAddsUpToWhatWasDone) {
  TemporaryDirectory directory;
  const std::string path = directory.path() / "profile.jsonl";
  ASSERT_EQ(setenv(llama::kProfileVariable, path.c_str(), 1), 0);
  for (const bool unified : {false, true}) {
    Driver driver(unified ? TinyEngine::unified(2048) : engine());
    const uint64_t before = reads;
    uint64_t generated = 0;
    for (uint64_t i = 0; i < 20; ++i) driver.ask(prompt(i % 3, i, 1 + static_cast<uint32_t>(i) % 5));
    for (uint64_t i = 0; i < 20; ++i) generated += i % 5;  // the first token of each comes with its prompt
    ASSERT_TRUE(driver.run());
    const uint64_t done = reads - before;
    driver.step();  // of an engine that has nothing to do
    std::ifstream lines(path);
    std::string line;
    for (int skip = unified ? 1 : 0; skip >= 0; --skip) ASSERT_TRUE(std::getline(lines, line));
    const auto said = nlohmann::json::parse(line);
    uint64_t rows = 0, reads_told = 0, copies = 0;
    double seconds = 0;
    for (const auto& call : said["calls"]) {
      rows += call["tokens"].get<uint64_t>();
      reads_told += call["reads"].get<uint64_t>();
      copies += call["copies"].get<uint64_t>();
      seconds += call["seconds"].get<double>();
      EXPECT_GE(call["sequences"].get<uint64_t>(), call["calls"].get<uint64_t>());
    }
    EXPECT_EQ(rows, driver.prompt_tokens + generated + said["fillers"].get<uint64_t>());
    EXPECT_EQ(reads_told, done);
    EXPECT_EQ(said["steps"].get<uint64_t>(), driver.steps - 1);
    EXPECT_EQ(copies == 0, unified);
    EXPECT_GT(seconds, 0.0);
    EXPECT_GE(said["steps_s"].get<double>(), seconds);
    EXPECT_FALSE(std::getline(lines, line)) << line;
  }
  ASSERT_EQ(unsetenv(llama::kProfileVariable), 0);
}

}  // namespace
}  // namespace ifab::test
