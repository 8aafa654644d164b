// SPDX-License-Identifier: Apache-2.0
//
// Planted bugs: the rules of Admission with one of them broken. Each has to make a property fail, or the properties do
// not guard that rule.
#pragma once

#include "admission.h"

namespace ifab::test {

struct IgnoresPromises : AdmissionRules {
  static bool blocks_suffice(const Room& room, const Need& need) { return need.blocks <= room.blocks; }
};

struct IgnoresBlocks : AdmissionRules {
  static bool blocks_suffice(const Room&, const Need&) { return true; }
};

struct IgnoresSlots : AdmissionRules {
  static bool slots_suffice(const Room&, const Need&) { return true; }
};

struct IgnoresTheBudget : AdmissionRules {
  static bool budget_suffices(const EngineFacts&, const Room&, const Need&) { return true; }
};

struct IgnoresTheReader : AdmissionRules {
  static bool reader_suffices(const ReaderRoom&, const Request&) { return true; }
};

struct TakesTheNewestFirst : AdmissionRules {
  static Waiting* first(const Lane& lane) { return lane.newest; }
  static Waiting* following(const Waiting& waiting) { return waiting.before; }
};

struct TakesLowPriorityFirst : AdmissionRules {
  static bool ahead(const Lane& left, const Lane& right, bool, bool) { return left.priority < right.priority; }
};

struct LetsSmallOnesPass : AdmissionRules {
  static constexpr bool kOthersMayPass = true;
};

struct NeverAges : AdmissionRules {
  static bool aged(const Lane&) { return false; }
};

struct DoesNotWaitForLeaders : AdmissionRules {
  static bool waits_for_leader(const Need&, const Waiting&) { return false; }
};

struct WaitsForLeadersForEver : AdmissionRules {
  static bool waits_for_leader(const Need& need, const Waiting&) { return need.leader_computes; }
};

struct RetriesForEver : AdmissionRules {
  static bool retried_enough(uint32_t) { return false; }
};

struct OverlooksStalls : AdmissionRules {
  static bool stalled(uint32_t) { return false; }
};

struct NeverGivesUp : AdmissionRules {
  static bool tried_enough(const Waiting&) { return false; }
};

struct GivesUpAtOnce : AdmissionRules {
  static bool tried_enough(const Waiting& waiting) { return waiting.empty_tries > 0; }
};

}  // namespace ifab::test
