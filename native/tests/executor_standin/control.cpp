// SPDX-License-Identifier: Apache-2.0
#include "control.h"

#include <chrono>

#include "tensorrt_llm/plugins/api/tllmPlugin.h"

namespace ifab::standin {

void Gate::close() {
  const std::lock_guard lock(mutex_);
  closed_ = true;
  allowed_ = 0;
}

void Gate::open() {
  {
    const std::lock_guard lock(mutex_);
    closed_ = jammed_ = false;
  }
  changed_.notify_all();
}

void Gate::jam() {
  const std::lock_guard lock(mutex_);
  jammed_ = true;
}

bool Gate::let_pass(uint32_t iterations) {
  std::unique_lock lock(mutex_);
  allowed_ = iterations;
  changed_.notify_all();
  return changed_.wait_for(lock, std::chrono::minutes(1), [this] { return allowed_ == 0 && passing_ == 0; });
}

void Gate::enter(const std::atomic<bool>& ending) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return !jammed_ && (!closed_ || allowed_ > 0 || ending); });
  if (closed_ && allowed_ > 0) --allowed_;
  ++passing_;
}

void Gate::left() {
  {
    const std::lock_guard lock(mutex_);
    --passing_;
  }
  changed_.notify_all();
}

void Gate::ring() {
  const std::lock_guard lock(mutex_);
  changed_.notify_all();
}

Control& control() {
  static Control instance;
  return instance;
}

}  // namespace ifab::standin

extern "C" bool initTrtLlmPlugins(void*, char const*) {
  ifab::standin::Control& control = ifab::standin::control();
  control.calls.emplace_back("plugins");
  control.plugins_registered = control.register_plugins;
  return control.plugins_registered;
}
