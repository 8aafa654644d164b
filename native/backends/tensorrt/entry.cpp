// SPDX-License-Identifier: Apache-2.0
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "backend.h"
#include "bindings.h"
#include "config.h"
#include "directory.h"
#include "launcher.h"
#include "mining_backend.h"
#include "schema.h"

namespace ifab {
namespace {

// Of those that the process sees: a worker that is to have another one is started with only that visible.
constexpr int32_t kCard = 0;

bool recognises(const EngineDirectory& directory) {
  return directory.has(tensorrt::kConfigurationFile);
}

void inspect(const EngineDirectory& directory, std::vector<Finding>& findings) {
  (void)tensorrt::read_config(directory, findings);
}

Status runs_here() {
  return tensorrt::runs_here(kCard);
}

Status load(const EngineDirectory& directory, std::unique_ptr<Backend>& out) {
  std::vector<Finding> findings;
  const std::optional<tensorrt::Config> config = tensorrt::read_config(directory, findings);
  if (!config) return {IFAB_FAILED_PRECONDITION, describe(findings)};
  std::unique_ptr<tensorrt::Launcher> launcher;
  const ContractValues& contract = *directory.contract();
  if (Status status = tensorrt::open_launcher(*config, directory.file_path(config->plan), contract, kCard, launcher);
      !status.ok()) {
    return status;
  }
  tensorrt::BindingPlan plan = tensorrt::plan_bindings(launcher->enumeration(), contract, findings);
  if (!findings.empty()) return {IFAB_FAILED_PRECONDITION, describe(findings)};
  if (Status status = launcher->prepare(plan); !status.ok()) return status;
  auto backend = std::make_unique<tensorrt::MiningBackend>(contract, std::move(plan), std::move(launcher));
  if (Status status = backend->prove(); !status.ok()) return status;
  out = std::move(backend);
  return {};
}

}  // namespace

extern const BackendEntry tensorrt_backend;
const BackendEntry tensorrt_backend = {
    .configuration_file = tensorrt::kConfigurationFile,
    .looks_for = "of a TensorRT plan without a KV cache",
    .recognises = recognises,
    .inspect = inspect,
    .load = load,
    .runs_here = runs_here,
};

}  // namespace ifab
