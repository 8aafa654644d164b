// SPDX-License-Identifier: Apache-2.0
#include "guides.h"

#include <algorithm>

#include "guide/gbnf.h"
#include "guide/json_schema.h"
#include "guide/regex.h"

namespace ifab::executor {
namespace {

// Throws guide::GuideError.
void read_guide(int32_t kind, std::string_view text) {
  switch (kind) {
    case IFAB_GUIDE_JSON_SCHEMA:
      (void)guide::read_json_schema(text);
      break;
    case IFAB_GUIDE_REGEX:
      (void)guide::read_regex(text);
      break;
    default:
      (void)guide::read_gbnf(text);
      break;
  }
}

}  // namespace

Status GuideCheck::check(int32_t kind, std::string_view text) {
  {
    const std::lock_guard lock(mutex_);
    const auto known = std::find_if(good_.begin(), good_.end(),
                                    [&](const auto& good) { return good.first == kind && good.second == text; });
    if (known != good_.end()) {
      good_.splice(good_.begin(), good_, known);
      return {};
    }
    ++read_;
  }
  try {
    read_guide(kind, text);
  } catch (const guide::GuideError& error) {
    return {error.code(), std::string("guide: ") + error.what()};
  }
  const std::lock_guard lock(mutex_);
  good_.emplace_front(kind, text);
  if (good_.size() > kRemembered) good_.pop_back();
  return {};
}

size_t GuideCheck::read() const {
  const std::lock_guard lock(mutex_);
  return read_;
}

}  // namespace ifab::executor
