// SPDX-License-Identifier: Apache-2.0
#include "engine.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <utility>
#include <vector>

#include "agreement.h"
#include "detect.h"
#include "engine_loop.h"
#include "log.h"
#include "reports.h"
#include "schema.h"
#include "text.h"
#include "validate.h"

namespace ifab {
namespace {

// Payloads that may wait for the reader while others are computed: as many as can be computed at once.
constexpr uint32_t kPayloadsASlot = 2;
// Time without progress, beyond the longest step of the contract, after which an engine counts as failed. Longer than
// any health check waits, so that whoever watches the progress tick hears of it first.
constexpr std::chrono::seconds kStillBeyondLongestStep{30};
// Most often that a backend tells tokens of one sample in a step.
constexpr uint32_t kTokenEventsASlot = 2;
constexpr size_t kPayloadAlignment = 64;

EventLimits limits_of(const EngineFacts& facts, const ContractValues& contract) {
  EventLimits limits;
  if (contract.limits.max_output_tokens > 0) {
    // A prompt whose last part is computed may give its samples their first tokens in the same step.
    limits.step_tokens = facts.step_token_budget + facts.slots;
    limits.step_token_events = kTokenEventsASlot * facts.slots;
    limits.event_tokens = std::min(limits.step_tokens, contract.limits.max_output_tokens);
  }
  // A slot's sample can end, and its request's context be done, once a step.
  limits.step_others = 2 * facts.slots;
  limits.prompt_scores = contract.capabilities.scoring ? contract.limits.max_input_tokens : 0;
  limits.payload_bytes = facts.payload_bytes;
  return limits;
}

Status refused(const std::string& what, const std::vector<Finding>& findings) {
  return {IFAB_FAILED_PRECONDITION, what + ":\n" + describe(findings)};
}

}  // namespace

Status Engine::create(const std::string& path, std::unique_ptr<Engine>& out) {
  std::unique_ptr<const EngineDirectory> directory;
  if (Status status = EngineDirectory::open(path, directory); !status.ok()) return status;
  const Inspection inspection = inspect(*directory);
  if (!inspection.findings.empty()) return refused("the engine directory " + path + " is refused", inspection.findings);
  std::unique_ptr<Engine> engine(new Engine(std::move(directory)));
  std::promise<Status> promise;
  std::future<Status> loaded = promise.get_future();
  engine->owner_ = std::thread([&engine = *engine, entry = inspection.backend, promise = std::move(promise)]() mutable {
    engine.own(*entry, std::move(promise));
  });
  if (Status status = loaded.get(); !status.ok()) return status;
  out = std::move(engine);
  return {};
}

Engine::Engine(std::unique_ptr<const EngineDirectory> directory) : directory_(std::move(directory)) {}

Engine::~Engine() {
  stop_.store(true, std::memory_order_release);
  {
    const std::lock_guard lock(backend_mutex_);
    if (backend_ != nullptr) backend_->interrupt();
  }
  doorbell_.ring();
  if (owner_.joinable()) owner_.join();
}

void Engine::own(const BackendEntry& entry, std::promise<Status> loaded) {
  std::unique_ptr<Backend> backend;
  std::optional<EngineLoop> loop;
  Status status;
  try {
    status = load(entry, backend);
    if (status.ok()) {
      const auto still_limit = std::chrono::milliseconds(contract().limits.longest_step_ms) + kStillBeyondLongestStep;
      loop.emplace(*backend, LoopSeams{intake_, *events_, *payloads_, board_, doorbell_, stop_, still_limit});
      const std::lock_guard lock(backend_mutex_);
      backend_ = backend.get();
    }
  } catch (const std::bad_alloc&) {
    status = {IFAB_RESOURCE_EXHAUSTED, "not enough memory to load the engine"};
  } catch (const std::exception& error) {
    status = {IFAB_INTERNAL, std::string("loading the engine failed: ") + error.what()};
  }
  const bool ok = status.ok();
  loaded.set_value(std::move(status));
  if (ok) loop->run();
  loop.reset();
  const std::lock_guard lock(backend_mutex_);
  backend_ = nullptr;
}

Status Engine::load(const BackendEntry& entry, std::unique_ptr<Backend>& backend) {
  const Clock::time_point start = Clock::now();
  if (Status status = entry.load(*directory_, backend); !status.ok()) return status;
  started_ = Clock::now();
  facts_ = backend->facts();
  if (const auto findings = disagreements(facts_, contract()); !findings.empty()) {
    return refused("the loaded engine is not what its contract says", findings);
  }
  limits_ = limits_of(facts_, contract());
  payloads_.emplace(kPayloadsASlot * facts_.slots, facts_.payload_bytes);
  events_.emplace(limits_, *payloads_, doorbell_);
  const int64_t load_ms = std::chrono::duration_cast<std::chrono::milliseconds>(started_ - start).count();
  description_ = engine_report(directory_->contract_sha256(), contract(), facts_, limits_, load_ms);
  log(IFAB_LOG_INFO, "engine", "loaded " + contract().engine_id + " in " + std::to_string(load_ms) + " ms");
  return {};
}

void Engine::submit(std::span<const ifab_request_t> requests, std::span<ifab_submit_result_t> results,
                    std::span<char> text) {
  std::vector<std::unique_ptr<Entry>> entries(requests.size());
  std::vector<Status> statuses(requests.size());
  for (size_t i = 0; i < requests.size(); ++i) {
    auto entry = std::make_unique<Entry>();
    statuses[i] = validate(requests[i], contract(), facts_, entry->request);
    if (statuses[i].ok()) statuses[i] = compile_guide(entry->request);
    if (!statuses[i].ok()) continue;
    entry->samples.resize(entry->request.samples);
    entry->samples_left = entry->request.samples;
    entries[i] = std::move(entry);
  }
  intake_.submit(entries, statuses);
  size_t used = 0;
  for (size_t i = 0; i < results.size(); ++i) {
    const std::string_view message = cut_text(statuses[i].message(), text.size() - used);
    results[i] = {statuses[i].code(), static_cast<uint32_t>(used), static_cast<uint32_t>(message.size())};
    std::copy(message.begin(), message.end(), text.begin() + static_cast<ptrdiff_t>(used));
    used += message.size();
  }
}

Status Engine::compile_guide(Request& request) {
  if (request.guide_kind == IFAB_GUIDE_NONE) return {};
  const Backend* backend = nullptr;
  {
    const std::lock_guard lock(backend_mutex_);
    backend = backend_;
  }
  // It stays until the engine is destroyed, which no other call on the engine may run beside.
  if (backend == nullptr) return {IFAB_UNAVAILABLE, "the engine is not running"};
  return backend->compile_guide(request.guide_kind, request.guide, request.compiled_guide);
}

Status Engine::check(const ifab_poll_buffers_t& buffers) const {
  struct Minimum {
    const char* field;
    uint32_t given;
    uint32_t least;
    bool missing;
  };
  const Minimum minima[] = {
      {"events_cap", buffers.events_cap, 1, buffers.events == nullptr},
      {"tokens_cap", buffers.tokens_cap, limits_.poll_tokens(),
       buffers.tokens == nullptr || buffers.logprobs == nullptr},
      {"text_cap", buffers.text_cap, kEventTextBytes, buffers.text == nullptr},
      {"payload_cap", buffers.payload_cap, limits_.payload_bytes,
       limits_.payload_bytes > 0 && buffers.payload == nullptr},
  };
  for (const Minimum& minimum : minima) {
    if (minimum.missing) return {IFAB_INVALID_ARGUMENT, std::string(minimum.field) + ": its buffer is NULL"};
    if (minimum.given < minimum.least) {
      return {IFAB_INVALID_ARGUMENT, std::string(minimum.field) + ": " + std::to_string(minimum.given) +
                                         ", expected at least " + std::to_string(minimum.least)};
    }
  }
  if (reinterpret_cast<uintptr_t>(buffers.payload) % kPayloadAlignment != 0) {
    return {IFAB_INVALID_ARGUMENT, "payload: not aligned to 64 bytes"};
  }
  return {};
}

Status Engine::poll(const ifab_poll_buffers_t& buffers, int32_t timeout_ms, uint32_t& count) {
  if (timeout_ms < 0)
    return {IFAB_INVALID_ARGUMENT, "timeout_ms: " + std::to_string(timeout_ms) + ", expected 0 or more"};
  if (Status status = check(buffers); !status.ok()) return status;
  if (polling_.exchange(true, std::memory_order_acquire)) {
    return {IFAB_FAILED_PRECONDITION, "another thread is polling this engine"};
  }
  count = events_->poll(buffers, Clock::now() + std::chrono::milliseconds(timeout_ms));
  polling_.store(false, std::memory_order_release);
  return {};
}

ifab_stats_t Engine::stats() {
  // The snapshot first: what has ended was submitted before, so that the figures agree.
  const Snapshot snapshot = board_.read();
  const Intake::Counts counts = intake_.counts();
  const Clock::time_point now = Clock::now();
  const auto us = [](Clock::duration time) {
    return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::microseconds>(time).count());
  };
  ifab_stats_t stats = snapshot.stats;
  stats.requests_submitted = counts.submitted;
  stats.requests_refused = counts.refused;
  stats.queued = counts.submitted - stats.requests_finished - stats.requests_failed - stats.requests_cancelled -
                 snapshot.requests_inside;
  stats.payload_slots_used = payloads_->used();
  stats.payload_slots_total = payloads_->slots();
  stats.events_pending = events_->pending();
  stats.uptime_us = us(now - started_);
  if (snapshot.idle && now > snapshot.idle_since) stats.idle_us += us(now - snapshot.idle_since);
  // The loop may have woken between its snapshot and this clock; what was told once is not taken back.
  uint64_t told = idle_told_us_.load(std::memory_order_relaxed);
  while (told < stats.idle_us && !idle_told_us_.compare_exchange_weak(told, stats.idle_us, std::memory_order_relaxed)) {
  }
  stats.idle_us = std::max(told, stats.idle_us);
  return stats;
}

}  // namespace ifab
