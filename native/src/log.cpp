// SPDX-License-Identifier: Apache-2.0
#include "log.h"

#include <atomic>
#include <mutex>
#include <shared_mutex>

namespace ifab {
namespace {

struct Target {
  ifab_log_fn fn = nullptr;
  void* context = nullptr;
};

// Held shared during a callback: set_log() returns only when nobody is inside the callback before.
std::shared_mutex& target_mutex() {
  static std::shared_mutex mutex;
  return mutex;
}

Target& target() {
  static Target value;
  return value;
}

constexpr int32_t kOff = INT32_MAX;
std::atomic<int32_t> level_limit{kOff};

}  // namespace

void set_log(ifab_log_fn fn, void* context, int32_t min_level) {
  const std::unique_lock lock(target_mutex());
  target() = {fn, context};
  level_limit.store(fn == nullptr ? kOff : min_level, std::memory_order_relaxed);
}

bool log_enabled(int32_t level) {
  const int32_t limit = level_limit.load(std::memory_order_relaxed);
  return limit != kOff && level >= limit;
}

void log(int32_t level, const char* component, const std::string& message) {
  if (!log_enabled(level)) return;
  const std::shared_lock lock(target_mutex());
  if (target().fn != nullptr) target().fn(target().context, level, component, message.c_str());
}

}  // namespace ifab
