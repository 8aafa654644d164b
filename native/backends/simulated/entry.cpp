// SPDX-License-Identifier: Apache-2.0
#include <chrono>
#include <memory>
#include <string>
#include <thread>

#include "backend.h"
#include "config.h"
#include "directory.h"
#include "schema.h"
#include "simulated.h"

namespace ifab {
namespace {

using simulated::Config;
using simulated::kConfigurationFile;
using simulated::SimulatedBackend;

bool recognises(const EngineDirectory& directory) {
  return directory.has(kConfigurationFile);
}

std::optional<Value> read(const EngineDirectory& directory, std::vector<Finding>& findings) {
  std::string text;
  if (Status status = directory.read_text(kConfigurationFile, text); !status.ok()) {
    findings.push_back({kConfigurationFile, status.message(), "a file that can be read"});
    return std::nullopt;
  }
  std::vector<Finding> own;
  std::optional<Value> document = read_checked(text, "simulated", own);
  for (Finding& finding : own) {
    finding.path = std::string(kConfigurationFile) + (finding.path.empty() ? "" : ": ") + finding.path;
    findings.push_back(std::move(finding));
  }
  if (!own.empty()) return std::nullopt;
  return document;
}

void inspect(const EngineDirectory& directory, std::vector<Finding>& findings) {
  (void)read(directory, findings);
}

Status load(const EngineDirectory& directory, std::unique_ptr<Backend>& out) {
  std::vector<Finding> findings;
  const std::optional<Value> document = read(directory, findings);
  if (!document) return {IFAB_FAILED_PRECONDITION, describe(findings)};
  const Config config = simulated::read_config(*document, *directory.contract());
  std::this_thread::sleep_for(std::chrono::milliseconds(config.load_ms));
  out = std::make_unique<SimulatedBackend>(config);
  return {};
}

}  // namespace

extern const BackendEntry simulated_backend;
const BackendEntry simulated_backend = {
    .configuration_file = kConfigurationFile,
    .looks_for = "of an engine that computes nothing, for tests and benchmarks",
    .recognises = recognises,
    .inspect = inspect,
    .load = load,
};

}  // namespace ifab
