// SPDX-License-Identifier: Apache-2.0
//
// A schema, compiled: what schema.cpp walks. Private to the schema part.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <regex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "document.h"

namespace ifab {

// What one place of a document must be.
struct SchemaNode {
  enum class Type { kObject, kList, kText, kInteger, kReal, kBoolean };
  using Property = std::pair<std::string, std::unique_ptr<SchemaNode>>;

  Type type = Type::kObject;
  bool may_not_apply = false;  // "not_applicable" is as good
  std::string expected;        // for findings

  std::vector<Property> properties;  // kObject: all required, no others allowed

  std::unique_ptr<SchemaNode> items;  // kList
  size_t min_items = 0;
  size_t max_items = 0;
  bool unique = false;

  size_t max_length = 0;  // kText, in code points
  std::optional<std::regex> pattern;
  std::vector<std::string> words;  // the only texts allowed, where not empty
  bool date = false;

  int64_t minimum = 0;  // kInteger
  int64_t maximum = 0;

  double real_minimum = 0;  // kReal
  double real_maximum = 0;
  bool real_above_minimum = false;  // the minimum itself is not allowed
};

// Compiles the schema document `root`. Throws std::logic_error, naming schema and place, for what is not in the part of
// JSON Schema that is interpreted.
std::unique_ptr<SchemaNode> compile_schema(std::string_view name, const Value& root);

}  // namespace ifab
