// SPDX-License-Identifier: Apache-2.0
//
// The rules of contracts and engine configurations, interpreted.
//
// The rules live in engines/schema/*.schema.json and are built into the library. They are JSON Schema 2020-12, of which
// this reads a small part (engines/schema/README.md lists it), with `x-rules` for what must agree between fields.
// services/common/schema.py interprets the same files; a test holds both to the same findings.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "document.h"
#include "status.h"

namespace ifab {

class Schema {
 public:
  // The schema of engines/schema/<name>.schema.json: "contract", "llama", "simulated". Made on first use and kept.
  // Throws std::logic_error for a name that is not built in, and for a schema outside of what is interpreted.
  // Threads: any.
  static const Schema& named(std::string_view name);

  // A schema from its text, for tests. `name` is for messages. Throws as named() does.
  static Schema parse(std::string_view name, std::string_view text);

  // Appends everything that is wrong with a document: first field by field, then the rules between fields. A rule is
  // left out where one of its values is missing or mistyped, which is a finding already.
  void check(const Value& document, std::vector<Finding>& findings) const;

  Schema(Schema&&) noexcept;
  Schema& operator=(Schema&&) noexcept;
  ~Schema();

 private:
  struct Impl;
  explicit Schema(std::unique_ptr<const Impl> impl);
  std::unique_ptr<const Impl> impl_;
};

// Reads a document and checks it. Returns it where it is JSON at all, with findings or not: only a document without
// findings may be used.
std::optional<Value> read_checked(std::string_view text, std::string_view schema_name, std::vector<Finding>& findings);

// Findings as text for people, one a line: "limits.slots: 0, expected integer from 1 to 65536".
std::string describe(const std::vector<Finding>& findings);

}  // namespace ifab
