// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>

#include "status.h"

namespace ifab::executor {

// Reads guides before the runtime does. The runtime compiles guides in the pass that begins their request, so that one
// it cannot read fails every request in that pass. What it reads is told by our own readers of guides, which are
// stricter: a guide they take may be refused there, but none that is not well formed gets so far. Any thread.
class GuideCheck {
 public:
  // `kind` is one of IFAB_GUIDE_*. IFAB_INVALID_ARGUMENT: it is not well formed, or no text can satisfy it.
  // IFAB_UNIMPLEMENTED, with its name: it has something that our readers do not know, and that the runtime would read
  // over or fail at.
  Status check(int32_t kind, std::string_view text);

  // How often a guide was read, and not remembered.
  size_t read() const;

 private:
  static constexpr size_t kRemembered = 64;  // the rows of a job mostly have the same

  mutable std::mutex mutex_;
  std::list<std::pair<int32_t, std::string>> good_;  // the last used first
  size_t read_ = 0;
};

}  // namespace ifab::executor
