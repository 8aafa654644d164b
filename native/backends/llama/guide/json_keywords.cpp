// SPDX-License-Identifier: Apache-2.0
#include "json_keywords.h"

#include <algorithm>
#include <array>
#include <initializer_list>

#include "decimal.h"
#include "grammar.h"
#include "json_text.h"

namespace ifab::guide {
namespace {

constexpr std::array<std::string_view, 22> kEnforced{
    "type",    "enum",        "const",    "properties", "required",         "additionalProperties",
    "items",   "prefixItems", "minItems", "maxItems",   "minLength",        "maxLength",
    "pattern", "format",      "minimum",  "maximum",    "exclusiveMinimum", "exclusiveMaximum",
    "anyOf",   "oneOf",       "allOf",    "$ref"};

// These say something about a schema and constrain nothing.
constexpr std::array<std::string_view, 13> kAnnotations{"title",    "description", "default", "examples", "deprecated",
                                                        "readOnly", "writeOnly",   "$schema", "$id",      "$comment",
                                                        "$defs",    "definitions", "$anchor"};

template <size_t kSize>
bool among(const std::array<std::string_view, kSize>& words, std::string_view word) {
  return std::find(words.begin(), words.end(), word) != words.end();
}

struct NamedType {
  std::string_view name;
  unsigned type;
};
constexpr std::array<NamedType, 7> kTypes{{{"null", kNullType},
                                           {"boolean", kBooleanType},
                                           {"integer", kIntegerType},
                                           {"number", kNumberType | kIntegerType},
                                           {"string", kStringType},
                                           {"array", kArrayType},
                                           {"object", kObjectType}}};

unsigned type_named(const Value& name, const std::string& path) {
  for (const NamedType& type : kTypes) {
    if (name.is(Value::Kind::kText) && type.name == name.text()) return type.type;
  }
  throw GuideError(member_path(path, "type") + ": " + render(name) + " is no type");
}

// The types that a keyword speaks of; 0 for keywords that speak of every type.
unsigned speaks_of(std::string_view keyword) {
  if (keyword == "properties" || keyword == "required" || keyword == "additionalProperties") return kObjectType;
  if (keyword == "items" || keyword == "prefixItems" || keyword == "minItems" || keyword == "maxItems")
    return kArrayType;
  if (keyword == "minLength" || keyword == "maxLength" || keyword == "pattern" || keyword == "format")
    return kStringType;
  if (keyword == "minimum" || keyword == "maximum" || keyword == "exclusiveMinimum" || keyword == "exclusiveMaximum") {
    return kNumberType | kIntegerType;
  }
  return 0;
}

const Value* follow(const Value& root, std::string_view pointer) {
  const Value* at = &root;
  while (!pointer.empty()) {
    pointer.remove_prefix(1);
    const size_t end = std::min(pointer.find('/'), pointer.size());
    std::string key(pointer.substr(0, end));
    for (const auto& [escape, plain] : {std::pair{"~1", "/"}, std::pair{"~0", "~"}}) {
      for (size_t found = key.find(escape); found != std::string::npos; found = key.find(escape, found + 1)) {
        key.replace(found, 2, plain);
      }
    }
    const Value* next = at->find(key);
    if (next == nullptr && at->is(Value::Kind::kList) && !key.empty() && key.size() < 7 &&
        key.find_first_not_of("0123456789") == std::string::npos) {
      const size_t index = std::stoul(key);
      next = index < at->items().size() ? &at->items()[index] : nullptr;
    }
    if (next == nullptr) return nullptr;
    if (const Value* id = next->find("$id"); id != nullptr && id->is(Value::Kind::kText)) {
      throw GuideError("$ref: a place inside a schema with an $id of its own is not supported", IFAB_UNIMPLEMENTED);
    }
    at = next;
    pointer.remove_prefix(end);
  }
  return at;
}

// What a keyword's value is, whether or not the type of the schema makes it count.
enum class Shape { kAny, kText, kBoolean, kNumber, kList, kTexts, kObject, kSchema, kType };

struct Shaped {
  std::string_view keyword;
  Shape shape;
};
constexpr std::array<Shaped, 34> kShapes{{{"type", Shape::kType},
                                          {"enum", Shape::kList},
                                          {"properties", Shape::kObject},
                                          {"required", Shape::kTexts},
                                          {"additionalProperties", Shape::kSchema},
                                          {"items", Shape::kSchema},
                                          {"prefixItems", Shape::kList},
                                          {"minItems", Shape::kNumber},
                                          {"maxItems", Shape::kNumber},
                                          {"minLength", Shape::kNumber},
                                          {"maxLength", Shape::kNumber},
                                          {"pattern", Shape::kText},
                                          {"format", Shape::kText},
                                          {"minimum", Shape::kNumber},
                                          {"maximum", Shape::kNumber},
                                          {"exclusiveMinimum", Shape::kNumber},
                                          {"exclusiveMaximum", Shape::kNumber},
                                          {"anyOf", Shape::kList},
                                          {"oneOf", Shape::kList},
                                          {"allOf", Shape::kList},
                                          {"$ref", Shape::kText},
                                          {"title", Shape::kText},
                                          {"description", Shape::kText},
                                          {"examples", Shape::kList},
                                          {"deprecated", Shape::kBoolean},
                                          {"readOnly", Shape::kBoolean},
                                          {"writeOnly", Shape::kBoolean},
                                          {"$schema", Shape::kText},
                                          {"$id", Shape::kText},
                                          {"$comment", Shape::kText},
                                          {"$defs", Shape::kObject},
                                          {"definitions", Shape::kObject},
                                          {"$anchor", Shape::kText},
                                          {"uniqueItems", Shape::kBoolean}}};

void check_kind(const Value& value, const std::string& path, std::initializer_list<Value::Kind> kinds,
                const char* expected) {
  if (std::find(kinds.begin(), kinds.end(), value.kind()) != kinds.end()) return;
  throw GuideError(path + ": expected " + expected + ", found " + render(value));
}

void check_shape(const Value& value, std::string_view keyword, const std::string& path) {
  using Kind = Value::Kind;
  const auto* known =
      std::find_if(kShapes.begin(), kShapes.end(), [&](const Shaped& s) { return s.keyword == keyword; });
  switch (known == kShapes.end() ? Shape::kAny : known->shape) {
    case Shape::kAny:
      return;
    case Shape::kText:
      return check_kind(value, path, {Kind::kText}, "a text");
    case Shape::kBoolean:
      return check_kind(value, path, {Kind::kBoolean}, "true or false");
    case Shape::kNumber:
      return check_kind(value, path, {Kind::kInteger, Kind::kHugeInteger, Kind::kReal}, "a number");
    case Shape::kList:
      return check_kind(value, path, {Kind::kList}, "a list");
    case Shape::kTexts:
      check_kind(value, path, {Kind::kList}, "a list of names");
      for (size_t i = 0; i < value.items().size(); ++i) {
        check_kind(value.items()[i], item_path(path, i), {Kind::kText}, "a name");
      }
      return;
    case Shape::kObject:
      return check_kind(value, path, {Kind::kObject}, "an object of schemas");
    case Shape::kSchema:
      return check_kind(value, path, {Kind::kObject, Kind::kBoolean}, "a schema");
    case Shape::kType:
      return check_kind(value, path, {Kind::kText, Kind::kList}, "a type or a list of types");
  }
}

// A schema with an identifier of its own is a document of its own: references in it would start from there. Other
// dialects give some of these keywords other meanings.
void check_identity(const Value& schema, const std::string& path) {
  static constexpr std::string_view kDialect = "https://json-schema.org/draft/2020-12/schema";
  if (!path.empty() && schema.find("$id") != nullptr) {
    throw GuideError(member_path(path, "$id") + ": the keyword is supported at the root only", IFAB_UNIMPLEMENTED);
  }
  const Value* dialect = schema.find("$schema");
  if (dialect == nullptr || dialect->text() == kDialect || dialect->text() == std::string(kDialect) + "#") return;
  throw GuideError(
      member_path(path, "$schema") + ": " + render(*dialect) + " is not supported, only " + std::string(kDialect),
      IFAB_UNIMPLEMENTED);
}

}  // namespace

void check_keywords(const Value& schema, const std::string& path) {
  for (const Value::Member& member : schema.members()) {
    check_shape(member.value, member.key, member_path(path, member.key));
    if (among(kEnforced, member.key) || among(kAnnotations, member.key)) continue;
    // Forms of these that constrain nothing.
    if (member.key == "uniqueItems" && member.value.is(Value::Kind::kBoolean) && !member.value.boolean()) continue;
    throw GuideError(member_path(path, member.key) + ": the keyword is not supported", IFAB_UNIMPLEMENTED);
  }
  check_identity(schema, path);
}

void refuse_beside(const Value& schema, const std::string& path, std::string_view with,
                   const std::vector<std::string_view>& allowed) {
  for (const Value::Member& member : schema.members()) {
    if (member.key == with || among(kAnnotations, member.key)) continue;
    if (std::find(allowed.begin(), allowed.end(), member.key) != allowed.end()) continue;
    throw GuideError(member_path(path, member.key) + ": the keyword beside " + std::string(with) + " is not supported",
                     IFAB_UNIMPLEMENTED);
  }
}

unsigned types_of(const Value& schema, const std::string& path) {
  unsigned types = 0;
  if (const Value* type = schema.find("type")) {
    if (!type->is(Value::Kind::kList)) return type_named(*type, path);
    for (const Value& name : type->items()) types |= type_named(name, path);
    if (types == 0) throw GuideError(member_path(path, "type") + ": no type is named");
    return types;
  }
  // Values of other types would be valid too; what the schema speaks of is what is meant.
  for (const Value::Member& member : schema.members()) types |= speaks_of(member.key);
  return types == 0 ? static_cast<unsigned>(kEveryType) : types;
}

unsigned type_of_value(const Value& value) {
  switch (value.kind()) {
    case Value::Kind::kNull:
      return kNullType;
    case Value::Kind::kBoolean:
      return kBooleanType;
    case Value::Kind::kInteger:
    case Value::Kind::kHugeInteger:
      return kIntegerType;
    case Value::Kind::kReal:
      return Decimal(value.text()).whole() ? kIntegerType : kNumberType;
    case Value::Kind::kText:
      return kStringType;
    case Value::Kind::kList:
      return kArrayType;
    case Value::Kind::kObject:
      return kObjectType;
  }
  return 0;
}

const Value& resolve(const Value& root, const Value& schema, const std::string& path) {
  const Value* at = &schema;
  for (int steps = 0; const Value* reference = at->find("$ref"); ++steps) {
    const std::string& target = reference->text();
    if (!reference->is(Value::Kind::kText) || (target != "#" && !target.starts_with("#/"))) {
      throw GuideError(member_path(path, "$ref") + ": " + render(*reference) + " is not a place in this document",
                       IFAB_UNIMPLEMENTED);
    }
    const Value* next = follow(root, std::string_view(target).substr(1));
    if (next == nullptr) throw GuideError(member_path(path, "$ref") + ": " + render(*reference) + " does not exist");
    if (steps == 32) throw GuideError(member_path(path, "$ref") + ": " + render(*reference) + " leads to itself");
    at = next;
  }
  return *at;
}

std::string json_of(const Value& value) {
  std::string out;
  switch (value.kind()) {
    case Value::Kind::kNull:
      return "null";
    case Value::Kind::kBoolean:
      return value.boolean() ? "true" : "false";
    case Value::Kind::kInteger:
      return std::to_string(value.integer());
    case Value::Kind::kHugeInteger:
    case Value::Kind::kReal:
      return value.text();
    case Value::Kind::kText:
      return JsonText::quoted(value.text());
    case Value::Kind::kList:
      for (const Value& item : value.items()) out += (out.empty() ? "" : ", ") + json_of(item);
      return "[" + out + "]";
    case Value::Kind::kObject:
      for (const Value::Member& member : value.members()) {
        out += (out.empty() ? "" : ", ") + JsonText::quoted(member.key) + ": " + json_of(member.value);
      }
      return "{" + out + "}";
  }
  return out;
}

}  // namespace ifab::guide
