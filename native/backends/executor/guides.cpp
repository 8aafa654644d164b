// SPDX-License-Identifier: Apache-2.0
#include "guides.h"

#include <string>

#include "guide/gbnf.h"
#include "guide/json_schema.h"
#include "guide/regex.h"

namespace ifab::executor {

Status check_guide(int32_t kind, std::string_view text) {
  try {
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
  } catch (const guide::GuideError& error) {
    return {error.code(), std::string("guide: ") + error.what()};
  }
  return {};
}

}  // namespace ifab::executor
