// SPDX-License-Identifier: Apache-2.0
// admission_schedules COUNT [SEED]   runs many random schedules and says what they came by. For runs too long for CI.
// A schedule that breaks a property is named with its seed, and the others still run; the exit status is 1 then.
#include <chrono>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>

#include "admission_schedule.h"

int main(int argc, char** argv) {
  using ifab::test::ScheduleReport;
  if (argc < 2 || argc > 3) {
    std::fprintf(stderr, "usage: %s COUNT [SEED]\n", argv[0]);
    return 2;
  }
  const uint64_t count = std::strtoull(argv[1], nullptr, 10);
  const uint64_t first = argc == 3 ? std::strtoull(argv[2], nullptr, 10) : 1;
  uint64_t requests = 0, steps = 0, tokens = 0;
  uint64_t broken = 0, no_room = 0, stalled = 0, progress_only = 0, cancelled = 0, leader_wait = 0;
  const auto start = std::chrono::steady_clock::now();
  for (uint64_t seed = first; seed < first + count; ++seed) {
    const ScheduleReport report = ifab::test::Schedule<ifab::AdmissionRules>::of(seed);
    if (!report.broken.empty()) {
      std::printf("seed %" PRIu64 ": %s\n", seed, report.broken.c_str());
      ++broken;
    }
    requests += report.requests;
    steps += report.steps;
    tokens += report.tokens;
    no_room += report.no_room;
    stalled += report.stalled;
    progress_only += report.progress_only;
    cancelled += report.cancelled;
    leader_wait += report.leader_wait;
  }
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  std::printf("seeds %" PRIu64 " to %" PRIu64 ", %.1f s\n", first, first + count - 1, seconds);
  std::printf("requests %" PRIu64 ", steps %" PRIu64 ", generated tokens %" PRIu64 "\n", requests, steps, tokens);
  std::printf("schedules with: no room %" PRIu64 ", stall %" PRIu64 ", progress-only step %" PRIu64 ", cancel %" PRIu64
              ", leader wait %" PRIu64 "; broken %" PRIu64 "\n",
              no_room, stalled, progress_only, cancelled, leader_wait, broken);
  return broken == 0 ? 0 : 1;
}
