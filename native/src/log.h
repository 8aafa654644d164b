// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "ifab/engine.h"

namespace ifab {

// Sets where log lines of the whole library go; see ifab_log_set().
void set_log(ifab_log_fn fn, void* context, int32_t min_level);

// Whether a line of that level would go anywhere: ask before building a costly one.
bool log_enabled(int32_t level);

// Hands one line on. `component` is a short static name such as "loop". Never called while a lock of an engine is held.
void log(int32_t level, const char* component, const std::string& message);

}  // namespace ifab
