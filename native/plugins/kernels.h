// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "attention.h"

namespace ifab::attention {

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

  // Launches on a stream of the context that is current; does not wait. `arguments` needs its addresses only. Returns
  // what went wrong, or nothing.
  std::string launch(const Shape& shape, int64_t rows, const Arguments& addresses, void* stream);

 private:
  struct Driver;
  static constexpr size_t kCards = 64;

  Kernels() = default;
  std::string load();
  std::string failed(const char* what, int code) const;

  // Of one kernel on one card: its handle, null until it was prepared, and the card's shared memory.
  struct Prepared {
    std::atomic<void*> function{nullptr};
    int32_t multiprocessor_bytes = 0;
    int32_t reserved_bytes = 0;
  };
  std::string prepare(const Shape& shape, int32_t card, Prepared& prepared);

  std::unique_ptr<Driver> driver_;
  void* library_ = nullptr;
  std::mutex preparing_;
  std::array<std::array<Prepared, 8>, kCards> prepared_;
};

}  // namespace ifab::attention
