// SPDX-License-Identifier: Apache-2.0
// The header is C++20 too, nothing throws across it, and no struct has padding that two compilers could see otherwise.
#include <ifab/engine.h>

#include <type_traits>

static_assert(noexcept(ifab_engine_destroy(nullptr)));
static_assert(noexcept(ifab_engine_create(nullptr, nullptr, nullptr, 0)));
static_assert(std::is_standard_layout_v<ifab_request_t> && std::is_trivially_copyable_v<ifab_request_t>);
static_assert(std::is_standard_layout_v<ifab_event_t> && std::is_trivially_copyable_v<ifab_event_t>);
static_assert(std::has_unique_object_representations_v<ifab_event_t>);
static_assert(std::has_unique_object_representations_v<ifab_submit_result_t>);
static_assert(std::has_unique_object_representations_v<ifab_stats_t>);
static_assert(sizeof(ifab_event_t) % alignof(uint64_t) == 0);

int main() {
  ifab_engine_t* engine = nullptr;
  return ifab_engine_create(nullptr, &engine, nullptr, 0) == IFAB_INVALID_ARGUMENT ? 0 : 1;
}
