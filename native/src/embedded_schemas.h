// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <span>

namespace ifab {

// One file of engines/schema as it was when the library was built.
struct EmbeddedSchema {
  const char* name;  // without .schema.json
  const char* text;
};

std::span<const EmbeddedSchema> embedded_schemas();

}  // namespace ifab
