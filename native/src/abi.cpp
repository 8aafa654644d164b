// SPDX-License-Identifier: Apache-2.0
//
// The functions of ifab/engine.h: each checks what can be checked without an engine and hands on.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <string>

#include "contract.h"
#include "detect.h"
#include "directory.h"
#include "engine.h"
#include "guard.h"
#include "ifab/engine.h"
#include "log.h"
#include "reports.h"
#include "status.h"

// The opaque handle: an engine and nothing else.
struct ifab_engine {
  std::unique_ptr<ifab::Engine> engine;
};

namespace ifab {
namespace {

// What struct_size may be: all revisions of a struct so far.
template <class Struct>
Status check_size(const char* name, size_t given) {
  if (given == sizeof(Struct)) return {};
  return {IFAB_INVALID_ARGUMENT, std::string(name) + ".struct_size: " + std::to_string(given) + ", expected " +
                                     std::to_string(sizeof(Struct))};
}

Status missing(const char* name) {
  return {IFAB_INVALID_ARGUMENT, std::string(name) + ": NULL"};
}

// The rule of every function that answers with a document.
Status write_document(const std::string& document, char* buffer, size_t cap, size_t* out_size) {
  if (out_size == nullptr) return missing("out_size");
  *out_size = document.size();
  if (cap < document.size()) {
    return {IFAB_OUT_OF_RANGE,
            "the document has " + std::to_string(document.size()) + " bytes, the buffer " + std::to_string(cap)};
  }
  if (buffer == nullptr) return missing("buffer");
  std::memcpy(buffer, document.data(), document.size());
  return {};
}

}  // namespace
}  // namespace ifab

using ifab::guard;
using ifab::missing;
using ifab::Status;

extern "C" {

void ifab_abi_version(uint32_t* out_major, uint32_t* out_minor) noexcept {
  if (out_major != nullptr) *out_major = IFAB_ABI_MAJOR;
  if (out_minor != nullptr) *out_minor = IFAB_ABI_MINOR;
}

const char* ifab_status_name(ifab_status_t status) noexcept {
  switch (status) {
    case IFAB_OK:
      return "OK";
    case IFAB_CANCELLED:
      return "CANCELLED";
    case IFAB_INVALID_ARGUMENT:
      return "INVALID_ARGUMENT";
    case IFAB_DEADLINE_EXCEEDED:
      return "DEADLINE_EXCEEDED";
    case IFAB_NOT_FOUND:
      return "NOT_FOUND";
    case IFAB_ALREADY_EXISTS:
      return "ALREADY_EXISTS";
    case IFAB_RESOURCE_EXHAUSTED:
      return "RESOURCE_EXHAUSTED";
    case IFAB_FAILED_PRECONDITION:
      return "FAILED_PRECONDITION";
    case IFAB_ABORTED:
      return "ABORTED";
    case IFAB_OUT_OF_RANGE:
      return "OUT_OF_RANGE";
    case IFAB_UNIMPLEMENTED:
      return "UNIMPLEMENTED";
    case IFAB_INTERNAL:
      return "INTERNAL";
    case IFAB_UNAVAILABLE:
      return "UNAVAILABLE";
    case IFAB_DATA_LOSS:
      return "DATA_LOSS";
    default:
      return "UNKNOWN";
  }
}

size_t ifab_struct_size(int32_t which) noexcept {
  switch (which) {
    case IFAB_STRUCT_REQUEST:
      return sizeof(ifab_request_t);
    case IFAB_STRUCT_EVENT:
      return sizeof(ifab_event_t);
    case IFAB_STRUCT_SUBMIT_RESULT:
      return sizeof(ifab_submit_result_t);
    case IFAB_STRUCT_POLL_BUFFERS:
      return sizeof(ifab_poll_buffers_t);
    case IFAB_STRUCT_STATS:
      return sizeof(ifab_stats_t);
    default:
      return 0;
  }
}

void ifab_log_set(ifab_log_fn fn, void* context, int32_t min_level) noexcept {
  ifab::set_log(fn, context, min_level);
}

ifab_status_t ifab_engine_inspect(const char* engine_dir, char* buffer, size_t cap, size_t* out_size, char* err,
                                  size_t err_cap) noexcept {
  return guard(err, err_cap, [&]() -> Status {
    if (engine_dir == nullptr) return missing("engine_dir");
    std::unique_ptr<const ifab::EngineDirectory> directory;
    if (Status status = ifab::EngineDirectory::open(engine_dir, directory); !status.ok()) return status;
    const ifab::Inspection inspection = ifab::inspect(*directory);
    const char* file = inspection.backend == nullptr ? "" : inspection.backend->configuration_file;
    return ifab::write_document(ifab::inspection_report(directory->contract_sha256(), file, inspection.findings),
                                buffer, cap, out_size);
  });
}

ifab_status_t ifab_engine_runs_here(const char* engine_dir, char* err, size_t err_cap) noexcept {
  return guard(err, err_cap, [&]() -> Status {
    if (engine_dir == nullptr) return missing("engine_dir");
    std::unique_ptr<const ifab::EngineDirectory> directory;
    if (Status status = ifab::EngineDirectory::open(engine_dir, directory); !status.ok()) return status;
    const ifab::BackendEntry* backend = ifab::inspect(*directory).backend;
    return backend == nullptr || backend->runs_here == nullptr ? Status{} : backend->runs_here();
  });
}

ifab_status_t ifab_contract_check(const char* json, size_t json_size, char* buffer, size_t cap, size_t* out_size,
                                  char* err, size_t err_cap) noexcept {
  return guard(err, err_cap, [&]() -> Status {
    if (json == nullptr && json_size > 0) return missing("json");
    std::vector<ifab::Finding> findings;
    (void)ifab::read_contract(std::string_view(json, json_size), findings);
    return ifab::write_document(ifab::findings_report(findings), buffer, cap, out_size);
  });
}

ifab_status_t ifab_engine_create(const char* engine_dir, ifab_engine_t** out_engine, char* err,
                                 size_t err_cap) noexcept {
  return guard(err, err_cap, [&]() -> Status {
    if (engine_dir == nullptr) return missing("engine_dir");
    if (out_engine == nullptr) return missing("out_engine");
    auto handle = std::make_unique<ifab_engine>();
    if (Status status = ifab::Engine::create(engine_dir, handle->engine); !status.ok()) return status;
    *out_engine = handle.release();
    return {};
  });
}

void ifab_engine_destroy(ifab_engine_t** engine) noexcept {
  if (engine == nullptr) return;
  delete *engine;
  *engine = nullptr;
}

ifab_status_t ifab_engine_describe(const ifab_engine_t* engine, char* buffer, size_t cap, size_t* out_size, char* err,
                                   size_t err_cap) noexcept {
  return guard(err, err_cap, [&]() -> Status {
    if (engine == nullptr) return missing("engine");
    return ifab::write_document(engine->engine->description(), buffer, cap, out_size);
  });
}

ifab_status_t ifab_engine_submit(ifab_engine_t* engine, const ifab_request_t* requests, uint32_t count,
                                 ifab_submit_result_t* results, char* text, uint32_t text_cap) noexcept {
  return guard(nullptr, 0, [&]() -> Status {
    if (engine == nullptr) return missing("engine");
    if (count > 0 && requests == nullptr) return missing("requests");
    if (count > 0 && results == nullptr) return missing("results");
    if (text == nullptr) text_cap = 0;
    engine->engine->submit({requests, count}, {results, count}, {text, text_cap});
    return {};
  });
}

ifab_status_t ifab_engine_poll(ifab_engine_t* engine, ifab_poll_buffers_t* buffers, uint32_t* out_count,
                               int32_t timeout_ms, char* err, size_t err_cap) noexcept {
  return guard(err, err_cap, [&]() -> Status {
    if (engine == nullptr) return missing("engine");
    if (buffers == nullptr) return missing("buffers");
    if (out_count == nullptr) return missing("out_count");
    if (Status status = ifab::check_size<ifab_poll_buffers_t>("buffers", buffers->struct_size); !status.ok()) {
      return status;
    }
    return engine->engine->poll(*buffers, timeout_ms, *out_count);
  });
}

void ifab_engine_wake(ifab_engine_t* engine) noexcept {
  if (engine != nullptr) engine->engine->wake();
}

ifab_status_t ifab_engine_cancel(ifab_engine_t* engine, const uint64_t* ids, uint32_t count,
                                 uint32_t* out_count) noexcept {
  return guard(nullptr, 0, [&]() -> Status {
    if (engine == nullptr) return missing("engine");
    if (count > 0 && ids == nullptr) return missing("ids");
    const uint32_t in_flight = engine->engine->cancel({ids, count});
    if (out_count != nullptr) *out_count = in_flight;
    return {};
  });
}

ifab_status_t ifab_engine_stats(const ifab_engine_t* engine, ifab_stats_t* stats) noexcept {
  return guard(nullptr, 0, [&]() -> Status {
    if (engine == nullptr) return missing("engine");
    if (stats == nullptr) return missing("stats");
    if (Status status = ifab::check_size<ifab_stats_t>("stats", stats->struct_size); !status.ok()) return status;
    const ifab_stats_t reading = engine->engine->stats();
    *stats = reading;
    stats->struct_size = sizeof(ifab_stats_t);
    return {};
  });
}

}  // extern "C"
