// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "document.h"

namespace ifab::guide {

// Whether the schemas of a oneOf exclude each other, so that a value of one of them is valid under exactly one.
//
// They do where they have other types, other constants, or a required member with other constants. Constants are equal
// where their values are: 1 is 1.0, and members have no order. Private to the schema reader.
class Apart {
 public:
  // Steps of comparing, in all the oneOf of a document: some tenths of a second.
  static constexpr size_t kMostSteps = 5'000'000;

  explicit Apart(const Value& root) : root_(root) {}

  // `branches` have been read as schemas. Throws GuideError, naming two of them, where a value could be valid under
  // both, and before comparing where that would take more than kMostSteps.
  void check(const std::vector<Value>& branches, const std::string& path);

 private:
  using Ids = std::vector<uint32_t>;  // ascending
  struct Summary {
    const Ids* constants = nullptr;                  // all its values; null where they are not listed
    unsigned types = 0;                              // that its values may have
    std::map<std::string_view, const Ids*> members;  // required ones whose values are listed
    size_t steps = 1;                                // to go through the members' values once
  };

  const Summary& summary(const Value& schema);
  // The values that enum or const allow beside `type`; null where there is neither.
  const Ids* constants(const Value& schema);
  void check_constants(const std::vector<const Summary*>& summaries, const std::string& path) const;
  void check_types(const std::vector<const Summary*>& summaries, const std::string& path) const;
  void check_objects(const std::vector<const Summary*>& summaries, const std::string& path);
  void count(size_t steps, const std::string& path);

  const Value& root_;
  std::map<std::string, uint32_t> ids_;  // of values, by their one text
  std::map<const Value*, std::optional<Ids>> constants_;
  std::map<const Value*, Summary> summaries_;
  size_t steps_ = 0;
};

}  // namespace ifab::guide
