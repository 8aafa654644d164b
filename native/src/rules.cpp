// SPDX-License-Identifier: Apache-2.0
#include "rules.h"

#include <array>
#include <optional>
#include <set>
#include <stdexcept>
#include <utility>

namespace ifab {
namespace {

constexpr std::array<std::pair<std::string_view, Comparison>, 8> kComparisons = {{
    {"<", Comparison::kBelow},
    {"<=", Comparison::kAtMost},
    {">", Comparison::kAbove},
    {">=", Comparison::kAtLeast},
    {"==", Comparison::kEqual},
    {"!=", Comparison::kUnequal},
    {"in", Comparison::kIn},
    {"unique", Comparison::kUnique},
}};

// A value of one side of a statement: always a boolean, an integer, a real or a text.
struct Term {
  std::string path;  // empty where it is computed or constant
  Value value;
  std::string shown;  // for findings
};

// ---- Compiling

class RuleCompiler {
 public:
  explicit RuleCompiler(std::string_view name) : name_(name) {}

  Rule rule(const Value& source) const {
    Rule out;
    for (const Value::Member& member : source.members()) {
      const bool known = member.key == "when" || member.key == "require" || member.key == "at" ||
                         member.key == "expected" || member.key == "description";
      if (!known) reject("unknown member " + member.key);
    }
    if (const Value* when = source.find("when")) {
      for (const Value& condition : when->items()) {
        out.when.push_back(statement(condition));
        if (out.when.back().comparison == Comparison::kUnique) reject("`unique` is no condition");
      }
    }
    out.require = statement(source.at("require"));
    out.expected = source.at("expected").text();
    if (const Value* at = source.find("at")) out.at = at->text();
    const Operand::Kind left = out.require.left.kind;
    const bool named = left == Operand::Kind::kPath || left == Operand::Kind::kCount || !out.at.empty();
    if (!named) reject("`at` is missing, and the left side is no path");
    if (out.expected.empty()) reject("`expected` is missing");
    return out;
  }

 private:
  [[noreturn]] void reject(const std::string& why) const {
    throw std::logic_error("schema " + std::string(name_) + ", x-rules: " + why);
  }

  Statement statement(const Value& source) const {
    const std::vector<Value>& parts = source.items();
    if (parts.size() < 2) reject("statement of fewer than two parts");
    Statement out;
    out.left = operand(parts[0]);
    out.comparison = comparison(parts[1].text());
    const size_t size = out.comparison == Comparison::kUnique ? 2 : 3;
    if (parts.size() != size) reject("statement of a wrong number of parts");
    if (size == 3) out.right = operand(parts[2]);
    return out;
  }

  Comparison comparison(const std::string& sign) const {
    for (const auto& [text, value] : kComparisons) {
      if (text == sign) return value;
    }
    reject("unknown comparison " + sign);
  }

  Operand operand(const Value& source) const {
    Operand out;
    if (source.is(Value::Kind::kText)) {
      out.kind = Operand::Kind::kPath;
      out.path = path(source.text());
    } else if (source.is(Value::Kind::kObject) && source.members().size() == 1) {
      const auto& [key, value] = source.members().front();
      if (key == "count") {
        out.kind = Operand::Kind::kCount;
        out.path = path(value.text());
      } else if (key == "text") {
        out.constant = value;
      } else if (key == "sum" || key == "product") {
        out.kind = key == "sum" ? Operand::Kind::kSum : Operand::Kind::kProduct;
        for (const Value& term : value.items()) out.terms.push_back(operand(term));
        if (out.terms.empty()) reject(key + " of nothing");
      } else {
        reject("unknown operand " + key);
      }
    } else if (source.is(Value::Kind::kInteger) || source.is(Value::Kind::kBoolean)) {
      out.constant = source;
    } else {
      reject("operand of an unknown kind");
    }
    return out;
  }

  // "files[].path", "shape[-1]", "limits.slots"
  std::vector<PathStep> path(std::string_view text) const {
    std::vector<PathStep> out;
    while (!text.empty()) {
      if (text.front() == '[') {
        const size_t end = text.find(']');
        if (end == std::string_view::npos) reject("path with an open bracket");
        const std::string index(text.substr(1, end - 1));
        if (index.empty()) {
          out.push_back({PathStep::Kind::kEveryItem, "", 0});
        } else {
          out.push_back({PathStep::Kind::kItem, "", std::stoll(index)});
        }
        text.remove_prefix(end + 1);
        if (text.starts_with('.')) text.remove_prefix(1);
      } else {
        const size_t end = text.find_first_of(".[");
        out.push_back({PathStep::Kind::kMember, std::string(text.substr(0, end)), 0});
        text.remove_prefix(end == std::string_view::npos ? text.size() : end);
        if (text.starts_with('.')) text.remove_prefix(1);
      }
    }
    if (out.empty()) reject("empty path");
    return out;
  }

  std::string_view name_;
};

// ---- Evaluating

using Found = std::pair<std::string, const Value*>;

void follow(const Value& value, const std::string& at, const std::vector<PathStep>& path, size_t step,
            std::vector<Found>& out) {
  if (step == path.size()) {
    out.emplace_back(at, &value);
    return;
  }
  const PathStep& next = path[step];
  if (next.kind == PathStep::Kind::kMember) {
    if (const Value* member = value.find(next.member))
      follow(*member, member_path(at, next.member), path, step + 1, out);
    return;
  }
  const size_t size = value.items().size();
  if (next.kind == PathStep::Kind::kEveryItem) {
    for (size_t i = 0; i < size; ++i) follow(value.items()[i], item_path(at, i), path, step + 1, out);
    return;
  }
  const int64_t index = next.index < 0 ? next.index + static_cast<int64_t>(size) : next.index;
  if (index < 0 || index >= static_cast<int64_t>(size)) return;
  const auto i = static_cast<size_t>(index);
  follow(value.items()[i], item_path(at, i), path, step + 1, out);
}

bool comparable(const Value& value) {
  return value.is(Value::Kind::kBoolean) || value.is(Value::Kind::kInteger) || value.is(Value::Kind::kReal) ||
         value.is(Value::Kind::kText);
}

bool is_number(const Value& value) {
  return value.is(Value::Kind::kInteger) || value.is(Value::Kind::kReal);
}

std::vector<Term> evaluate(const Operand& operand, const Value& document);

// A sum or product of integers; nothing where a term is missing, is no integer, or the result is beyond 64 bits.
std::vector<Term> evaluate_terms(const Operand& operand, const Value& document) {
  const bool sum = operand.kind == Operand::Kind::kSum;
  int64_t total = sum ? 0 : 1;
  for (const Operand& term : operand.terms) {
    const std::vector<Term> values = evaluate(term, document);
    if (values.size() != 1 || !values[0].value.is(Value::Kind::kInteger)) return {};
    const int64_t value = values[0].value.integer();
    const bool overflow =
        sum ? __builtin_add_overflow(total, value, &total) : __builtin_mul_overflow(total, value, &total);
    if (overflow) return {};
  }
  return {{"", Value::of_integer(total), std::to_string(total)}};
}

std::vector<Term> evaluate(const Operand& operand, const Value& document) {
  if (operand.kind == Operand::Kind::kConstant) return {{"", operand.constant, render(operand.constant)}};
  if (operand.kind == Operand::Kind::kSum || operand.kind == Operand::Kind::kProduct) {
    return evaluate_terms(operand, document);
  }
  std::vector<Found> found;
  follow(document, "", operand.path, 0, found);
  std::vector<Term> out;
  for (const auto& [path, value] : found) {
    if (operand.kind == Operand::Kind::kPath && comparable(*value)) {
      out.push_back({path, *value, render(*value)});
    } else if (operand.kind == Operand::Kind::kCount && value->is(Value::Kind::kList)) {
      out.push_back({path, Value::of_integer(static_cast<int64_t>(value->items().size())), render(*value)});
    }
  }
  return out;
}

bool equal(const Value& a, const Value& b) {
  if (a.is(Value::Kind::kInteger) && b.is(Value::Kind::kInteger)) return a.integer() == b.integer();
  if (is_number(a) && is_number(b)) return a.real() == b.real();
  if (a.kind() != b.kind()) return false;
  return a.is(Value::Kind::kText) ? a.text() == b.text() : a.boolean() == b.boolean();
}

template <class Number>
bool ordered(Comparison comparison, Number a, Number b) {
  switch (comparison) {
    case Comparison::kBelow:
      return a < b;
    case Comparison::kAtMost:
      return a <= b;
    case Comparison::kAbove:
      return a > b;
    default:
      return a >= b;
  }
}

// Whether `a comparison b`; nothing where the two cannot be compared so.
std::optional<bool> holds(Comparison comparison, const Value& a, const Value& b) {
  if (comparison == Comparison::kEqual) return equal(a, b);
  if (comparison == Comparison::kUnequal) return !equal(a, b);
  if (a.is(Value::Kind::kInteger) && b.is(Value::Kind::kInteger)) return ordered(comparison, a.integer(), b.integer());
  if (is_number(a) && is_number(b)) return ordered(comparison, a.real(), b.real());
  return std::nullopt;
}

bool contains(const std::vector<Term>& terms, const Value& value) {
  for (const Term& term : terms) {
    if (equal(term.value, value)) return true;
  }
  return false;
}

// A condition holds only where it can be evaluated, on everything that its left side names.
bool applies(const Statement& condition, const Value& document) {
  const std::vector<Term> left = evaluate(condition.left, document);
  const std::vector<Term> right = evaluate(condition.right, document);
  if (left.empty() || right.empty()) return false;
  for (const Term& term : left) {
    const std::optional<bool> result = condition.comparison == Comparison::kIn
                                           ? contains(right, term.value)
                                           : holds(condition.comparison, term.value, right[0].value);
    if (!result.value_or(false)) return false;
  }
  return true;
}

std::string with_right(std::string text, const std::string& shown) {
  static constexpr std::string_view kRight = "{right}";
  const size_t at = text.find(kRight);
  if (at != std::string::npos) text.replace(at, kRight.size(), shown);
  return text;
}

}  // namespace

std::vector<Rule> compile_rules(std::string_view name, const Value& root) {
  std::vector<Rule> out;
  if (const Value* rules = root.find("x-rules")) {
    const RuleCompiler compiler(name);
    for (const Value& rule : rules->items()) out.push_back(compiler.rule(rule));
  }
  return out;
}

void check_rule(const Rule& rule, const Value& document, std::vector<Finding>& findings) {
  for (const Statement& condition : rule.when) {
    if (!applies(condition, document)) return;
  }
  const auto report = [&](const Term& term, const std::string& right) {
    add_finding(findings, {rule.at.empty() ? term.path : rule.at, term.shown, with_right(rule.expected, right)});
  };
  const std::vector<Term> left = evaluate(rule.require.left, document);
  if (rule.require.comparison == Comparison::kUnique) {
    std::set<std::string> seen;
    for (const Term& term : left) {
      const std::string key = term.value.is(Value::Kind::kText) ? '"' + term.value.text() : term.shown;
      if (!seen.insert(key).second) report(term, "");
    }
    return;
  }
  const std::vector<Term> right = evaluate(rule.require.right, document);
  if (right.empty()) return;
  for (const Term& term : left) {
    if (rule.require.comparison == Comparison::kIn) {
      if (!contains(right, term.value)) report(term, "");
    } else if (!holds(rule.require.comparison, term.value, right[0].value).value_or(true)) {
      report(term, right[0].shown);
    }
  }
}

}  // namespace ifab
