// SPDX-License-Identifier: Apache-2.0
//
// The stand-in for the vendor's Executor: a queue, a thread with a loop, answers, statistics. What happens in an
// iteration is in batch.cpp.
#include "tensorrt_llm/executor/executor.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <set>
#include <stdexcept>
#include <thread>

#include "batch.h"
#include "control.h"
#include "engine_file.h"

namespace tensorrt_llm::executor {
namespace {

using ifab::standin::Batch;
using ifab::standin::control;
using ifab::standin::EngineFile;
using ifab::standin::Queued;
using ifab::standin::Semantics;

constexpr std::chrono::milliseconds kEmptyPass{1};  // an iteration that does nothing takes time, too

template <class T>
void note(std::vector<std::string>& names, const char* name, const Stated<T>& field) {
  if (!field.stated) names.emplace_back(name);
}

void join(std::vector<std::string>& names, const char* of, const std::vector<std::string>& others) {
  for (const std::string& other : others) names.push_back(std::string(of) + "." + other);
}

// What the vendor's constructors refuse.
void check(const EngineFile& engine, const ExecutorConfig& config) {
  const Semantics& semantics = engine.semantics;
  if (semantics.plugins_come_first && !control().plugins_registered) {
    throw std::runtime_error("a plugin of the engine is not in the registry");
  }
  if (semantics.world_must_match && static_cast<uint32_t>(control().world_size) != engine.ranks) {
    throw std::runtime_error("the world has another size than the engine has ranks");
  }
  for (const AdditionalModelOutput& output :
       config.additionalOutputs.value.value_or(std::vector<AdditionalModelOutput>())) {
    const auto has = [&](const ifab::tensorrt::TensorInfo& tensor) {
      return tensor.name == output.name && tensor.extents.front() != -1;
    };
    if (semantics.outputs_need_dynamic_rows && std::any_of(engine.tensors.begin(), engine.tensors.end(), has)) {
      throw std::runtime_error("the first dimension of an additional output has to be dynamic");
    }
  }
  const auto& guides = config.guidedDecoding.value;
  if (semantics.llguidance_is_refused && guides &&
      guides->getBackend() == GuidedDecodingConfig::GuidedDecodingBackend::kLLGUIDANCE) {
    throw std::runtime_error("llguidance is not supported by this runtime");
  }
  if (semantics.padded_engines_are_refused && !engine.in_flight) {
    throw std::runtime_error("in-flight batching needs packed input and a paged cache");
  }
  if (!engine.cached && (!semantics.accepts_engines_without_cache ||
                         (engine.paged_attention && !semantics.accepts_paged_attention_without_cache))) {
    throw std::runtime_error("the engine has no cache");
  }
  if (semantics.batch_beyond_engine_throws &&
      static_cast<uint32_t>(config.maxBatchSize.value.value_or(0)) > engine.max_batch_size) {
    throw std::runtime_error("the batch is larger than the engine's");
  }
  if (semantics.paged_attention_needs_onboarding && engine.cached && engine.paged_attention &&
      !config.kvCache.value.onboardBlocks.value) {
    throw std::runtime_error("paged context attention needs onboarding of blocks");
  }
}

}  // namespace

char const* version() noexcept {
  return "1.2.1";
}

void require(bool holds, char const* what) {
  if (holds || !control().semantics.value_or(Semantics{}).setters_check_values) return;
  throw std::runtime_error(std::string("Assertion failed: ") + what);
}

std::vector<std::string> KvCacheConfig::unstated() const {
  std::vector<std::string> names = {"crossKvCacheFraction"};  // for engines with an encoder; no setter here
  note(names, "enableBlockReuse", enableBlockReuse);
  note(names, "enablePartialReuse", enablePartialReuse);
  note(names, "copyOnPartialReuse", copyOnPartialReuse);
  note(names, "maxTokens", maxTokens);
  note(names, "maxAttentionWindowVec", maxAttentionWindowVec);
  note(names, "sinkTokenLength", sinkTokenLength);
  note(names, "freeGpuMemoryFraction", freeGpuMemoryFraction);
  note(names, "hostCacheSize", hostCacheSize);
  note(names, "onboardBlocks", onboardBlocks);
  note(names, "secondaryOffloadMinPriority", secondaryOffloadMinPriority);
  note(names, "eventBufferMaxSize", eventBufferMaxSize);
  note(names, "useUvm", useUvm);
  note(names, "attentionDpEventsGatherPeriodMs", attentionDpEventsGatherPeriodMs);
  note(names, "maxGpuTotalBytes", maxGpuTotalBytes);
  return names;
}

std::vector<std::string> ExtendedRuntimePerfKnobConfig::unstated() const {
  std::vector<std::string> names;
  note(names, "multiBlockMode", multiBlockMode);
  note(names, "enableContextFMHAFP32Acc", enableContextFMHAFP32Acc);
  note(names, "cudaGraphMode", cudaGraphMode);
  note(names, "cudaGraphCacheSize", cudaGraphCacheSize);
  return names;
}

std::vector<std::string> ParallelConfig::unstated() const {
  std::vector<std::string> names;
  note(names, "type", type);
  note(names, "mode", mode);
  note(names, "deviceIds", deviceIds);
  note(names, "numNodes", numNodes);
  return names;
}

std::vector<std::string> ExecutorConfig::unstated() const {
  // Parts of the vendor's that have no setter here, because the backend offers none of them.
  std::vector<std::string> names = {"peftCache", "logitsPostProcessor", "debug", "specDec", "cacheTransceiver"};
  note(names, "maxBeamWidth", maxBeamWidth);
  note(names, "maxBatchSize", maxBatchSize);
  note(names, "maxNumTokens", maxNumTokens);
  note(names, "scheduler", scheduler);
  note(names, "kvCache", kvCache);
  join(names, "kvCache", kvCache.value.unstated());
  note(names, "enableChunkedContext", enableChunkedContext);
  note(names, "normalizeLogProbs", normalizeLogProbs);
  note(names, "iterStatsMaxIterations", iterStatsMaxIterations);
  note(names, "requestStatsMaxIterations", requestStatsMaxIterations);
  note(names, "batchingType", batchingType);
  note(names, "parallel", parallel);
  if (parallel.value) join(names, "parallel", parallel.value->unstated());
  note(names, "decoding", decoding);
  note(names, "useGpuDirectStorage", useGpuDirectStorage);
  note(names, "gpuWeightsPercent", gpuWeightsPercent);
  note(names, "maxQueueSize", maxQueueSize);
  note(names, "perfKnobs", perfKnobs);
  join(names, "perfKnobs", perfKnobs.value.unstated());
  note(names, "recvPollPeriodMs", recvPollPeriodMs);
  note(names, "maxSeqIdleMicroseconds", maxSeqIdleMicroseconds);
  note(names, "guidedDecoding", guidedDecoding);
  note(names, "additionalOutputs", additionalOutputs);
  note(names, "gatherGenerationLogits", gatherGenerationLogits);
  note(names, "promptTableOffloading", promptTableOffloading);
  note(names, "enableTrtOverlap", enableTrtOverlap);
  note(names, "failFast", failFast);
  return names;
}

void GuidedDecodingConfig::validate() const {
  if (!vocabulary_ || !tokenizer_ || !stopIds_) throw std::runtime_error("guided decoding lacks a tokenizer");
}

class Executor::Impl {
 public:
  Impl(const EngineFile& engine, const ExecutorConfig& config)
      : semantics_(engine.semantics), config_(config), batch_(engine, config), loop_([this] { run(); }) {}
  ~Impl() { shutdown(); }

  IdType enqueue(Request const& request) {
    const auto samples = static_cast<size_t>(request.getSamplingConfig().getNumReturnSequences().value_or(1));
    const std::lock_guard lock(mutex_);
    if (ending_ && semantics_.enqueue_throws_after_shutdown) throw std::runtime_error("the executor was shut down");
    // Requests that wait count once, and what comes as often as it has samples.
    const size_t more = semantics_.samples_count_in_the_queue ? samples : 1;
    if (const auto most = config_.maxQueueSize.value;
        most && queue_.size() + more > static_cast<size_t>(*most) && semantics_.queue_limit_throws) {
      throw std::runtime_error("Maximum queue size of " + std::to_string(*most) +
                               " has been reached, please try again later");
    }
    if (!semantics_.validates_in_the_loop) batch_.validate(request);
    Queued queued_request{.id = ++last_id_, .children = {}, .request = request};
    for (size_t i = 1; i < samples; ++i) queued_request.children.push_back(++last_id_);
    control().requests.push_back(request);
    const IdType id = queued_request.id;
    queue_.push_back(std::move(queued_request));
    work_.notify_all();
    return id;
  }

  std::vector<Response> await(std::optional<std::chrono::milliseconds> const& timeout) {
    std::unique_lock lock(mutex_);
    const auto ready = [this] { return !responses_.empty() || ended_; };
    if (timeout) {
      answered_.wait_for(lock, *timeout, ready);
    } else {
      answered_.wait(lock, ready);
    }
    if (responses_.empty() && ended_ && semantics_.awaits_throw_after_shutdown) {
      throw std::runtime_error("the executor was shut down");
    }
    return std::exchange(responses_, {});
  }

  void cancel(IdType id) {
    const std::lock_guard lock(mutex_);
    control().cancels.push_back(id);
    if (!semantics_.cancel_reaches_active_only) {
      const auto at = std::find_if(queue_.begin(), queue_.end(), [&](const Queued& queued) { return queued.id == id; });
      if (at != queue_.end()) {
        Result result;
        result.isFinal = result.isSequenceFinal = true;
        result.finishReasons = {FinishReason::kCANCELLED};
        responses_.emplace_back(id, std::move(result));
        queue_.erase(at);
        answered_.notify_all();
        return;
      }
    }
    cancelled_.insert(id);
  }

  void shutdown() {
    {
      const std::lock_guard lock(mutex_);
      ending_ = true;
    }
    work_.notify_all();
    control().gate.ring();
    if (loop_.joinable()) loop_.join();
  }

  std::deque<IterationStats> statistics() {
    const std::lock_guard lock(mutex_);
    return semantics_.statistics_are_drained ? std::exchange(statistics_, {}) : statistics_;
  }

 private:
  void run() {
    for (;;) {
      {
        std::unique_lock lock(mutex_);
        work_.wait(lock, [this] {
          return ending_ || batch_.active() > 0 || !queue_.empty() || !semantics_.idle_does_nothing;
        });
        const bool left = batch_.active() > 0 || !queue_.empty();
        if (ending_ && (!left || !semantics_.shutdown_waits)) break;
      }
      control().gate.enter(ending_);
      const bool goes_on = iterate();
      control().gate.left();
      if (!goes_on) break;
    }
    const std::lock_guard lock(mutex_);
    ended_ = true;
    answered_.notify_all();
  }

  bool iterate() {
    const auto start = std::chrono::steady_clock::now();
    std::vector<Response> responses;
    if (!semantics_.cancel_comes_after_a_pass) fetch(responses);
    {
      const std::lock_guard lock(mutex_);
      batch_.cancel(cancelled_, responses);
    }
    if (semantics_.cancel_comes_after_a_pass) fetch(responses);
    const size_t before = batch_.active();
    IterationStats stats;
    bool goes_on = true;
    try {
      stats = batch_.pass(responses);
    } catch (const std::exception&) {
      goes_on = false;
    }
    std::unique_lock lock(mutex_);
    if (stats.inflightBatchingStats && stats.inflightBatchingStats->numScheduledRequests == 0) {
      work_.wait_for(lock, kEmptyPass, [this] { return ending_.load(); });
    }
    if (semantics_.statistics_say_how_long)
      stats.iterLatencyMS = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
    stats.numQueuedRequests = static_cast<SizeType32>(queue_.size());
    statistics_.push_back(std::move(stats));
    while (semantics_.statistics_are_bounded &&
           statistics_.size() > static_cast<size_t>(config_.iterStatsMaxIterations.value)) {
      statistics_.pop_front();
    }
    control().most_active = std::max(control().most_active, static_cast<uint32_t>(before));
    responses_.insert(responses_.end(), std::make_move_iterator(responses.begin()),
                      std::make_move_iterator(responses.end()));
    answered_.notify_all();
    return goes_on;
  }

  // Takes requests in by priority, then by age, as long as there are places.
  void fetch(std::vector<Response>& responses) {
    const std::lock_guard lock(mutex_);
    if (semantics_.priority_goes_first) {
      std::stable_sort(queue_.begin(), queue_.end(), [](const Queued& left, const Queued& right) {
        return left.request.getPriority() > right.request.getPriority();
      });
    }
    const auto most = static_cast<size_t>(config_.maxBatchSize.value.value_or(INT32_MAX));
    while (!queue_.empty()) {
      const Queued& next = queue_.front();
      const bool urgent = semantics_.priority_goes_beyond_a_batch && batch_.is_urgent(next.request.getPriority());
      if (semantics_.takes_at_most_a_batch && batch_.active() + next.sequences() > most && !urgent) break;
      try {
        batch_.validate(next.request);
        batch_.take(next);
      } catch (const std::exception& error) {
        responses.emplace_back(next.id, std::string("Encountered an error when fetching new request: ") + error.what());
      }
      queue_.pop_front();
    }
  }

  const Semantics semantics_;
  const ExecutorConfig config_;
  std::mutex mutex_;
  std::condition_variable work_;
  std::condition_variable answered_;
  std::deque<Queued> queue_;
  std::set<IdType> cancelled_;
  std::vector<Response> responses_;
  std::deque<IterationStats> statistics_;
  IdType last_id_ = 0;
  std::atomic<bool> ending_{false};
  bool ended_ = false;
  Batch batch_;  // the loop's
  std::thread loop_;
};

Executor::Executor(std::filesystem::path const& modelPath, ModelType, ExecutorConfig const& executorConfig) {
  control().calls.emplace_back("mpi");
  const EngineFile engine = ifab::standin::read_engine(modelPath);
  check(engine, executorConfig);
  control().calls.emplace_back("executor");
  control().configuration = executorConfig;
  impl_ = std::make_unique<Impl>(engine, executorConfig);
}

Executor::~Executor() = default;

IdType Executor::enqueueRequest(Request const& request) {
  return impl_->enqueue(request);
}

std::vector<Response> Executor::awaitResponses(std::optional<std::chrono::milliseconds> const& timeout) {
  return impl_->await(timeout);
}

void Executor::cancelRequest(IdType requestId) {
  impl_->cancel(requestId);
}

void Executor::shutdown() {
  impl_->shutdown();
}

std::deque<IterationStats> Executor::getLatestIterationStats() {
  return impl_->statistics();
}

}  // namespace tensorrt_llm::executor
