// SPDX-License-Identifier: Apache-2.0
//
// What holds for the findings of any document whatever.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "document.h"
#include "status.h"

namespace ifab::fuzz {

inline void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "does not hold: %s\n", what);
  std::abort();
}

inline bool plain_ascii(const std::string& text) {
  for (const char c : text) {
    if (c < 0x20 || c > 0x7e) return false;
  }
  return true;
}

inline void check_findings(const std::vector<Finding>& findings) {
  require(findings.size() <= kMaxFindings + 1, "findings are bounded");
  for (const Finding& finding : findings) {
    require(!finding.found.empty() && !finding.expected.empty(), "a finding says what was found and expected");
    require(finding.found.size() <= 512, "what was found is short");
    require(plain_ascii(finding.path) && plain_ascii(finding.found), "findings are ASCII");
  }
}

}  // namespace ifab::fuzz
