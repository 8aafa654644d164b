// SPDX-License-Identifier: Apache-2.0
#include "json_keywords.h"

#include <algorithm>
#include <array>
#include <optional>

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
    at = next;
    pointer.remove_prefix(end);
  }
  return at;
}

// The values of enum or const; nothing where there is neither.
std::optional<std::vector<std::string>> constants(const Value& schema) {
  std::vector<std::string> out;
  if (const Value* one = schema.find("const")) {
    out.push_back(json_of(*one));
  } else if (const Value* several = schema.find("enum")) {
    for (const Value& value : several->items()) out.push_back(json_of(value));
  } else {
    return std::nullopt;
  }
  return out;
}

bool disjoint_constants(const Value& a, const Value& b) {
  const auto left = constants(a);
  const auto right = constants(b);
  if (!left || !right) return false;
  return std::none_of(left->begin(), left->end(), [&](const std::string& value) {
    return std::find(right->begin(), right->end(), value) != right->end();
  });
}

bool requires_member(const Value& schema, const std::string& name) {
  const Value* required = schema.find("required");
  return required != nullptr && std::any_of(required->items().begin(), required->items().end(),
                                            [&](const Value& item) { return item.text() == name; });
}

}  // namespace

void check_keywords(const Value& schema, const std::string& path) {
  for (const Value::Member& member : schema.members()) {
    if (among(kEnforced, member.key) || among(kAnnotations, member.key)) continue;
    // Forms of these that constrain nothing.
    if (member.key == "uniqueItems" && member.value.is(Value::Kind::kBoolean) && !member.value.boolean()) continue;
    throw GuideError(member_path(path, member.key) + ": the keyword is not supported", IFAB_UNIMPLEMENTED);
  }
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
      return kNumberType;
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

bool told_apart(const Value& root, const Value& a, const Value& b) {
  const std::string nowhere;
  const Value& left = resolve(root, a, nowhere);
  const Value& right = resolve(root, b, nowhere);
  if (!left.is(Value::Kind::kObject) || !right.is(Value::Kind::kObject)) return false;
  for (const std::string_view keyword : {"anyOf", "oneOf", "allOf"}) {
    if (left.find(keyword) != nullptr || right.find(keyword) != nullptr) return false;
  }
  if (disjoint_constants(left, right)) return true;
  // Types are only sure where they are named: without `type` a schema is valid for values that it does not speak of.
  if (left.find("type") == nullptr || right.find("type") == nullptr) return false;
  const unsigned common = types_of(left, "") & types_of(right, "");
  if (common == 0) return true;
  const Value* members = left.find("properties");
  const Value* others = right.find("properties");
  if (common != kObjectType || members == nullptr || others == nullptr) return false;
  return std::any_of(members->members().begin(), members->members().end(), [&](const Value::Member& member) {
    const Value* other = others->find(member.key);
    return other != nullptr && requires_member(left, member.key) && requires_member(right, member.key) &&
           disjoint_constants(member.value, *other);
  });
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
