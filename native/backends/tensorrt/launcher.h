// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "batch.h"
#include "bindings.h"
#include "config.h"
#include "enumeration.h"
#include "status.h"

namespace ifab::tensorrt {

// The GPU's edge: binds and launches a batch, and hands its outputs back. Two launches may be under way, each in a
// buffer of its own, so that the copy back of one hides behind the computation of the next. One thread.
class Launcher {
 public:
  static constexpr uint32_t kBuffers = 2;

  virtual ~Launcher() = default;
  virtual const Enumeration& enumeration() const = 0;
  // Allocates everything that launches of this plan need, once.
  virtual Status prepare(const BindingPlan& plan) = 0;
  // Copies inputs in, launches, and orders the copy back. Does not wait. IFAB_INTERNAL: this launch was refused, the
  // engine is whole. IFAB_UNAVAILABLE: the card is lost.
  virtual Status launch(const Batch& batch, uint32_t buffer) = 0;
  // Waits for a launch. Output `which` (a place in BindingPlan::hidden) of the launch's prompts, one row after another;
  // valid until the buffer's next launch.
  virtual Status collect(uint32_t buffer) = 0;
  virtual std::span<const uint8_t> output(uint32_t buffer, size_t which) const = 0;
};

// The plugin of which a complaint of TensorRT says that it found no creator, empty where it says something else:
// "Cannot find plugin: NAME, version: ..." and the like.
std::string missing_plugin(std::string_view complaint);

// Whether the machine has what every plan needs beside its directory: the driver, the card of that number, and the
// TensorRT that this library was compiled for. IFAB_UNAVAILABLE: what is not there.
Status runs_here(int32_t card);

// Opens the card of that number and the plan on it. IFAB_UNAVAILABLE: no driver, no card, no TensorRT library.
// IFAB_FAILED_PRECONDITION: the plan does not load here; the message carries the runtime's words.
// IFAB_RESOURCE_EXHAUSTED: the card's memory.
Status open_launcher(const Config& config, const std::string& plan_path, const ContractValues& contract, int32_t card,
                     std::unique_ptr<Launcher>& out);

}  // namespace ifab::tensorrt
