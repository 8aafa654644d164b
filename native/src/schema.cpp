// SPDX-License-Identifier: Apache-2.0
#include "schema.h"

#include <chrono>
#include <map>
#include <mutex>
#include <set>
#include <stdexcept>

#include "embedded_schemas.h"
#include "rules.h"
#include "schema_node.h"

namespace ifab {
namespace {

constexpr const char* kAbsent = "absent";

size_t count_code_points(const std::string& text) {
  size_t count = 0;
  for (const char c : text) count += (static_cast<unsigned char>(c) & 0xC0) != 0x80 ? 1 : 0;
  return count;
}

// YYYY-MM-DD of a day that exists.
bool is_date(const std::string& text) {
  if (text.size() != 10 || text[4] != '-' || text[7] != '-') return false;
  int digits[8];
  size_t count = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    if (i == 4 || i == 7) continue;
    if (text[i] < '0' || text[i] > '9') return false;
    digits[count++] = text[i] - '0';
  }
  const int year = digits[0] * 1000 + digits[1] * 100 + digits[2] * 10 + digits[3];
  const auto month = static_cast<unsigned>(digits[4] * 10 + digits[5]);
  const auto day = static_cast<unsigned>(digits[6] * 10 + digits[7]);
  return year >= 1 &&
         std::chrono::year_month_day(std::chrono::year(year), std::chrono::month(month), std::chrono::day(day)).ok();
}

bool text_fits(const SchemaNode& node, const std::string& text) {
  if (node.date) return is_date(text);
  if (!node.words.empty()) {
    for (const std::string& word : node.words) {
      if (word == text) return true;
    }
    return false;
  }
  return count_code_points(text) <= node.max_length && std::regex_match(text, *node.pattern);
}

class Checker {
 public:
  explicit Checker(std::vector<Finding>& findings) : findings_(findings) {}

  void check(const SchemaNode& node, const Value& value, const std::string& path) {
    if (node.may_not_apply && value.not_applicable()) return;
    switch (node.type) {
      case SchemaNode::Type::kObject:
        return object(node, value, path);
      case SchemaNode::Type::kList:
        return list(node, value, path);
      case SchemaNode::Type::kText:
        return scalar(node, value, path, value.is(Value::Kind::kText) && text_fits(node, value.text()));
      case SchemaNode::Type::kInteger:
        return scalar(
            node, value, path,
            value.is(Value::Kind::kInteger) && value.integer() >= node.minimum && value.integer() <= node.maximum);
      case SchemaNode::Type::kReal:
        return scalar(node, value, path, real_fits(node, value));
      case SchemaNode::Type::kBoolean:
        return scalar(node, value, path, value.is(Value::Kind::kBoolean));
    }
  }

 private:
  void report(const std::string& path, std::string found, std::string expected) {
    add_finding(findings_, {path, std::move(found), std::move(expected)});
  }

  void scalar(const SchemaNode& node, const Value& value, const std::string& path, bool fits) {
    if (!fits) report(path, render(value), node.expected);
  }

  static bool real_fits(const SchemaNode& node, const Value& value) {
    if (!value.is(Value::Kind::kReal) && !value.is(Value::Kind::kInteger)) return false;
    const double number = value.real();
    const bool above = node.real_above_minimum ? number > node.real_minimum : number >= node.real_minimum;
    return above && number <= node.real_maximum;
  }

  void object(const SchemaNode& node, const Value& value, const std::string& path) {
    if (!value.is(Value::Kind::kObject)) return report(path, render(value), node.expected);
    for (const auto& [key, property] : node.properties) {
      const std::string at = member_path(path, key);
      const Value* member = value.find(key);
      if (member == nullptr) {
        absent(*property, at);
      } else {
        check(*property, *member, at);
      }
    }
    for (const Value::Member& member : value.members()) {
      bool known = false;
      for (const auto& property : node.properties) known = known || property.first == member.key;
      if (!known) report(member_path(path, member.key), render(member.value), "no field of this name");
    }
  }

  // Every field of an object that is not there is missing, and named.
  void absent(const SchemaNode& node, const std::string& path) {
    if (node.type != SchemaNode::Type::kObject || node.may_not_apply) return report(path, kAbsent, node.expected);
    for (const auto& [key, property] : node.properties) absent(*property, member_path(path, key));
  }

  void list(const SchemaNode& node, const Value& value, const std::string& path) {
    if (!value.is(Value::Kind::kList)) return report(path, render(value), node.expected);
    const size_t size = value.items().size();
    if (size < node.min_items || size > node.max_items) report(path, render(value), node.expected);
    std::set<std::string> seen;
    for (size_t i = 0; i < size; ++i) {
      const Value& item = value.items()[i];
      check(*node.items, item, item_path(path, i));
      const bool text = item.is(Value::Kind::kText);
      if (!node.unique || !(text || item.is(Value::Kind::kInteger))) continue;
      if (!seen.insert(text ? '"' + item.text() : render(item)).second) {
        report(item_path(path, i), render(item), "no item twice");
      }
    }
  }

  std::vector<Finding>& findings_;
};

}  // namespace

struct Schema::Impl {
  std::unique_ptr<SchemaNode> root;
  std::vector<Rule> rules;
};

Schema::Schema(std::unique_ptr<const Impl> impl) : impl_(std::move(impl)) {}
Schema::Schema(Schema&&) noexcept = default;
Schema& Schema::operator=(Schema&&) noexcept = default;
Schema::~Schema() = default;

Schema Schema::parse(std::string_view name, std::string_view text) {
  std::vector<Finding> findings;
  const std::optional<Value> root = read_document(text, findings);
  if (!root || !findings.empty()) {
    throw std::logic_error("schema " + std::string(name) + " is no strict JSON: " + describe(findings));
  }
  auto impl = std::make_unique<Impl>();
  impl->root = compile_schema(name, *root);
  impl->rules = compile_rules(name, *root);
  return Schema(std::move(impl));
}

const Schema& Schema::named(std::string_view name) {
  static std::mutex mutex;
  static std::map<std::string, Schema, std::less<>> made;
  const std::lock_guard lock(mutex);
  if (const auto found = made.find(name); found != made.end()) return found->second;
  for (const EmbeddedSchema& embedded : embedded_schemas()) {
    if (name == embedded.name) return made.emplace(name, parse(name, embedded.text)).first->second;
  }
  throw std::logic_error("no schema of the name " + std::string(name) + " is built in");
}

void Schema::check(const Value& document, std::vector<Finding>& findings) const {
  Checker(findings).check(*impl_->root, document, "");
  for (const Rule& rule : impl_->rules) check_rule(rule, document, findings);
}

std::optional<Value> read_checked(std::string_view text, std::string_view schema_name, std::vector<Finding>& findings) {
  std::optional<Value> document = read_document(text, findings);
  if (document) Schema::named(schema_name).check(*document, findings);
  return document;
}

std::string describe(const std::vector<Finding>& findings) {
  std::string out;
  for (const Finding& finding : findings) {
    if (!out.empty()) out += '\n';
    if (!finding.path.empty()) out += finding.path + ": ";
    out += finding.found + ", expected " + finding.expected;
  }
  return out;
}

}  // namespace ifab
