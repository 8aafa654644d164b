// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "attention.h"
#include "rows.h"

namespace ifab::plugins {

// The kernels, loaded into the driver of this process; unloaded when the last holder lets go. Safe from any thread.
//
// They are launched through the driver, found at run time, and not through a CUDA runtime: TensorRT carries a runtime
// of its own, of another version than the compiler here, and streams and contexts are the driver's in both.
class Kernels {
 public:
  // The one instance, loaded where there is none. Null, with a sentence, where there is no driver or no kernel for the
  // card.
  static std::shared_ptr<Kernels> shared(std::string& problem);

  Kernels(const Kernels&) = delete;
  Kernels& operator=(const Kernels&) = delete;
  ~Kernels();

  // Each launches on a stream of the context that is current and does not wait; of the arguments it takes the
  // addresses. What is launched must not be one that `refuse` and its kind refuse. Returns what went wrong, or nothing.
  std::string launch(const AttentionShape& shape, int64_t rows, const AttentionArguments& addresses, void* stream);
  std::string launch(const Norm& norm, int64_t tokens, int32_t width, const NormArguments& addresses, void* stream);
  std::string launch(const GatedUnit& unit, int64_t tokens, int32_t width, const GatedUnitArguments& addresses,
                     void* stream);

 private:
  struct Driver;
  static constexpr size_t kCards = 64;
  static constexpr size_t kKernels = 14;

  // Of one kernel on one card: its handle, null until it was prepared, and the card's shared memory.
  struct Prepared {
    std::atomic<void*> function{nullptr};
    int32_t multiprocessor_bytes = 0;
    int32_t reserved_bytes = 0;
  };

  Kernels() = default;
  std::string load();
  std::string failed(const std::string& what, int code) const;
  // The kernel of that name and number on the current card. `head_size`: of attention, 0 for what needs little memory.
  std::string find(const std::string& name, size_t number, int32_t head_size, Prepared*& found);
  std::string prepare(const std::string& name, int32_t head_size, int32_t card, Prepared& prepared);
  std::string run(const Prepared& prepared, int64_t blocks, int32_t threads, int32_t shared_bytes, void* arguments,
                  void* stream);

  std::unique_ptr<Driver> driver_;
  void* library_ = nullptr;
  std::mutex preparing_;
  std::array<std::array<Prepared, kKernels>, kCards> prepared_;
};

}  // namespace ifab::plugins
