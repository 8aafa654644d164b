// SPDX-License-Identifier: Apache-2.0
//
// What must agree between the fields of a document: the `x-rules` of a schema. Private to the schema part.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "document.h"

namespace ifab {

// One step of a path into a document: a member, an item counted from the front or (negative) the back, or every item.
struct PathStep {
  enum class Kind { kMember, kItem, kEveryItem };
  Kind kind = Kind::kMember;
  std::string member;
  int64_t index = 0;
};

// Something that a rule compares: a value of the document, or made of such.
struct Operand {
  enum class Kind { kPath, kCount, kSum, kProduct, kConstant };
  Kind kind = Kind::kConstant;
  std::vector<PathStep> path;  // kPath, kCount: the items of a list, counted
  std::vector<Operand> terms;  // kSum, kProduct
  Value constant = Value::null();
};

enum class Comparison { kBelow, kAtMost, kAbove, kAtLeast, kEqual, kUnequal, kIn, kUnique };

struct Statement {
  Operand left;
  Comparison comparison = Comparison::kEqual;
  Operand right;  // not for kUnique
};

// A statement that must hold, where its conditions do.
struct Rule {
  std::vector<Statement> when;
  Statement require;
  std::string at;        // path that a finding names; empty: the left side's own
  std::string expected;  // `{right}` stands for the value of the right side
};

// Compiles the `x-rules` of a schema document. Throws std::logic_error, naming the schema, for what is not understood.
std::vector<Rule> compile_rules(std::string_view name, const Value& root);

// Appends what the rule finds wrong. A rule whose values are missing or of kinds that cannot be compared finds nothing.
void check_rule(const Rule& rule, const Value& document, std::vector<Finding>& findings);

}  // namespace ifab
