// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "backend.h"
#include "directory.h"
#include "engine_config.h"
#include "executor_backend.h"
#include "runtime.h"
#include "schema.h"
#include "settings.h"

namespace ifab {
namespace {

constexpr uint64_t kMostRanks = 64;  // whose files are looked for, whatever config.json says

bool recognises(const EngineDirectory& directory) {
  return executor::is_engine_config(directory);
}

// Everything that can be told without a card; the settings where nothing is wrong.
std::optional<executor::Settings> read(const EngineDirectory& directory, std::vector<Finding>& findings) {
  const size_t before = findings.size();
  const std::optional<executor::EngineConfig> engine = executor::read_engine_config(directory, findings);
  std::optional<executor::Settings> settings = executor::read_settings(directory, findings);
  const ContractValues* contract = directory.contract();
  if (engine && settings && contract != nullptr) executor::compare(*settings, *engine, *contract, findings);
  if (engine) {
    const uint64_t ranks = uint64_t{engine->tensor_parallel} * engine->pipeline_parallel;
    for (uint32_t rank = 0; rank < std::min<uint64_t>(ranks, kMostRanks); ++rank) {
      if (!directory.has(executor::rank_file(rank))) {
        add_finding(findings, {executor::rank_file(rank), "absent", "the engine of rank " + std::to_string(rank)});
      }
    }
  }
  return findings.size() == before ? std::move(settings) : std::nullopt;
}

void inspect(const EngineDirectory& directory, std::vector<Finding>& findings) {
  (void)read(directory, findings);
}

Status load(const EngineDirectory& directory, std::unique_ptr<Backend>& out) {
  std::vector<Finding> findings;
  std::optional<executor::Settings> settings = read(directory, findings);
  if (!settings) return {IFAB_FAILED_PRECONDITION, describe(findings)};
  const ContractValues& contract = *directory.contract();
  std::unique_ptr<executor::Runtime> runtime;
  if (Status status = executor::Runtime::open(directory.path(), *settings, contract, runtime); !status.ok()) {
    return status;
  }
  auto backend = std::make_unique<executor::ExecutorBackend>(contract, std::move(*settings), std::move(runtime));
  if (Status status = backend->prove(); !status.ok()) return status;
  out = std::move(backend);
  return {};
}

}  // namespace

extern const BackendEntry executor_backend;
const BackendEntry executor_backend = {
    .configuration_file = executor::kEngineConfigFile,
    .looks_for = "of a TensorRT-LLM engine, with executor.json beside it",
    .recognises = recognises,
    .inspect = inspect,
    .load = load,
};

}  // namespace ifab
