// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>
#include <future>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>

#include "backend.h"
#include "directory.h"
#include "doorbell.h"
#include "events.h"
#include "ifab/engine.h"
#include "intake.h"
#include "payload_ring.h"
#include "stats.h"
#include "status.h"

namespace ifab {

// A loaded engine as callers' threads see it: what stands behind ifab_engine_t. Starts the owner thread, which loads
// the backend, runs the loop and ends the backend; everything else meets it in the intake, the event store and the
// stats board.
class Engine {
 public:
  // Loads the engine of a directory; see ifab_engine_create().
  static Status create(const std::string& path, std::unique_ptr<Engine>& out);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Each is the function of the C interface with that name, behind the checks that need no engine.
  void submit(std::span<const ifab_request_t> requests, std::span<ifab_submit_result_t> results, std::span<char> text);
  Status poll(const ifab_poll_buffers_t& buffers, int32_t timeout_ms, uint32_t& count);
  void wake() { events_->wake(); }
  uint32_t cancel(std::span<const uint64_t> ids) { return intake_.cancel(ids); }
  ifab_stats_t stats();
  const std::string& description() const { return description_; }

 private:
  explicit Engine(std::unique_ptr<const EngineDirectory> directory);

  // The owner thread.
  void own(const BackendEntry& entry, std::promise<Status> loaded);
  Status load(const BackendEntry& entry, std::unique_ptr<Backend>& backend);
  Status check(const ifab_poll_buffers_t& buffers) const;
  Status compile_guide(Request& request);
  const ContractValues& contract() const { return *directory_->contract(); }

  const std::unique_ptr<const EngineDirectory> directory_;
  Doorbell doorbell_;
  Intake intake_{doorbell_};
  StatsBoard board_;
  std::atomic<bool> stop_{false};
  std::atomic<bool> polling_{false};
  std::atomic<uint64_t> idle_told_us_{0};  // the largest stats() has returned

  // Written by the owner thread before create() returns, constant since.
  EngineFacts facts_;
  EventLimits limits_;
  std::optional<PayloadRing> payloads_;
  std::optional<EventStore> events_;
  std::string description_;
  Clock::time_point started_;

  // The backend, for what other threads may call of it; null when there is none.
  std::mutex backend_mutex_;
  Backend* backend_ = nullptr;
  std::thread owner_;
};

}  // namespace ifab
