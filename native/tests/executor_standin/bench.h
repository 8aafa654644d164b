// SPDX-License-Identifier: Apache-2.0
//
// An Executor without our backend, for checks of how the stand-in behaves.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "client.h"
#include "control.h"
#include "executor_directory.h"
#include "tensorrt_llm/plugins/api/tllmPlugin.h"

namespace ifab::standin {

namespace trt = tensorrt_llm::executor;

using test::prompt_of;
using test::SimulatedEngine;

// Checks of facts by their names: true where the stand-in with these semantics behaves as the fact says.
using Checks = std::map<std::string_view, std::function<bool(const Semantics&)>>;
const Checks& checks_of_loading();  // construction, and taking requests
const Checks& checks_of_running();  // the batch, answers and ends
const Checks& checks_of_unknown();  // true where the switch says so

inline constexpr std::chrono::seconds kDeadline{60};

// An Executor as a caller without our backend would use it.
class Bench {
 public:
  explicit Bench(const Semantics& semantics, SimulatedEngine engine = small(), Patches patches = {})
      : engine_(std::move(engine)), patches_(std::move(patches)) {
    Control& process = control();
    process.gate.open();
    process.world_size = 1;
    process.semantics = semantics;
    process.cancels.clear();
    process.card_fails = false;
    process.most_active = 0;
    initTrtLlmPlugins();
    config.setMaxBatchSize(static_cast<int32_t>(engine_.slots));
    config.setMaxNumTokens(static_cast<int32_t>(engine_.step_token_budget));
    const auto pool = static_cast<int32_t>(engine_.kv_pool_blocks * engine_.kv_block_tokens);
    if (pool > 0) cache.setMaxTokens(pool);
  }

  static SimulatedEngine small() {
    SimulatedEngine engine;
    engine.slots = 4;
    engine.step_token_budget = 64;
    engine.samples_max = 4;
    engine.kv_pool_blocks = 64;
    return engine;
  }

  trt::Executor& executor() {
    if (executor_ == nullptr) {
      config.setKvCacheConfig(cache);
      write_executor_directory(directory_.path(), engine_, patches_);
      executor_ = std::make_unique<trt::Executor>(directory_.path(), trt::ModelType::kDECODER_ONLY, config);
    }
    return *executor_;
  }
  bool is_refused() {
    try {
      executor();
    } catch (const std::exception&) {
      return true;
    }
    return false;
  }

  trt::IdType ask(const trt::Request& request) { return executor().enqueueRequest(request); }
  trt::IdType ask(size_t prompt, uint64_t salt, int32_t max_tokens) {
    return ask(trt::Request(prompt_of(prompt, salt), max_tokens));
  }

  // Takes what comes until `count` requests are over, or a minute has passed, or the runtime ends.
  const std::vector<trt::Response>& hear(size_t count) {
    const auto deadline = std::chrono::steady_clock::now() + kDeadline;
    size_t over = 0;
    while (over < count && std::chrono::steady_clock::now() < deadline) {
      try {
        for (trt::Response& response : executor().awaitResponses(std::chrono::milliseconds(100))) {
          over += response.hasError() || response.getResult().isFinal ? 1 : 0;
          heard_.push_back(std::move(response));
        }
      } catch (const std::exception&) {
        break;
      }
    }
    return heard_;
  }
  // Everything of one request so far.
  std::vector<trt::Response> of(trt::IdType id) const {
    std::vector<trt::Response> responses;
    for (const trt::Response& response : heard_) {
      if (response.getRequestId() == id) responses.push_back(response);
    }
    return responses;
  }
  bool has_error(trt::IdType id) const {
    const auto responses = of(id);
    return !responses.empty() && responses.back().hasError();
  }
  std::vector<int32_t> tokens(trt::IdType id) const {
    std::vector<int32_t> tokens;
    for (const trt::Response& response : of(id)) {
      const auto& more = response.getResult().outputTokenIds.front();
      tokens.insert(tokens.end(), more.begin(), more.end());
    }
    return tokens;
  }
  // Of the second of two requests for the same prompt, one after the other, each changed as told.
  int32_t reused_blocks(const std::function<void(trt::Request&)>& change);
  trt::IterationStats last_iteration() { return executor().getLatestIterationStats().back(); }

  trt::ExecutorConfig config;
  trt::KvCacheConfig cache;

 private:
  SimulatedEngine engine_;
  Patches patches_;
  test::TemporaryDirectory directory_;
  std::unique_ptr<trt::Executor> executor_;
  std::vector<trt::Response> heard_;
};

inline trt::Request changed(trt::Request request, const std::function<void(trt::OutputConfig&)>& change) {
  trt::OutputConfig output = request.getOutputConfig();
  change(output);
  request.setOutputConfig(output);
  return request;
}

inline trt::Request sampled(trt::Request request, int32_t samples) {
  trt::SamplingConfig sampling;
  sampling.setNumReturnSequences(samples);
  request.setSamplingConfig(sampling);
  return request;
}

// With the input left out, and figures of the cache.
inline trt::Request request_of(size_t prompt, uint64_t salt, int32_t max_tokens) {
  trt::Request request(prompt_of(prompt, salt), max_tokens);
  trt::OutputConfig output;
  output.excludeInputFromOutput = true;
  output.returnPerfMetrics = true;
  request.setOutputConfig(output);
  return request;
}

inline int32_t Bench::reused_blocks(const std::function<void(trt::Request&)>& change) {
  trt::IdType last = 0;
  for (int turn = 0; turn < 2; ++turn) {
    trt::Request request = request_of(48, 1, 2);
    change(request);
    last = ask(request);
    hear(1);
  }
  return of(last).back().getResult().requestPerfMetrics->kvCacheMetrics.numReusedBlocks;
}

// Lets so many iterations pass. False where they do not end in time.
inline bool pass(uint32_t iterations) {
  return control().gate.let_pass(iterations);
}

}  // namespace ifab::standin
