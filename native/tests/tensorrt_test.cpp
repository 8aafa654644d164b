// SPDX-License-Identifier: Apache-2.0
//
// The raw TensorRT backend above the GPU's edge: bindings from enumerations, packing, and the order of launches. The
// enumerations stand in for real engines'; the vendor's packed one is written after TensorRT-LLM 1.2's graph inputs and
// has not been run on a card. The launcher here computes a function of the tokens that a batch hands it.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include "bindings.h"
#include "mining_backend.h"

namespace ifab::tensorrt {
namespace {

ContractValues contract_of(uint32_t budget, uint32_t slots) {
  ContractValues contract;
  contract.model.layers = 2;
  contract.model.hidden_size = 4;
  contract.model.vocab_size = 1000;
  contract.limits.max_input_tokens = 128;
  contract.limits.max_sequence_tokens = 128;
  contract.limits.slots = slots;
  contract.limits.step_token_budget = budget;
  contract.limits.built_step_token_budget = 1024;
  contract.capabilities.payload = ContractValues::Payload{{4}, IFAB_DTYPE_FLOAT32, {-1}};
  return contract;
}

TensorInfo input(std::string name, ElementType type, std::vector<int64_t> extents, std::vector<int64_t> largest) {
  TensorInfo tensor;
  tensor.name = std::move(name);
  tensor.is_input = true;
  tensor.type = type;
  tensor.smallest = extents;
  for (int64_t& extent : tensor.smallest) extent = extent < 0 ? 1 : extent;
  tensor.extents = std::move(extents);
  tensor.largest = std::move(largest);
  return tensor;
}

TensorInfo output(std::string name, ElementType type, std::vector<int64_t> extents) {
  TensorInfo tensor;
  tensor.name = std::move(name);
  tensor.type = type;
  tensor.extents = std::move(extents);
  return tensor;
}

Enumeration rows_engine() {
  Enumeration engine;
  engine.profiles = 1;
  for (const char* name : {"input_ids", "positions", "segments"}) {
    engine.tensors.push_back(input(name, ElementType::kInt32, {-1, 128}, {8, 128}));
  }
  engine.tensors.push_back(input("last_rows", ElementType::kInt32, {-1}, {32}));
  engine.tensors.push_back(output("hidden", ElementType::kFloat32, {-1, 4}));
  return engine;
}

// Each prompt has a row of its own: nothing tells prompts apart within one.
Enumeration own_rows_engine() {
  Enumeration engine = rows_engine();
  engine.tensors.erase(engine.tensors.begin() + 1, engine.tensors.begin() + 3);
  return engine;
}

// TensorRT-LLM's inputs with the attention plugin, packed, KV cache disabled. Everything is reported on the card.
Enumeration packed_engine() {
  Enumeration engine;
  engine.profiles = 1;
  for (const char* name : {"input_ids", "position_ids"}) {
    engine.tensors.push_back(input(name, ElementType::kInt32, {-1}, {1024}));
  }
  for (const char* name : {"last_token_ids", "host_request_types", "context_lengths", "host_context_lengths"}) {
    engine.tensors.push_back(input(name, ElementType::kInt32, {-1}, {32}));
  }
  engine.tensors.push_back(input("host_runtime_perf_knobs", ElementType::kInt64, {16}, {16}));
  engine.tensors.push_back(input("host_context_progress", ElementType::kInt64, {1}, {1}));
  engine.tensors.push_back(input("host_max_attention_window_sizes", ElementType::kInt32, {2}, {2}));
  engine.tensors.push_back(input("host_sink_token_length", ElementType::kInt32, {1}, {1}));
  engine.tensors.push_back(output("hidden", ElementType::kFloat32, {-1, 4}));
  engine.tensors.push_back(output("logits", ElementType::kFloat32, {-1, 1000}));
  return engine;
}

std::vector<Finding> findings_of(const Enumeration& engine, const ContractValues& contract) {
  std::vector<Finding> findings;
  (void)plan_bindings(engine, contract, findings);
  return findings;
}

const Finding* at(const std::vector<Finding>& findings, const std::string& path) {
  for (const Finding& finding : findings) {
    if (finding.path == path) return &finding;
  }
  return nullptr;
}

TEST(TensorRtBindings, RowsEngineIsUnderstood) {
  std::vector<Finding> findings;
  const BindingPlan plan = plan_bindings(rows_engine(), contract_of(1024, 64), findings);
  EXPECT_TRUE(findings.empty()) << findings[0].path;
  EXPECT_FALSE(plan.packed);
  EXPECT_EQ(plan.rows, 8u);
  EXPECT_EQ(plan.tokens, 1024u);
  EXPECT_EQ(plan.prompts, 32u);
  ASSERT_EQ(plan.hidden.size(), 1u);
  EXPECT_EQ(plan.bindings[plan.hidden[0]].bytes, 32u * 4 * 4);
}

TEST(TensorRtBindings, AnEngineOfOwnRowsListsNeitherPositionsNorSegments) {
  std::vector<Finding> findings;
  EXPECT_FALSE(plan_bindings(own_rows_engine(), contract_of(1024, 64), findings).shares_rows);
  EXPECT_TRUE(findings.empty()) << findings[0].path;
  for (const size_t gone : {1u, 2u}) {
    Enumeration half = rows_engine();
    const std::string name = half.tensors[gone].name;
    half.tensors.erase(half.tensors.begin() + static_cast<std::ptrdiff_t>(gone));
    EXPECT_NE(at(findings_of(half, contract_of(1024, 64)), "tensors[" + name + "]"), nullptr) << name;
  }
}

TEST(TensorRtBindings, HostInputsLieOnTheHostWhateverIsReported) {
  std::vector<Finding> findings;
  const BindingPlan plan = plan_bindings(packed_engine(), contract_of(1024, 64), findings);
  EXPECT_TRUE(findings.empty()) << findings[0].path;
  EXPECT_TRUE(plan.packed);
  for (const Binding& binding : plan.bindings) {
    EXPECT_FALSE(binding.tensor.reported_on_host);
    EXPECT_EQ(binding.on_host, binding.tensor.name.starts_with("host_")) << binding.tensor.name;
  }
}

TEST(TensorRtBindings, EveryKindOfDisagreementIsNamed) {
  Enumeration engine = rows_engine();
  engine.tensors[1].type = ElementType::kInt64;
  engine.tensors[2].extents = {-1, 64};
  engine.tensors.erase(engine.tensors.begin() + 3);
  engine.tensors.push_back(input("prompt_embedding_table", ElementType::kFloat16, {-1, 4}, {8, 4}));
  engine.tensors.push_back(input("past_key_value_0", ElementType::kFloat16, {-1, 2}, {8, 2}));
  engine.tensors.push_back(input("weights_shape", ElementType::kInt32, {1}, {1}));
  engine.tensors.back().shape_tensor = true;
  engine.tensors[3].extents = {-1, 128, 4};
  const std::vector<Finding> findings = findings_of(engine, contract_of(1024, 64));
  for (const char* path : {"tensors[positions]", "tensors[segments]", "tensors[last_rows]", "tensors[hidden]",
                           "tensors[prompt_embedding_table]", "tensors[past_key_value_0]", "tensors[weights_shape]"}) {
    EXPECT_NE(at(findings, path), nullptr) << path;
  }
  EXPECT_EQ(at(findings, "tensors[positions]")->found, "int64");
  EXPECT_EQ(at(findings, "tensors[segments]")->expected, "[-1, 128]");
  EXPECT_EQ(at(findings, "tensors[past_key_value_0]")->expected, "an engine without one");
  EXPECT_EQ(at(findings, "tensors[hidden]")->expected, "[-1, 4], gathered to the last token");
}

TEST(TensorRtBindings, NoTensorIsAssumedThatTheEngineDoesNotList) {
  const Enumeration whole = packed_engine();
  for (size_t gone = 0; gone + 1 < whole.tensors.size(); ++gone) {  // the last one, logits, may be absent
    Enumeration engine = whole;
    const std::string name = engine.tensors[gone].name;
    engine.tensors.erase(engine.tensors.begin() + static_cast<std::ptrdiff_t>(gone));
    EXPECT_NE(at(findings_of(engine, contract_of(1024, 64)), "tensors[" + name + "]"), nullptr) << name;
  }
}

TEST(TensorRtBindings, LimitsAgreeWithTheProfile) {
  ContractValues contract = contract_of(1024, 64);
  contract.limits.built_step_token_budget = 2048;
  contract.limits.max_input_tokens = 256;
  contract.limits.max_output_tokens = 8;
  const std::vector<Finding> findings = findings_of(rows_engine(), contract);
  for (const char* path : {"limits.built_step_token_budget", "limits.max_input_tokens", "limits.max_output_tokens"}) {
    EXPECT_NE(at(findings, path), nullptr) << path;
  }
}

TEST(TensorRtBindings, AnOutputThatNobodyReadsHasRoomForWhatIsWritten) {
  Enumeration engine = packed_engine();
  engine.tensors.push_back(output("every_token", ElementType::kFloat16, {-1, 4}));
  std::vector<Finding> findings;
  const auto bytes = [&](const char* name) {
    findings.clear();
    for (const Binding& binding : plan_bindings(engine, contract_of(1024, 64), findings).bindings) {
      if (binding.tensor.name == name) return binding.bytes;
    }
    return uint64_t{0};
  };
  EXPECT_EQ(bytes("every_token"), 1024u * 4 * 2) << "a row for each token of the largest launch, not for each prompt";
  EXPECT_EQ(bytes("hidden"), 32u * 4 * 4);
  engine.tensors.back().most_bytes = 4096;
  EXPECT_EQ(bytes("every_token"), 4096u) << "as the runtime says";
  EXPECT_TRUE(findings.empty());
  engine.tensors.back().most_bytes = 0;
  engine.tensors.back().type = ElementType::kOther;
  EXPECT_EQ(bytes("every_token"), 0u);
  ASSERT_NE(at(findings, "tensors[every_token]"), nullptr);
  EXPECT_EQ(at(findings, "tensors[every_token]")->found, "another type");
}

TEST(TensorRtBindings, WhatALaunchNeedsIsAskedOfContractAndEngine) {
  const auto findings = [](auto change) {
    Enumeration engine = rows_engine();
    ContractValues contract = contract_of(1024, 64);
    change(engine, contract);
    return findings_of(engine, contract);
  };
  using Engine = Enumeration&;
  using Contract = ContractValues&;
  EXPECT_NE(at(findings([](Engine, Contract contract) { contract.limits.step_token_budget = 127; }),
               "limits.step_token_budget"),
            nullptr)
      << "a budget below a row would launch nothing";
  EXPECT_NE(at(findings([](Engine engine, Contract) { engine.profiles = 2; }), "profiles"), nullptr);
  EXPECT_NE(at(findings([](Engine engine, Contract) { engine.tensors[3].largest = {0}; }), "profiles"), nullptr);
  EXPECT_NE(at(findings([](Engine engine, Contract) { engine.tensors[3].smallest = {2}; }), "tensors[last_rows]"),
            nullptr);
  EXPECT_NE(
      at(findings([](Engine, Contract contract) { contract.limits.kv_block_tokens = 16; }), "limits.kv_block_tokens"),
      nullptr);
  EXPECT_NE(
      at(findings([](Engine, Contract contract) { contract.capabilities.payload.reset(); }), "capabilities.payload"),
      nullptr);
  EXPECT_EQ(
      at(findings([](Engine engine, Contract) { engine.tensors[4].type = ElementType::kFloat16; }), "tensors[hidden]")
          ->found,
      "float16");
}

TEST(TensorRtBindings, NoTensorOfACacheIsTaken) {
  // Every input of TensorRT-LLM's graph that an engine without a cache does not have.
  for (const char* name :
       {"sequence_length", "host_past_key_value_lengths", "cache_indirection", "kv_cache_block_offsets",
        "host_kv_cache_block_offsets", "host_kv_cache_pool_pointers", "host_kv_cache_pool_mapping", "past_key_value_0",
        "present_key_value_0", "kv_cache_scale_0"}) {
    Enumeration engine = packed_engine();
    engine.tensors.push_back(input(name, ElementType::kInt32, {-1}, {32}));
    const std::vector<Finding> findings = findings_of(engine, contract_of(1024, 64));
    ASSERT_NE(at(findings, "tensors[" + std::string(name) + "]"), nullptr) << name;
    EXPECT_EQ(at(findings, "tensors[" + std::string(name) + "]")->found, "a tensor of a KV cache") << name;
  }
}

TEST(TensorRtBindings, WhatIsReportedOnTheHostLiesThere) {
  Enumeration engine = packed_engine();
  engine.tensors[1].reported_on_host = true;  // position_ids
  std::vector<Finding> findings;
  const BindingPlan plan = plan_bindings(engine, contract_of(1024, 64), findings);
  EXPECT_TRUE(plan.bindings[1].on_host);
  EXPECT_FALSE(plan.bindings[0].on_host);
}

// Computes, for each prompt of a launch, (sum of its tokens, its length, its first token, its last token), from what
// the batch wrote for the engine and from nothing else.
class Card final : public Launcher {
 public:
  explicit Card(Enumeration engine) : engine_(std::move(engine)) {}
  const Enumeration& enumeration() const override { return engine_; }
  Status prepare(const BindingPlan& plan) override {
    plan_ = plan;
    return {};
  }
  Status launch(const Batch& batch, uint32_t buffer) override {
    ++launches;
    largest_tokens = std::max(largest_tokens, batch.launch_tokens());
    if (launches == refuse) return {IFAB_INTERNAL, "a launch was refused"};
    if (launches == lose) return {IFAB_UNAVAILABLE, "the card is lost"};
    std::map<Role, std::vector<int32_t>> in;
    std::vector<int64_t> extents;
    for (const Binding& binding : plan_.bindings) {
      if (!binding.tensor.is_input) continue;
      std::vector<int32_t> memory(binding.bytes / 4 + 1);
      const uint64_t count = batch.fill(binding, memory.data(), extents);
      EXPECT_EQ(count, std::accumulate(extents.begin(), extents.end(), uint64_t{1},
                                       [](uint64_t a, int64_t b) { return a * static_cast<uint64_t>(b); }));
      EXPECT_LE(count * element_bytes(binding.tensor.type), binding.bytes);
      if (binding.tensor.type == ElementType::kInt64) {
        long_in_[binding.role].resize(count);
        std::memcpy(long_in_[binding.role].data(), memory.data(), count * sizeof(int64_t));
      }
      memory.resize(count);
      in[binding.role] = std::move(memory);
    }
    if (plan_.packed) {
      check_packed(in, batch.size());
    } else if (plan_.shares_rows) {
      check_padding(in, batch.prompt_tokens());
    }
    prompt_tokens = batch.prompt_tokens();
    std::vector<float>& out = outputs_[buffer];
    out.clear();
    std::set<size_t> rows;
    for (size_t prompt = 0; prompt < batch.size(); ++prompt) {
      const std::vector<int32_t>& ids = in[Role::kTokenIds];
      size_t last, begin;
      if (plan_.packed) {
        last = static_cast<size_t>(in[Role::kLastTokenIds][prompt]) - 1;
        begin = last + 1 - static_cast<size_t>(in[Role::kHostContextLengths][prompt]);
      } else {
        last = begin = static_cast<size_t>(in[Role::kLastRows][prompt]);
        if (plan_.shares_rows) {
          while (begin % 128 != 0 && in[Role::kSegments][begin - 1] == in[Role::kSegments][last]) --begin;
        } else {
          begin -= begin % 128;
          EXPECT_TRUE(rows.insert(begin).second) << "two prompts in a row";
        }
      }
      float sum = 0;
      for (size_t i = begin; i <= last; ++i) {
        sum += static_cast<float>(ids[i]);
        if (plan_.packed || plan_.shares_rows) {
          EXPECT_EQ(in[Role::kPositions][i], static_cast<int32_t>(i - begin));
        }
      }
      for (const float value :
           {sum, static_cast<float>(last - begin + 1), static_cast<float>(ids[begin]), static_cast<float>(ids[last])}) {
        out.push_back(zeros ? 0 : value);
      }
    }
    under_way[buffer] = true;
    return {};
  }
  Status collect(uint32_t buffer) override {
    EXPECT_TRUE(under_way[buffer]);
    under_way[buffer] = false;
    return {};
  }
  std::span<const uint8_t> output(uint32_t buffer, size_t) const override {
    return {reinterpret_cast<const uint8_t*>(outputs_[buffer].data()), outputs_[buffer].size() * 4};
  }

  bool zeros = false;
  int launches = 0, refuse = -1, lose = -1;
  uint32_t largest_tokens = 0;
  uint32_t prompt_tokens = 0;  // of the last launch
  std::array<bool, kBuffers> under_way{};

 private:
  // Values of the packed inputs that say nothing of a prompt's tokens.
  void check_packed(std::map<Role, std::vector<int32_t>>& in, size_t prompts) {
    EXPECT_EQ(in[Role::kRequestTypes], std::vector<int32_t>(prompts, 0)) << "context phase";
    EXPECT_EQ(in[Role::kContextLengths], in[Role::kHostContextLengths]);
    EXPECT_EQ(in[Role::kAttentionWindows], (std::vector<int32_t>{128, 128})) << "the longest prompt, for each layer";
    EXPECT_EQ(in[Role::kSinkTokens], std::vector<int32_t>{0});
    EXPECT_EQ(long_in_[Role::kContextProgress], std::vector<int64_t>{0});
    std::vector<int64_t> knobs(16, -1);
    knobs[0] = 1;
    knobs[1] = 0;
    EXPECT_EQ(long_in_[Role::kPerfKnobs], knobs);
  }
  static void check_padding(std::map<Role, std::vector<int32_t>>& in, size_t tokens) {
    const std::vector<int32_t>& segments = in[Role::kSegments];
    EXPECT_EQ(std::count_if(segments.begin(), segments.end(), [](int32_t segment) { return segment >= 0; }),
              static_cast<std::ptrdiff_t>(tokens))
        << "what is no prompt's is of no segment";
  }

  std::map<Role, std::vector<int64_t>> long_in_;
  Enumeration engine_;
  BindingPlan plan_;
  std::array<std::vector<float>, kBuffers> outputs_;
};

class Ends final : public Sink {
 public:
  void prompt_computed(uint64_t, uint32_t tokens) override { computed += tokens; }
  void tokens(uint64_t, uint32_t, std::span<const int32_t>, std::span<const float>) override { FAIL(); }
  void context_done(uint64_t id, uint32_t, uint32_t, std::span<const float>) override { contexts.push_back(id); }
  uint8_t* payload(uint64_t id) override { return reinterpret_cast<uint8_t*>(payloads[id].data()); }
  void finished(uint64_t id, uint32_t, int32_t reason, int32_t, std::string_view failure) override {
    EXPECT_EQ(reason, IFAB_FINISH_COMPLETE);
    EXPECT_TRUE(ends.emplace(id, failure).second) << "ended twice";
  }
  void failed(uint64_t, const Status&) override { FAIL(); }

  uint64_t computed = 0;
  std::vector<uint64_t> contexts;
  std::map<uint64_t, std::array<float, 4>> payloads;
  std::map<uint64_t, std::string> ends;
};

class TensorRtMining : public ::testing::TestWithParam<Enumeration (*)()> {
 protected:
  void make(uint32_t budget, uint32_t slots) {
    const ContractValues contract = contract_of(budget, slots);
    auto card = std::make_unique<Card>(GetParam()());
    card_ = card.get();
    std::vector<Finding> findings;
    BindingPlan plan = plan_bindings(card->enumeration(), contract, findings);
    ASSERT_TRUE(findings.empty());
    ASSERT_TRUE(card->prepare(plan).ok());
    backend_ = std::make_unique<MiningBackend>(contract, std::move(plan), std::move(card));
  }
  const Request& request(uint64_t id, uint32_t length) {
    auto made = std::make_unique<Request>();
    made->id = id;
    for (uint32_t i = 0; i < length; ++i) made->prompt.push_back(static_cast<int32_t>((id * 37 + i * 11) % 1000));
    made->want_payload = true;
    requests_[id] = std::move(made);
    return *requests_[id];
  }
  void drain(Ends& ends) {
    for (int step = 0; step < 1000; ++step) {
      const StepReport report = backend_->step(StepMode::kNormal, ends);
      ASSERT_TRUE(report.engine_failure.ok());
      if (!report.progressed) return;
    }
    FAIL() << "no end";
  }
  void expect_right(const Ends& ends, uint64_t id) {
    const std::vector<int32_t>& prompt = requests_[id]->prompt;
    const std::array<float, 4> wanted = {static_cast<float>(std::accumulate(prompt.begin(), prompt.end(), 0)),
                                         static_cast<float>(prompt.size()), static_cast<float>(prompt.front()),
                                         static_cast<float>(prompt.back())};
    EXPECT_EQ(ends.payloads.at(id), wanted) << id;
    EXPECT_EQ(ends.ends.at(id), "") << id;
  }

  Card* card_ = nullptr;
  std::unique_ptr<MiningBackend> backend_;
  std::map<uint64_t, std::unique_ptr<Request>> requests_;
};

TEST_P(TensorRtMining, EveryPromptGetsItsOwnStates) {
  make(1024, 256);
  ASSERT_TRUE(backend_->prove().ok());
  EXPECT_EQ(card_->prompt_tokens, 2u) << "of one, a row for each token and one for each prompt are the same";
  Ends ends;
  for (uint64_t id = 1; id <= 200; ++id) {
    ASSERT_EQ(backend_->admit(request(id, static_cast<uint32_t>(1 + id * 53 % 128))).outcome, AdmitOutcome::kAdmitted);
  }
  drain(ends);
  ASSERT_EQ(ends.ends.size(), 200u);
  for (uint64_t id = 1; id <= 200; ++id) expect_right(ends, id);
  EXPECT_LE(card_->largest_tokens, 1024u);
  EXPECT_GT(card_->launches, 200 * 64 / 1024);
  EXPECT_EQ(backend_->room().slots, 256u);
  EXPECT_EQ(backend_->room().step_tokens, 0u);
}

TEST_P(TensorRtMining, BudgetBelowTheProfileIsKept) {
  make(256, 64);
  Ends ends;
  for (uint64_t id = 1; id <= 64; ++id) backend_->admit(request(id, 100));
  EXPECT_EQ(backend_->admit(request(65, 1)).outcome, AdmitOutcome::kNoRoom);
  drain(ends);
  EXPECT_LE(card_->largest_tokens, 256u);
  EXPECT_EQ(ends.ends.size(), 64u);
}

TEST_P(TensorRtMining, ABatchOfTwoThousandIsLaunchesOfLittlePadding) {
  make(1024, 2000);
  Ends ends;
  uint32_t tokens = 0;
  for (uint64_t id = 1; id <= 2000; ++id) {
    const auto length = static_cast<uint32_t>(1 + id * 53 % 128);
    tokens += length;
    ASSERT_EQ(backend_->admit(request(id, length)).outcome, AdmitOutcome::kAdmitted);
  }
  (void)backend_->step(StepMode::kNormal, ends);
  EXPECT_TRUE(ends.ends.empty()) << "a step launches, and collects the launch before";
  (void)backend_->step(StepMode::kNormal, ends);
  EXPECT_EQ(card_->launches, 2);
  EXPECT_FALSE(ends.ends.empty());
  EXPECT_TRUE(card_->under_way[1]) << "the second hides the copy back of the first";
  drain(ends);
  ASSERT_EQ(ends.ends.size(), 2000u);
  EXPECT_LE(card_->largest_tokens, 1024u);
  // 32 prompts a launch bound it, too: short ones, of which rows take several, fill the last launches.
  const uint32_t least = std::max(tokens / 1024, 2000u / 32) + 1;
  const bool shares = GetParam() != &own_rows_engine;
  EXPECT_LE(card_->launches, static_cast<int>(shares ? 2 * least : 2000 / 8 + 1));
}

TEST_P(TensorRtMining, LongPromptsGoFirstAndShortOnesFillTheRows) {
  make(256, 64);
  if (GetParam() != &rows_engine) return;
  Ends ends;
  for (uint64_t id = 1; id <= 4; ++id) backend_->admit(request(id, id > 2 ? 100 : 28));
  drain(ends);
  EXPECT_EQ(card_->launches, 1) << "in order of arrival the short ones would share a row, and no long one with them";
}

TEST_P(TensorRtMining, OutputsOfZerosAreNoProof) {
  make(256, 64);
  card_->zeros = true;
  EXPECT_NE(backend_->prove().message().find("output hidden is all zeros"), std::string::npos);
}

TEST_P(TensorRtMining, ARefusedLaunchCompletesItsSequencesAndNothingElseIsTouched) {
  make(256, 64);
  card_->refuse = 2;
  Ends ends;
  for (uint64_t id = 1; id <= 20; ++id) backend_->admit(request(id, 100));
  drain(ends);
  ASSERT_EQ(ends.ends.size(), 20u);
  const auto failed = std::count_if(ends.ends.begin(), ends.ends.end(),
                                    [](const auto& end) { return end.second == "a launch was refused"; });
  EXPECT_EQ(failed, 2);
  EXPECT_EQ(backend_->room().slots, 64u);
}

TEST_P(TensorRtMining, ALostCardIsAnEngineFailure) {
  make(256, 64);
  card_->lose = 1;
  Ends ends;
  backend_->admit(request(1, 10));
  EXPECT_EQ(backend_->step(StepMode::kNormal, ends).engine_failure.code(), IFAB_UNAVAILABLE);
}

TEST_P(TensorRtMining, CancelledBeforeAndDuringTheLaunchAreNotHeardOf) {
  make(256, 64);
  Ends ends;
  for (uint64_t id = 1; id <= 8; ++id) backend_->admit(request(id, 100));
  backend_->cancel(8);
  requests_.erase(8);
  (void)backend_->step(StepMode::kNormal, ends);  // launches some, collects none yet
  backend_->cancel(1);
  requests_.erase(1);  // its owner frees it: the launch under way must not look at it
  backend_->cancel(1);
  backend_->cancel(99);
  drain(ends);
  EXPECT_EQ(ends.ends.size(), 6u);
  EXPECT_FALSE(ends.ends.contains(1));
  EXPECT_FALSE(ends.ends.contains(8));
  EXPECT_EQ(backend_->room().slots, 64u);
}

TEST(TensorRtPlugins, WhichOneIsMissingIsReadFromTheComplaint) {
  EXPECT_EQ(missing_plugin("IPluginRegistry::getCreator: Error Code 4: API Usage Error (Cannot find plugin: "
                           "ifab_packed_attention, version: 1, namespace:ifab.)"),
            "ifab_packed_attention");
  EXPECT_EQ(missing_plugin("could not find plugin Gelu version 1"), "Gelu");
  EXPECT_EQ(missing_plugin("could not find plugin"), "");
  EXPECT_EQ(missing_plugin("Serialization assertion failed"), "");
}

INSTANTIATE_TEST_SUITE_P(Layouts, TensorRtMining, ::testing::Values(&rows_engine, &own_rows_engine, &packed_engine),
                         [](const auto& layout) {
                           if (layout.param == &packed_engine) return "packed";
                           return layout.param == &rows_engine ? "rows" : "own_rows";
                         });

}  // namespace
}  // namespace ifab::tensorrt
