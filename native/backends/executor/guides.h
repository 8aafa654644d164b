// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string_view>

#include "status.h"

namespace ifab::executor {

// Reads a guide of that kind (IFAB_GUIDE_*) before the runtime does. The runtime compiles guides in the pass that
// begins their request, so that one it cannot read fails every request in that pass. What it reads is told by our own
// readers of guides, which are stricter: a guide they take may be refused there, but none that is not well formed gets
// so far.
//
// IFAB_INVALID_ARGUMENT: it is not well formed, or no text can satisfy it. IFAB_UNIMPLEMENTED, with its name: it has
// something that our readers do not know, and that the runtime would read over or fail at.
Status check_guide(int32_t kind, std::string_view text);

}  // namespace ifab::executor
