// SPDX-License-Identifier: Apache-2.0
// The properties of Admission, over random schedules, and the proof that they would notice.
#include <gtest/gtest.h>

#include <cstdint>
#include <cstdio>

#include "admission_mutants.h"
#include "admission_schedule.h"

namespace ifab::test {
namespace {

#if IFAB_UNDER_SANITIZER
constexpr uint64_t kSchedules = 4'000;
#else
constexpr uint64_t kSchedules = 100'000;
#endif
constexpr uint64_t kFirstSeed = 1;
constexpr uint64_t kMutantSchedules = 20'000;  // every mutant is noticed long before

TEST(AdmissionProperties, HoldOverRandomSchedules) {
  uint64_t requests = 0;
  uint64_t no_room = 0;
  uint64_t stalled = 0;
  uint64_t progress_only = 0;
  uint64_t cancelled = 0;
  uint64_t leader_wait = 0;
  for (uint64_t seed = kFirstSeed; seed < kFirstSeed + kSchedules; ++seed) {
    const ScheduleReport report = Schedule<AdmissionRules>::of(seed);
    ASSERT_EQ(report.broken, "") << "seed " << seed;
    ASSERT_GE(report.requests, 64u);
    requests += report.requests;
    no_room += report.no_room;
    stalled += report.stalled;
    progress_only += report.progress_only;
    cancelled += report.cancelled;
    leader_wait += report.leader_wait;
  }
  std::printf(
      "seeds %ju to %ju: %ju requests; schedules with no room %ju, stall %ju, progress-only step %ju, "
      "cancel %ju, leader wait %ju\n",
      kFirstSeed, kFirstSeed + kSchedules - 1, requests, no_room, stalled, progress_only, cancelled, leader_wait);
  // Schedules that never come by what the rules are for would prove nothing.
  EXPECT_GT(no_room, kSchedules / 2);
  EXPECT_GT(stalled, kSchedules / 4);
  EXPECT_GT(progress_only, kSchedules / 2);
  EXPECT_GT(cancelled, kSchedules / 4);
  EXPECT_GT(leader_wait, kSchedules / 4);
}

// The first gives no plan, nor does the seed at half of the range from it. In the others a lane ages while all of its
// requests wait for a leader, and then takes its turn before one of higher priority.
TEST(AdmissionProperties, HoldForSeedsThatFailedOnce) {
  for (const uint64_t seed : {uint64_t{10'000'022'695}, uint64_t{1'150'490}, uint64_t{1'652'453}}) {
    const ScheduleReport report = Schedule<AdmissionRules>::of(seed);
    EXPECT_EQ(report.broken, "") << "seed " << seed;
    EXPECT_GE(report.requests, 64u);
  }
}

template <class Rules>
class AdmissionMutant : public ::testing::Test {};

using Mutants =
    ::testing::Types<IgnoresPromises, IgnoresBlocks, IgnoresSlots, IgnoresTheBudget, IgnoresTheReader,
                     TakesTheNewestFirst, TakesLowPriorityFirst, LetsSmallOnesPass, NeverAges, DoesNotWaitForLeaders,
                     WaitsForLeadersForEver, RetriesForEver, OverlooksStalls, NeverGivesUp, GivesUpAtOnce>;

struct MutantNames {
  template <class Rules>
  static std::string GetName(int) {
    const std::string name = ::testing::internal::GetTypeName<Rules>();
    return name.substr(name.rfind(':') + 1);
  }
};
TYPED_TEST_SUITE(AdmissionMutant, Mutants, MutantNames);

TYPED_TEST(AdmissionMutant, MakesAPropertyFail) {
  for (uint64_t seed = kFirstSeed; seed < kFirstSeed + kMutantSchedules; ++seed) {
    const ScheduleReport report = Schedule<TypeParam>::of(seed);
    if (report.broken.empty()) continue;
    std::printf("seed %ju: %s\n", seed, report.broken.c_str());
    return;
  }
  FAIL() << "no schedule noticed";
}

}  // namespace
}  // namespace ifab::test
