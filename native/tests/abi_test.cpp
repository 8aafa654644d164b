// SPDX-License-Identifier: Apache-2.0
// The C interface at its borders: what callers can get wrong, and what each function promises for it.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <fstream>
#include <limits>
#include <string>

#include "client.h"
#include "ifab/engine.h"
#include "simulated_directory.h"

namespace ifab::test {
namespace {

struct Answer {
  ifab_status_t status;
  std::string text;
};

Answer create(const std::filesystem::path& directory) {
  std::array<char, 4096> err{};
  ifab_engine_t* engine = nullptr;
  const ifab_status_t status = ifab_engine_create(directory.c_str(), &engine, err.data(), err.size());
  ifab_engine_destroy(&engine);
  return {status, err.data()};
}

Answer inspect(const std::filesystem::path& directory) {
  std::array<char, 1 << 14> buffer{};
  std::array<char, 512> err{};
  size_t size = 0;
  const ifab_status_t status =
      ifab_engine_inspect(directory.c_str(), buffer.data(), buffer.size(), &size, err.data(), err.size());
  return {status, status == IFAB_OK ? std::string(buffer.data(), size) : err.data()};
}

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST(Abi, NamesEveryStatus) {
  EXPECT_STREQ(ifab_status_name(IFAB_OK), "OK");
  EXPECT_STREQ(ifab_status_name(IFAB_INVALID_ARGUMENT), "INVALID_ARGUMENT");
  EXPECT_STREQ(ifab_status_name(IFAB_DATA_LOSS), "DATA_LOSS");
  EXPECT_STREQ(ifab_status_name(2), "UNKNOWN");
  EXPECT_STREQ(ifab_status_name(-1), "UNKNOWN");
}

TEST(Abi, RefusesADirectoryThatIsNotThere) {
  EXPECT_EQ(create("/nonexistent/engine").status, IFAB_NOT_FOUND);
  EXPECT_EQ(inspect("/nonexistent/engine").status, IFAB_NOT_FOUND);
}

TEST(Abi, SaysWhetherAnEngineCanRunHere) {
  const auto runs_here = [](const char* directory) {
    std::array<char, 512> err{};
    const ifab_status_t status = ifab_engine_runs_here(directory, err.data(), err.size());
    return Answer{status, err.data()};
  };
  const TemporaryDirectory directory;
  EXPECT_EQ(runs_here(directory.path().c_str()).status, IFAB_NOT_FOUND);
  EXPECT_EQ(runs_here(nullptr).status, IFAB_INVALID_ARGUMENT);
  write_simulated_directory(directory.path(), {});
  EXPECT_EQ(runs_here(directory.path().c_str()).status, IFAB_OK);
  std::filesystem::remove(directory.path() / "simulated.json");
  EXPECT_EQ(runs_here(directory.path().c_str()).status, IFAB_OK) << "what is wrong with the directory is not asked";
}

TEST(Abi, CutsMessagesToTheirBuffer) {
  std::array<char, 8> err{};
  err.fill('x');
  ifab_engine_t* engine = nullptr;
  EXPECT_EQ(ifab_engine_create("/nonexistent/engine", &engine, err.data(), 4), IFAB_NOT_FOUND);
  EXPECT_EQ(err[3], '\0');
  EXPECT_EQ(err[4], 'x');
  EXPECT_EQ(engine, nullptr);
}

TEST(Abi, RefusesADirectoryThatNoBackendKnows) {
  const TemporaryDirectory directory;
  write_simulated_directory(directory.path(), {});
  std::filesystem::rename(directory.path() / "simulated.json", directory.path() / "other.json");
  const Answer answer = create(directory.path());
  EXPECT_EQ(answer.status, IFAB_FAILED_PRECONDITION);
  EXPECT_TRUE(has(answer.text, "other.json")) << answer.text;
  EXPECT_TRUE(has(answer.text, "simulated.json (")) << answer.text;
}

TEST(Abi, NamesEveryFindingOfAWrongConfiguration) {
  const TemporaryDirectory directory;
  SimulatedEngine engine;
  engine.slots = 0;
  engine.step_faults.push_back({"stand_on_its_head", 1, 1});
  write_simulated_directory(directory.path(), engine);
  const Answer created = create(directory.path());
  EXPECT_EQ(created.status, IFAB_FAILED_PRECONDITION);
  for (const char* path : {"limits.slots", "simulated.json: slots", "simulated.json: step_faults[0].kind"}) {
    EXPECT_TRUE(has(created.text, path)) << created.text;
    EXPECT_TRUE(has(inspect(directory.path()).text, path));
  }
}

TEST(Abi, InspectsWithoutLoading) {
  const TemporaryDirectory directory;
  SimulatedEngine engine;
  engine.load_ms = 600'000;
  write_simulated_directory(directory.path(), engine);
  const Answer answer = inspect(directory.path());
  EXPECT_EQ(answer.status, IFAB_OK);
  EXPECT_TRUE(has(answer.text, R"("configuration_file":"simulated.json","findings":[])")) << answer.text;
}

TEST(Abi, AsksForTheSizeOfADocument) {
  Client client({});
  size_t size = 0;
  EXPECT_EQ(ifab_engine_describe(client.engine(), nullptr, 0, &size, nullptr, 0), IFAB_OUT_OF_RANGE);
  EXPECT_GT(size, 100u);
  std::string small(size - 1, 'x');
  EXPECT_EQ(ifab_engine_describe(client.engine(), small.data(), small.size(), &size, nullptr, 0), IFAB_OUT_OF_RANGE);
  EXPECT_EQ(small, std::string(size - 1, 'x'));
  EXPECT_EQ(client.describe().size(), size);
  EXPECT_TRUE(has(client.describe(), R"("poll":{"events":1,"tokens":1024,"payload_bytes":0,"text_bytes":512})"));
}

TEST(Abi, ChecksAContractAlone) {
  std::array<char, 1024> buffer{};
  size_t size = 0;
  const std::string wrong = R"({"contract_version": 1, )";
  EXPECT_EQ(ifab_contract_check(wrong.data(), wrong.size(), buffer.data(), buffer.size(), &size, nullptr, 0), IFAB_OK);
  EXPECT_TRUE(has(std::string(buffer.data(), size), R"({"findings":[{"path":"")"));
}

TEST(Abi, RefusesAnEngineThatIsNotWhatItsContractSays) {
  const TemporaryDirectory directory;
  SimulatedEngine engine;
  write_simulated_directory(directory.path(), engine);
  std::filesystem::copy(directory.path() / "contract.json", directory.path() / "kept");
  engine.samples_max = 4;  // two values of the same length as before
  engine.layers = 3;
  write_simulated_directory(directory.path(), engine);
  std::filesystem::rename(directory.path() / "kept", directory.path() / "contract.json");
  const Answer answer = create(directory.path());
  EXPECT_EQ(answer.status, IFAB_FAILED_PRECONDITION);
  EXPECT_TRUE(has(answer.text, "model.layers: engine has 3, expected contract says 4")) << answer.text;
  EXPECT_TRUE(has(answer.text, "capabilities.samples_max: engine has 4")) << answer.text;
}

TEST(Abi, RefusesArgumentsThatCannotBeRead) {
  Client client({});
  uint32_t count = 7;
  EXPECT_EQ(ifab_engine_submit(client.engine(), nullptr, 1, nullptr, nullptr, 0), IFAB_INVALID_ARGUMENT);
  EXPECT_EQ(ifab_engine_submit(client.engine(), nullptr, 0, nullptr, nullptr, 0), IFAB_OK);
  EXPECT_EQ(ifab_engine_cancel(client.engine(), nullptr, 1, &count), IFAB_INVALID_ARGUMENT);
  EXPECT_EQ(ifab_engine_cancel(client.engine(), nullptr, 0, nullptr), IFAB_OK);
  EXPECT_EQ(ifab_engine_poll(client.engine(), nullptr, &count, 0, nullptr, 0), IFAB_INVALID_ARGUMENT);
  EXPECT_EQ(count, 7u);
  ifab_stats_t stats{};
  stats.struct_size = 8;
  EXPECT_EQ(ifab_engine_stats(client.engine(), &stats), IFAB_INVALID_ARGUMENT);
  EXPECT_EQ(ifab_engine_stats(nullptr, &stats), IFAB_INVALID_ARGUMENT);
}

class PollBuffers : public ::testing::Test {
 protected:
  PollBuffers() : client_(SimulatedEngine::mining(64)) {
    buffers_.struct_size = sizeof buffers_;
    buffers_.events = events_.data();
    buffers_.tokens = tokens_.data();
    buffers_.logprobs = logprobs_.data();
    buffers_.payload = payload_.data();
    buffers_.text = text_.data();
    buffers_.events_cap = 4;
    buffers_.tokens_cap = 4;
    buffers_.payload_cap = 1024;
    buffers_.text_cap = 512;
  }

  std::string refusal(int32_t timeout_ms = 0) {
    std::array<char, 256> err{};
    uint32_t count = 7;
    const ifab_status_t status =
        ifab_engine_poll(client_.engine(), &buffers_, &count, timeout_ms, err.data(), err.size());
    EXPECT_EQ(status, IFAB_INVALID_ARGUMENT);
    EXPECT_EQ(count, 7u);
    return err.data();
  }

  Client client_;
  std::array<ifab_event_t, 4> events_{};
  std::array<int32_t, 4> tokens_{};
  std::array<float, 4> logprobs_{};
  alignas(64) std::array<uint8_t, 2048> payload_{};
  std::array<char, 512> text_{};
  ifab_poll_buffers_t buffers_{};
};

TEST_F(PollBuffers, AreEnough) {
  uint32_t count = 7;
  EXPECT_EQ(ifab_engine_poll(client_.engine(), &buffers_, &count, 0, nullptr, 0), IFAB_OK);
  EXPECT_EQ(count, 0u);
}

TEST_F(PollBuffers, OfAnotherRevision) {
  buffers_.struct_size = 8;
  EXPECT_EQ(refusal(), "buffers.struct_size: 8, expected 64");
}

TEST_F(PollBuffers, TooSmallForAnyEvent) {
  buffers_.payload_cap = 100;
  EXPECT_EQ(refusal(), "payload_cap: 100, expected at least 128");
  buffers_.payload_cap = 128;
  buffers_.text_cap = 511;
  EXPECT_EQ(refusal(), "text_cap: 511, expected at least 512");
  buffers_.text_cap = 512;
  buffers_.events_cap = 0;
  EXPECT_EQ(refusal(), "events_cap: 0, expected at least 1");
}

TEST_F(PollBuffers, MissingOrMisaligned) {
  buffers_.payload = payload_.data() + 1;
  EXPECT_EQ(refusal(), "payload: not aligned to 64 bytes");
  buffers_.payload = nullptr;
  EXPECT_EQ(refusal(), "payload_cap: its buffer is NULL");
}

TEST_F(PollBuffers, WithANegativeTimeout) {
  EXPECT_EQ(refusal(-1), "timeout_ms: -1, expected 0 or more");
}

// ---- what submit refuses ----

class Submit : public ::testing::Test {
 protected:
  // The verdict on a request that differs in one thing from one that is accepted.
  template <class Change>
  Verdict verdict(Change change) {
    const std::vector<int32_t> prompt = prompt_of(32, 1);
    Ask ask{.id = next_id_++, .prompt = prompt};
    ifab_request_t request = ask.request();
    change(request);
    ifab_submit_result_t result{};
    std::array<char, 512> text{};
    EXPECT_EQ(ifab_engine_submit(client_.engine(), &request, 1, &result, text.data(), text.size()), IFAB_OK);
    return {result.status, std::string(text.data() + result.text_offset, result.text_size)};
  }
  void expect(ifab_status_t status, const std::string& text, const Verdict& found) {
    EXPECT_EQ(found.status, status) << found.text;
    EXPECT_EQ(found.text, text);
  }

  Client client_{SimulatedEngine{}};
  uint64_t next_id_ = 1;
};

TEST_F(Submit, PromptsOutsideOfTheLimits) {
  expect(IFAB_INVALID_ARGUMENT, "token_ids: 0 tokens, expected 1 to 1024",
         verdict([](ifab_request_t& it) { it.token_count = 0; }));
  expect(IFAB_INVALID_ARGUMENT, "token_ids: 1025 tokens, expected 1 to 1024",
         verdict([](ifab_request_t& it) { it.token_count = 1025; }));
  expect(IFAB_INVALID_ARGUMENT, "token_ids: NULL with a count",
         verdict([](ifab_request_t& it) { it.token_ids = nullptr; }));
}

TEST_F(Submit, IdsOutsideOfTheVocabulary) {
  const int32_t ids[] = {1, 2, 512, -1};
  expect(IFAB_INVALID_ARGUMENT, "token_ids[2]: 512, expected 0 to 511", verdict([&](ifab_request_t& it) {
           it.token_ids = ids;
           it.token_count = 4;
         }));
  expect(IFAB_INVALID_ARGUMENT, "token_ids[0]: -1, expected 0 to 511", verdict([&](ifab_request_t& it) {
           it.token_ids = ids + 3;
           it.token_count = 1;
         }));
  expect(IFAB_INVALID_ARGUMENT, "stop_ids[2]: 512, expected 0 to 511", verdict([&](ifab_request_t& it) {
           it.stop_ids = ids;
           it.stop_count = 4;
         }));
}

TEST_F(Submit, LengthsOutsideOfTheLimits) {
  expect(IFAB_INVALID_ARGUMENT, "max_tokens: 0, expected 1 to 256",
         verdict([](ifab_request_t& it) { it.max_tokens = 0; }));
  expect(IFAB_INVALID_ARGUMENT, "max_tokens: 4294967295, expected 1 to 256",
         verdict([](ifab_request_t& it) { it.max_tokens = UINT32_MAX; }));
  const std::vector<int32_t> longest = prompt_of(1024, 1);
  const auto with_longest = [&](uint32_t max_tokens) {
    return verdict([&](ifab_request_t& it) {
      it.token_ids = longest.data();
      it.token_count = 1024;
      it.max_tokens = max_tokens;
    });
  };
  EXPECT_EQ(with_longest(256).status, IFAB_OK);
  SimulatedEngine shorter;
  shorter.max_sequence_tokens = 1279;
  Client other(shorter);
  expect(IFAB_INVALID_ARGUMENT, "max_tokens: 256, with 1024 prompt tokens expected at most 1279 together",
         other.submit({.id = 1, .prompt = longest, .max_tokens = 256}));
}

TEST_F(Submit, SamplesPriorityAndFlags) {
  expect(IFAB_INVALID_ARGUMENT, "samples: 0, expected 1 to 8", verdict([](ifab_request_t& it) { it.samples = 0; }));
  expect(IFAB_INVALID_ARGUMENT, "samples: 9, expected 1 to 8", verdict([](ifab_request_t& it) { it.samples = 9; }));
  expect(IFAB_INVALID_ARGUMENT, "priority: 101, expected -100 to 100",
         verdict([](ifab_request_t& it) { it.priority = 101; }));
  expect(IFAB_INVALID_ARGUMENT, "flags: 16, expected bits of 15", verdict([](ifab_request_t& it) { it.flags = 16; }));
}

TEST_F(Submit, SamplingOutsideOfItsRanges) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  expect(IFAB_INVALID_ARGUMENT, "sampling.temperature: nan, expected 0 to 100",
         verdict([&](ifab_request_t& it) { it.sampling.temperature = nan; }));
  expect(IFAB_INVALID_ARGUMENT, "sampling.top_p: 0, expected above 0 to 1",
         verdict([](ifab_request_t& it) { it.sampling.top_p = 0; }));
  expect(IFAB_INVALID_ARGUMENT, "sampling.min_p: 1.5, expected 0 to 1",
         verdict([](ifab_request_t& it) { it.sampling.min_p = 1.5F; }));
  expect(IFAB_INVALID_ARGUMENT, "sampling.repetition_penalty: 11, expected above 0 to 10",
         verdict([](ifab_request_t& it) { it.sampling.repetition_penalty = 11; }));
  expect(IFAB_INVALID_ARGUMENT, "sampling.presence_penalty: -3, expected -2 to 2",
         verdict([](ifab_request_t& it) { it.sampling.presence_penalty = -3; }));
  expect(IFAB_INVALID_ARGUMENT, "sampling.frequency_penalty: inf, expected -2 to 2",
         verdict([](ifab_request_t& it) { it.sampling.frequency_penalty = std::numeric_limits<float>::infinity(); }));
  expect(IFAB_INVALID_ARGUMENT, "sampling.top_k: -1, expected 0 or more",
         verdict([](ifab_request_t& it) { it.sampling.top_k = -1; }));
  expect(IFAB_INVALID_ARGUMENT, "sampling.reserved: 1, expected 0",
         verdict([](ifab_request_t& it) { it.sampling.reserved = 1; }));
}

TEST_F(Submit, StopsAndHeads) {
  const std::vector<int32_t> stops(65, 1);
  expect(IFAB_INVALID_ARGUMENT, "stop_ids: 65 ids, expected at most 64", verdict([&](ifab_request_t& it) {
           it.stop_ids = stops.data();
           it.stop_count = 65;
         }));
  const uint32_t heads[] = {8, 8, 32};
  expect(IFAB_INVALID_ARGUMENT, "head_ends[1]: 8, expected ascending lengths above 0 and below token_count, 32",
         verdict([&](ifab_request_t& it) {
           it.head_ends = heads;
           it.head_count = 2;
         }));
  expect(IFAB_INVALID_ARGUMENT, "head_ends[0]: 32, expected ascending lengths above 0 and below token_count, 32",
         verdict([&](ifab_request_t& it) {
           it.head_ends = heads + 2;
           it.head_count = 1;
         }));
}

TEST_F(Submit, WhatTheEngineDoesNotDo) {
  const std::string regex = "[a-z]+";
  expect(IFAB_UNIMPLEMENTED, "guide_kind: regex, which the engine does not enforce", verdict([&](ifab_request_t& it) {
           it.guide_kind = IFAB_GUIDE_REGEX;
           it.guide = regex.data();
           it.guide_size = regex.size();
         }));
  expect(IFAB_INVALID_ARGUMENT, "guide_kind: 4, expected IFAB_GUIDE_*",
         verdict([](ifab_request_t& it) { it.guide_kind = 4; }));
  expect(IFAB_INVALID_ARGUMENT, "guide_size: 5, expected 0 without a guide_kind",
         verdict([](ifab_request_t& it) { it.guide_size = 5; }));
  Client mining(SimulatedEngine::mining(64));
  const auto ask = [&](uint32_t flags, uint32_t samples, uint32_t max_tokens) {
    return mining.submit(
        {.id = 1, .prompt = prompt_of(8, 1), .max_tokens = max_tokens, .samples = samples, .flags = flags});
  };
  expect(IFAB_UNIMPLEMENTED, "flags: PROMPT_LOGPROBS, and the engine does not score prompts",
         ask(IFAB_REQUEST_PROMPT_LOGPROBS, 1, 0));
  expect(IFAB_UNIMPLEMENTED, "flags: LOGPROBS, and the engine generates nothing", ask(IFAB_REQUEST_LOGPROBS, 1, 0));
  expect(IFAB_UNIMPLEMENTED, "samples: 2, and the engine makes one sample of a prompt", ask(0, 2, 0));
  expect(IFAB_INVALID_ARGUMENT, "max_tokens: 1, expected 0: the engine generates nothing", ask(0, 1, 1));
}

TEST(SubmitWhole, RefusesWhatCanNeverFit) {
  SimulatedEngine engine;
  engine.kv_pool_blocks = 10;
  engine.samples_max = 32;
  engine.splits_prompts = false;
  engine.step_token_budget = 64;
  Client client(engine);
  Verdict verdict = client.submit({.id = 1, .prompt = prompt_of(40, 1), .max_tokens = 30, .samples = 4});
  EXPECT_EQ(verdict.status, IFAB_INVALID_ARGUMENT);
  EXPECT_EQ(verdict.text,
            "max_tokens: 40 prompt tokens and 4 samples of 30 tokens need 14 KV blocks of 16, and the pool has 10");
  verdict = client.submit({.id = 1, .prompt = prompt_of(8, 1), .max_tokens = 1, .samples = 17});
  EXPECT_EQ(verdict.text, "samples: 17 need a slot each, and the engine has 16");
  verdict = client.submit({.id = 1, .prompt = prompt_of(65, 1), .max_tokens = 1});
  EXPECT_EQ(verdict.text,
            "token_ids: 65 tokens, at most 64: the engine computes a prompt in one step of at most so many");
}

TEST(SubmitWhole, OneBadRequestHarmsNoNeighbour) {
  Client client({});
  std::vector<Ask> asks;
  for (uint64_t id = 0; id < 16; ++id) asks.push_back({.id = id, .prompt = prompt_of(id == 7 ? 0 : 20, id)});
  const std::vector<Verdict> verdicts = client.submit(asks);
  for (uint64_t id = 0; id < 16; ++id) EXPECT_EQ(verdicts[id].status, id == 7 ? IFAB_INVALID_ARGUMENT : IFAB_OK);
  EXPECT_TRUE(client.drain());
  EXPECT_EQ(client.stats().requests_finished, 15u);
  EXPECT_EQ(client.stats().requests_refused, 1u);
  EXPECT_TRUE(client.violations().empty());
}

TEST(SubmitWhole, PacksMessagesAndCutsWhatDoesNotFit) {
  Client client({});
  std::array<ifab_request_t, 3> requests{};  // no prompt: refused
  std::array<ifab_submit_result_t, 3> results{};
  std::array<char, 50> text{};
  EXPECT_EQ(ifab_engine_submit(client.engine(), requests.data(), 3, results.data(), text.data(), text.size()), IFAB_OK);
  EXPECT_EQ(results[0].text_size, 39u);
  EXPECT_EQ(results[1].text_offset, 39u);
  EXPECT_EQ(results[1].text_size, 11u);
  EXPECT_EQ(results[2].text_size, 0u);
}

TEST(Log, GoesWhereItIsToldAndNoFurther) {
  std::vector<std::string> lines;
  const ifab_log_fn keep = [](void* context, int32_t, const char* component, const char* message) {
    static_cast<std::vector<std::string>*>(context)->push_back(std::string(component) + ": " + message);
  };
  ifab_log_set(keep, &lines, IFAB_LOG_INFO);
  {
    Client client({});
  }
  ifab_log_set(nullptr, nullptr, 0);
  const size_t heard = lines.size();
  {
    Client client({});
  }
  ASSERT_EQ(heard, 1u);
  EXPECT_EQ(lines.size(), heard);
  EXPECT_EQ(lines[0].substr(0, 29), "engine: loaded simulated-test");
}

}  // namespace
}  // namespace ifab::test
