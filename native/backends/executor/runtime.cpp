// SPDX-License-Identifier: Apache-2.0
#include "runtime.h"

#include <atomic>
#include <exception>
#include <future>
#include <new>
#include <string_view>
#include <thread>
#include <utility>

#include "engine_tensors.h"
#include "executor_config.h"
#include "log.h"
#include "schema.h"
#include "tensorrt_llm/plugins/api/tllmPlugin.h"
#include "text.h"

namespace ifab::executor {
namespace {

namespace trt = tensorrt_llm::executor;

constexpr std::chrono::seconds kEndBeyondLongestStep{5};
constexpr size_t kVendorTextBytes = 800;

// True while an Executor lives in this process.
std::atomic<bool> occupied{false};

// Gives the process back unless an Executor was made.
class Claim {
 public:
  Claim() : mine_(!occupied.exchange(true)) {}
  ~Claim() {
    if (mine_) occupied = false;
  }
  Claim(const Claim&) = delete;
  Claim& operator=(const Claim&) = delete;
  bool mine() const { return mine_; }
  void keep() { mine_ = false; }

 private:
  bool mine_;
};

// Once a process, before the first engine is opened: engines hold plugins by name. Called by whoever has the claim.
bool register_plugins() {
  static bool registered = false;
  if (!registered) registered = initTrtLlmPlugins();
  return registered;
}

Status refused(std::string_view what, std::string_view words) {
  const auto says = [&](const char* text) { return words.find(text) != std::string_view::npos; };
  std::string message = std::string(what) + ": " + std::string(cut_text(words, kVendorTextBytes));
  if (says("out of memory") || says("OutOfMemory")) return {IFAB_RESOURCE_EXHAUSTED, std::move(message)};
  if (says("no CUDA-capable device") || says("driver version is insufficient")) {
    return {IFAB_UNAVAILABLE, std::move(message)};
  }
  return {IFAB_FAILED_PRECONDITION, std::move(message)};
}

Status check_release(const ContractValues& contract) {
  if (contract.runtime.version == trt::version()) return {};
  return {IFAB_FAILED_PRECONDITION,
          "runtime.version: " + contract.runtime.version + ", and this is TensorRT-LLM " + trt::version()};
}

Status check_payload(const std::string& directory, const Settings& settings, const ContractValues& contract) {
  if (settings.payload_outputs.empty()) return {};
  std::vector<tensorrt::TensorInfo> tensors;
  if (Status status = list_tensors(directory + "/" + rank_file(0), contract, settings.devices.front(), tensors);
      !status.ok()) {
    return status;
  }
  std::vector<Finding> findings;
  check_outputs(settings.payload_outputs, tensors, contract, findings);
  return findings.empty() ? Status() : Status(IFAB_FAILED_PRECONDITION, describe(findings));
}

}  // namespace

Status Runtime::open(const std::string& directory, const Settings& settings, const ContractValues& contract,
                     std::unique_ptr<Runtime>& out) {
  Claim claim;
  if (!claim.mine()) {
    return {IFAB_FAILED_PRECONDITION, "an engine of this runtime lives in the process already: one process an engine"};
  }
  if (Status status = check_release(contract); !status.ok()) return status;
  if (!register_plugins()) return {IFAB_FAILED_PRECONDITION, "the plugins of TensorRT-LLM could not be registered"};
  if (Status status = check_payload(directory, settings, contract); !status.ok()) return status;
  Vocabulary vocabulary;
  if (settings.guided_decoding) {
    const std::string path = directory + "/" + contract.tokenizer.file;
    if (Status status = read_vocabulary(path, contract.model.vocab_size, vocabulary); !status.ok()) return status;
  }
  // Only the base class of exceptions is named: those of the runtime live in a namespace that changes with its version.
  try {
    const trt::ExecutorConfig config = make_executor_config(settings, contract, vocabulary);
    auto executor = std::make_unique<trt::Executor>(directory, trt::ModelType::kDECODER_ONLY, config);
    const auto limit = std::chrono::milliseconds(contract.limits.longest_step_ms) + kEndBeyondLongestStep;
    out.reset(new Runtime(std::move(executor), limit));
  } catch (const std::bad_alloc&) {
    return {IFAB_RESOURCE_EXHAUSTED, "not enough memory for the runtime"};
  } catch (const std::exception& error) {
    return refused("the runtime refuses the engine", error.what());
  }
  claim.keep();
  return {};
}

Runtime::Runtime(std::unique_ptr<trt::Executor> executor, std::chrono::milliseconds limit)
    : executor_(std::move(executor)), limit_(limit) {}

Runtime::~Runtime() {
  // Its destructor waits until every request has ended, and there is no watchdog inside: a card that hangs would hold
  // this thread for ever.
  std::promise<void> promise;
  std::future<void> ended = promise.get_future();
  std::thread([executor = std::move(executor_), unfinished = std::move(unfinished_),
               promise = std::move(promise)]() mutable {
    try {
      for (const trt::IdType id : unfinished) executor->cancelRequest(id);
      executor->shutdown();
    } catch (const std::exception& error) {
      log(IFAB_LOG_WARNING, "executor", std::string("shutting down: ") + error.what());
    }
    executor.reset();
    occupied = false;
    promise.set_value();
  }).detach();
  if (ended.wait_for(limit_) == std::future_status::timeout) {
    log(IFAB_LOG_ERROR, "executor",
        "the runtime does not end; it is left behind and holds the card until the process ends");
  }
}

}  // namespace ifab::executor
