// SPDX-License-Identifier: Apache-2.0
//
// Questions about schemas that need no grammar. Private to the schema reader.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "document.h"

namespace ifab::guide {

enum JsonType : unsigned {
  kNullType = 1,
  kBooleanType = 2,
  kIntegerType = 4,
  kNumberType = 8,  // with kIntegerType: every number
  kStringType = 16,
  kArrayType = 32,
  kObjectType = 64,
  kEveryType = 127,
};

// Refuses, by name, every keyword that this reader neither enforces nor may read over, values of the wrong kind, and
// what makes a schema a document or a dialect of its own. Throws GuideError.
void check_keywords(const Value& schema, const std::string& path);
// Refuses keywords that constrain, other than those of `allowed`, where `with` leaves no room for them.
void refuse_beside(const Value& schema, const std::string& path, std::string_view with,
                   const std::vector<std::string_view>& allowed);

// The types that `type` names, or that the other keywords speak of, or every type. Throws GuideError.
unsigned types_of(const Value& schema, const std::string& path);
// Numbers are of kIntegerType where they are whole, however they are written.
unsigned type_of_value(const Value& value);

// What `$ref` points at. Throws GuideError where it leaves the document, points at nothing or at itself.
const Value& resolve(const Value& root, const Value& schema, const std::string& path);

// A value as compact JSON, numbers as they were written.
std::string json_of(const Value& value);

}  // namespace ifab::guide
