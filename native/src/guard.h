// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <exception>
#include <new>
#include <string_view>

#include "ifab/engine.h"
#include "status.h"
#include "text.h"

namespace ifab {

// Writes a message into a caller's buffer, cut between characters, NUL-terminated.
inline void write_text(std::string_view message, char* buffer, size_t cap) {
  if (buffer == nullptr || cap == 0) return;
  const std::string_view cut = cut_text(message, cap - 1);
  std::memcpy(buffer, cut.data(), cut.size());
  buffer[cut.size()] = '\0';
}

// The wall of the C interface: runs `body`, which returns a Status, and lets no exception through.
template <class Body>
ifab_status_t guard(char* err, size_t err_cap, Body&& body) noexcept {
  try {
    const Status status = body();
    if (!status.ok()) write_text(status.message(), err, err_cap);
    return status.code();
  } catch (const std::bad_alloc&) {
    write_text("out of memory", err, err_cap);
    return IFAB_RESOURCE_EXHAUSTED;
  } catch (const std::exception& error) {
    write_text(error.what(), err, err_cap);
  } catch (...) {
    write_text("unknown exception", err, err_cap);
  }
  return IFAB_INTERNAL;
}

}  // namespace ifab
