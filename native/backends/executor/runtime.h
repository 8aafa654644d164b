// SPDX-License-Identifier: Apache-2.0
//
// The vendor's Executor, brought up in the right order and let go of within a limit.
#pragma once

#include <chrono>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "contract.h"
#include "settings.h"
#include "status.h"
#include "tensorrt_llm/executor/executor.h"

namespace ifab::executor {

// One Executor, and the only one of its process while it lives: it makes the process a rank of MPI, and its plugins and
// its memory pools are the process's. One thread.
class Runtime {
 public:
  // Brings an engine up: the release against the contract, then the plugins, then the names of the engine's outputs
  // where the payload needs some, then the Executor itself, which initialises MPI.
  //
  // IFAB_FAILED_PRECONDITION: another engine lives in this process, the release is not the contract's, an output is not
  // the engine's, or the runtime refuses engine or configuration; the message carries its words.
  // IFAB_RESOURCE_EXHAUSTED: memory. IFAB_UNAVAILABLE: no card that the runtime can use.
  static Status open(const std::string& directory, const Settings& settings, const ContractValues& contract,
                     std::unique_ptr<Runtime>& out);

  // Ends what is left and waits for the runtime to do so, for as long as its longest step and some. One that does not
  // end is left behind with a line in the log: there is no way to end it but to end the process.
  ~Runtime();
  Runtime(const Runtime&) = delete;
  Runtime& operator=(const Runtime&) = delete;

  tensorrt_llm::executor::Executor& executor() { return *executor_; }
  // For the destructor: a request that has not ended there.
  void forget_at_end(tensorrt_llm::executor::IdType id) { unfinished_.push_back(id); }

 private:
  Runtime(std::unique_ptr<tensorrt_llm::executor::Executor> executor, std::chrono::milliseconds limit);

  std::unique_ptr<tensorrt_llm::executor::Executor> executor_;
  std::vector<tensorrt_llm::executor::IdType> unfinished_;
  std::chrono::milliseconds limit_;
};

}  // namespace ifab::executor
