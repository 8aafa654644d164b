// SPDX-License-Identifier: Apache-2.0
#include "schema_node.h"

#include <initializer_list>
#include <stdexcept>

namespace ifab {
namespace {

constexpr std::string_view kDefinitions = "#/$defs/";
constexpr int kMaxSchemaDepth = 32;

class Compiler {
 public:
  Compiler(std::string_view name, const Value& root) : name_(name), root_(root) {}

  std::unique_ptr<SchemaNode> node(const Value& schema, const std::string& at, int depth) const {
    if (depth > kMaxSchemaDepth) reject(at, "nested too deeply, or a reference to itself");
    if (!schema.is(Value::Kind::kObject)) reject(at, "no object");
    if (const Value* reference = schema.find("$ref")) {
      only(schema, at, {"$ref"});
      return node(definition(*reference, at), at, depth + 1);
    }
    if (const Value* choice = schema.find("anyOf")) {
      only(schema, at, {"anyOf", "description"});
      return optional_node(*choice, at, depth);
    }
    return typed_node(schema, at, depth);
  }

 private:
  [[noreturn]] void reject(const std::string& at, const std::string& why) const {
    throw std::logic_error("schema " + std::string(name_) + ", " + (at.empty() ? "root" : at) + ": " + why);
  }

  void only(const Value& schema, const std::string& at, std::initializer_list<std::string_view> keywords) const {
    for (const Value::Member& member : schema.members()) {
      bool known = false;
      for (const std::string_view keyword : keywords) known = known || keyword == member.key;
      if (!known) reject(at, "keyword " + member.key + " is not interpreted here");
    }
  }

  const Value& need(const Value& schema, const std::string& at, std::string_view keyword, Value::Kind kind) const {
    const Value* value = schema.find(keyword);
    if (value == nullptr || !value->is(kind)) reject(at, "keyword " + std::string(keyword) + " missing or mistyped");
    return *value;
  }

  size_t need_size(const Value& schema, const std::string& at, std::string_view keyword) const {
    const int64_t value = need(schema, at, keyword, Value::Kind::kInteger).integer();
    if (value < 0) reject(at, "keyword " + std::string(keyword) + " is negative");
    return static_cast<size_t>(value);
  }

  const Value& definition(const Value& reference, const std::string& at) const {
    const Value* definitions = root_.find("$defs");
    if (!reference.text().starts_with(kDefinitions) || definitions == nullptr) reject(at, "reference to no definition");
    const Value* target = definitions->find(reference.text().substr(kDefinitions.size()));
    if (target == nullptr) reject(at, "reference to no definition");
    return *target;
  }

  // anyOf is read in one form only: "not_applicable", or what the second branch says.
  std::unique_ptr<SchemaNode> optional_node(const Value& choice, const std::string& at, int depth) const {
    const bool form = choice.items().size() == 2 && choice.items()[0].members().size() == 1 &&
                      choice.items()[0].find("const") != nullptr && choice.items()[0].at("const").not_applicable();
    if (!form) reject(at, "anyOf is not a choice between not_applicable and one other schema");
    auto out = node(choice.items()[1], at, depth + 1);
    out->may_not_apply = true;
    out->expected = "\"not_applicable\" or " + out->expected;
    return out;
  }

  std::unique_ptr<SchemaNode> typed_node(const Value& schema, const std::string& at, int depth) const {
    auto out = std::make_unique<SchemaNode>();
    const std::string& type = need(schema, at, "type", Value::Kind::kText).text();
    if (type == "object") {
      object(schema, at, depth, *out);
    } else if (type == "array") {
      list(schema, at, depth, *out);
    } else if (type == "string") {
      text(schema, at, *out);
    } else if (type == "integer") {
      integer(schema, at, *out);
    } else if (type == "number") {
      real(schema, at, *out);
    } else if (type == "boolean") {
      only(schema, at, {"type", "description"});
      out->type = SchemaNode::Type::kBoolean;
      out->expected = "true or false";
    } else {
      reject(at, "type " + type + " is not interpreted");
    }
    return out;
  }

  // Every property is required and no other is allowed: an engine's document has no defaults.
  void object(const Value& schema, const std::string& at, int depth, SchemaNode& out) const {
    if (depth == 0) {
      only(schema, at,
           {"$schema", "$id", "$defs", "title", "description", "type", "additionalProperties", "required", "properties",
            "x-rules"});
    } else {
      only(schema, at, {"description", "type", "additionalProperties", "required", "properties"});
    }
    out.type = SchemaNode::Type::kObject;
    out.expected = "object";
    if (need(schema, at, "additionalProperties", Value::Kind::kBoolean).boolean())
      reject(at, "open to other properties");
    const Value& required = need(schema, at, "required", Value::Kind::kList);
    const Value& properties = need(schema, at, "properties", Value::Kind::kObject);
    if (required.items().size() != properties.members().size()) reject(at, "not every property is required");
    for (size_t i = 0; i < properties.members().size(); ++i) {
      const Value::Member& property = properties.members()[i];
      if (required.items()[i].text() != property.key) reject(at, "required and properties differ in order");
      out.properties.emplace_back(property.key, node(property.value, member_path(at, property.key), depth + 1));
    }
  }

  void list(const Value& schema, const std::string& at, int depth, SchemaNode& out) const {
    only(schema, at, {"description", "type", "minItems", "maxItems", "uniqueItems", "items"});
    out.type = SchemaNode::Type::kList;
    out.min_items = need_size(schema, at, "minItems");
    out.max_items = need_size(schema, at, "maxItems");
    out.unique = schema.find("uniqueItems") != nullptr && schema.at("uniqueItems").boolean();
    out.items = node(need(schema, at, "items", Value::Kind::kObject), at + "[]", depth + 1);
    const SchemaNode::Type item = out.items->type;
    if (out.unique && item != SchemaNode::Type::kText && item != SchemaNode::Type::kInteger) {
      reject(at, "uniqueItems is for texts and integers");
    }
    out.expected = "list of " + std::to_string(out.min_items) + " to " + std::to_string(out.max_items) + " items";
  }

  void text(const Value& schema, const std::string& at, SchemaNode& out) const {
    out.type = SchemaNode::Type::kText;
    out.max_length = kMaxDocumentBytes;
    if (const Value* words = schema.find("enum")) {
      only(schema, at, {"description", "type", "enum"});
      for (const Value& word : words->items()) {
        if (!word.is(Value::Kind::kText)) reject(at, "enum of something else than texts");
        out.words.push_back(word.text());
        out.expected += (out.expected.empty() ? "one of " : ", ") + render_text(word.text());
      }
      if (out.words.empty()) reject(at, "enum without a word");
    } else if (const Value* format = schema.find("format")) {
      only(schema, at, {"description", "type", "format"});
      if (format->text() != "date") reject(at, "format " + format->text() + " is not interpreted");
      out.date = true;
      out.expected = "date as YYYY-MM-DD";
    } else {
      only(schema, at, {"description", "type", "maxLength", "pattern", "x-expected"});
      // The length bounds the work and the stack of the pattern.
      out.max_length = need_size(schema, at, "maxLength");
      out.pattern.emplace(need(schema, at, "pattern", Value::Kind::kText).text(), std::regex::ECMAScript);
      out.expected = need(schema, at, "x-expected", Value::Kind::kText).text();
    }
  }

  void integer(const Value& schema, const std::string& at, SchemaNode& out) const {
    out.type = SchemaNode::Type::kInteger;
    if (schema.find("const") != nullptr) {
      only(schema, at, {"description", "type", "const"});
      out.minimum = out.maximum = need(schema, at, "const", Value::Kind::kInteger).integer();
      out.expected = "integer " + std::to_string(out.minimum);
      return;
    }
    only(schema, at, {"description", "type", "minimum", "maximum"});
    out.minimum = need(schema, at, "minimum", Value::Kind::kInteger).integer();
    out.maximum = need(schema, at, "maximum", Value::Kind::kInteger).integer();
    out.expected = "integer from " + std::to_string(out.minimum) + " to " + std::to_string(out.maximum);
  }

  void real(const Value& schema, const std::string& at, SchemaNode& out) const {
    only(schema, at, {"description", "type", "minimum", "exclusiveMinimum", "maximum"});
    out.type = SchemaNode::Type::kReal;
    out.real_above_minimum = schema.find("exclusiveMinimum") != nullptr;
    const Value* minimum = schema.find(out.real_above_minimum ? "exclusiveMinimum" : "minimum");
    const Value* maximum = schema.find("maximum");
    if (minimum == nullptr || maximum == nullptr) reject(at, "number without minimum and maximum");
    out.real_minimum = minimum->real();
    out.real_maximum = maximum->real();
    out.expected = out.real_above_minimum ? "number above " + render(*minimum) + " and at most " + render(*maximum)
                                          : "number from " + render(*minimum) + " to " + render(*maximum);
  }

  std::string_view name_;
  const Value& root_;
};

}  // namespace

std::unique_ptr<SchemaNode> compile_schema(std::string_view name, const Value& root) {
  return Compiler(name, root).node(root, "", 0);
}

}  // namespace ifab
