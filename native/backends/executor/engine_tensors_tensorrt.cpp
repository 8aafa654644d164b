// SPDX-License-Identifier: Apache-2.0
//
// The engine's tensors, listed by TensorRT: what the raw backend opens, opened and let go of.
#include <memory>

#include "config.h"
#include "engine_tensors.h"
#include "launcher.h"

namespace ifab::executor {

Status list_tensors(const std::string& engine_path, const ContractValues& contract, int32_t card,
                    std::vector<tensorrt::TensorInfo>& out) {
  const tensorrt::Config plan{.plan = engine_path, .plugins = {}};  // the plugins are the process's already
  std::unique_ptr<tensorrt::Launcher> launcher;
  if (Status status = tensorrt::open_launcher(plan, engine_path, contract, card, launcher); !status.ok()) return status;
  out = launcher->enumeration().tensors;
  return {};
}

}  // namespace ifab::executor
