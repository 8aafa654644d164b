// SPDX-License-Identifier: Apache-2.0
//
// The table of backends: the one place that names them.
#include <vector>

#include "backend.h"

namespace ifab {

extern const BackendEntry simulated_backend;
#if IFAB_WITH_LLAMA
extern const BackendEntry llama_backend;
#endif
#if IFAB_WITH_TENSORRT
extern const BackendEntry tensorrt_backend;
#endif
#if IFAB_WITH_EXECUTOR
extern const BackendEntry executor_backend;
#endif

std::span<const BackendEntry> backends() {
  static const BackendEntry table[] = {
      simulated_backend,
#if IFAB_WITH_LLAMA
      llama_backend,
#endif
#if IFAB_WITH_TENSORRT
      tensorrt_backend,
#endif
#if IFAB_WITH_EXECUTOR
      executor_backend,
#endif
  };
  return table;
}

std::span<const AbsentBackend> absent_backends() {
  static const std::vector<AbsentBackend> table = {
#if !IFAB_WITH_LLAMA
      {"llama.json", "the embedded llama.cpp runtime"},
#endif
#if !IFAB_WITH_TENSORRT
      {"tensorrt.json", "TensorRT plans"},
#endif
#if !IFAB_WITH_EXECUTOR
      {"executor.json", "TensorRT-LLM's Executor"},
#endif
  };
  return table;
}

}  // namespace ifab
