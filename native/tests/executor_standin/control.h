// SPDX-License-Identifier: Apache-2.0
//
// What tests may see and steer of the stand-in: things that in the vendor's runtime belong to the process. Nothing in
// the backend includes this.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "semantics.h"
#include "tensorrt_llm/executor/executor.h"

namespace ifab::standin {

// Holds the loop of an Executor at the top of an iteration, so that a test knows what has happened and what has not.
class Gate {
 public:
  void close();
  void open();
  // Holds it whatever happens, as a card does that hangs; open() lets it go on.
  void jam();
  // Lets so many iterations pass, and waits until they have ended. False where that takes longer than a minute.
  bool let_pass(uint32_t iterations);

  // For the loop: before an iteration, and behind it. enter() returns at once where `ending` holds, unless it is
  // jammed.
  void enter(const std::atomic<bool>& ending);
  void left();
  // What enter() was told may have changed.
  void ring();

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool closed_ = false;
  bool jammed_ = false;
  uint32_t allowed_ = 0;
  uint32_t passing_ = 0;
};

// Of the process.
struct Control {
  Gate gate;
  int world_size = 1;            // ranks of MPI
  bool register_plugins = true;  // what initTrtLlmPlugins() brings about
  bool plugins_registered = false;
  std::vector<std::string> calls;  // in order: "plugins", "tensors", "mpi", "executor"
  std::optional<tensorrt_llm::executor::ExecutorConfig> configuration;  // of the last Executor
  std::vector<tensorrt_llm::executor::IdType> cancels;                  // that were asked for
  std::vector<tensorrt_llm::executor::Request> requests;                // that were enqueued
  std::atomic<bool> card_fails{false};                                  // every pass fails
  int32_t listed_on = -1;  // card on which the engine's tensors were listed
  uint32_t most_active = 0;
  std::optional<Semantics> semantics;  // stands in for those of the engine's file
};

Control& control();

}  // namespace ifab::standin
