// SPDX-License-Identifier: Apache-2.0
//
// Strict reading of one JSON document.
//
// The documents of an engine directory are small, written by machines, and decide what a card may be asked to do. So
// nothing is forgiven: what RFC 8259 leaves open (duplicate keys, depth, size, numbers beyond a double) is refused.
// services/common/schema.py reads with the same rules and gives the same findings.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "status.h"

namespace ifab {

inline constexpr size_t kMaxDocumentBytes = size_t{1} << 20;
inline constexpr size_t kMaxDocumentDepth = 64;
// Findings that one document may have; what is beyond is one last finding that says so.
inline constexpr size_t kMaxFindings = 200;

// Appends a finding, within kMaxFindings.
void add_finding(std::vector<Finding>& findings, Finding finding);

// One value of a document, as written.
class Value {
 public:
  enum class Kind { kNull, kBoolean, kInteger, kHugeInteger, kReal, kText, kList, kObject };
  struct Member;

  static Value null();
  static Value of_boolean(bool value);
  static Value of_integer(int64_t value);
  static Value of_huge_integer(std::string literal);        // whole, and outside int64_t
  static Value of_real(double value, std::string literal);  // written with a fraction or an exponent
  static Value of_text(std::string text);
  static Value list();
  static Value object();

  Kind kind() const { return kind_; }
  bool is(Kind kind) const { return kind_ == kind; }
  // The text that stands wherever a field does not apply to an engine.
  bool not_applicable() const { return kind_ == Kind::kText && text_ == "not_applicable"; }

  // Each is for its own kind; of another kind they give the empty value of their type.
  bool boolean() const { return kind_ == Kind::kBoolean && integer_ != 0; }
  int64_t integer() const { return kind_ == Kind::kInteger ? integer_ : 0; }
  double real() const;                               // of kInteger and kReal
  const std::string& text() const { return text_; }  // of kText; the literal of kReal and kHugeInteger
  const std::vector<Value>& items() const { return items_; }
  const std::vector<Member>& members() const { return members_; }

  // The member of that name; null where there is none, or where this is no object.
  const Value* find(std::string_view key) const;
  // The same for a document that a schema has passed and that therefore has the member: throws std::logic_error
  // where it has not.
  const Value& at(std::string_view key) const;

  void append(Value item);
  void insert(std::string key, Value value);

 private:
  explicit Value(Kind kind);

  Kind kind_;
  int64_t integer_ = 0;
  double real_ = 0;
  std::string text_;
  std::vector<Value> items_;
  std::vector<Member> members_;
};

struct Value::Member {
  std::string key;
  Value value;
};

// Reads a whole document. What cannot be read at all (not JSON, bytes after it, invalid UTF-8, too deep, too large, a
// number beyond a double) is exactly one finding with the empty path, and there is no value. A key given twice is a
// finding at its path, and the first of the two counts.
std::optional<Value> read_document(std::string_view text, std::vector<Finding>& findings);

// A value as the short text of a finding: at most some 60 ASCII characters, strings in quotes.
std::string render(const Value& value);
// A text in quotes, escaped to ASCII and cut as in a finding.
std::string render_text(std::string_view text);

// The path of a member or an item of what lies at `path`.
std::string member_path(const std::string& path, std::string_view key);
std::string item_path(const std::string& path, size_t index);

}  // namespace ifab
