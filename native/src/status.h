// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <utility>

#include "ifab/engine.h"

namespace ifab {

// A status of the C interface with its message. Errors travel as values inside the library.
class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(ifab_status_t code, std::string message) : code_(code), message_(std::move(message)) {}

  bool ok() const { return code_ == IFAB_OK; }
  ifab_status_t code() const { return code_; }
  const std::string& message() const { return message_; }

 private:
  ifab_status_t code_ = IFAB_OK;
  std::string message_;
};

// One thing wrong with a document: where, what is there, what should be.
struct Finding {
  std::string path;
  std::string found;
  std::string expected;
};

}  // namespace ifab
