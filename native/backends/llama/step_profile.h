// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "session.h"

namespace ifab::llama {

// The environment variable that names the file of a profile.
inline constexpr const char* kProfileVariable = "IFAB_LLAMA_PROFILE";

// What the calls into the runtime were, and where the time of steps went.
//
// Off unless kProfileVariable names a file. A JSON line is appended whenever the last sequence has ended, before
// anybody can know that it has, and counting begins anew: lines add up. Allocates at construction only.
class StepProfile {
 public:
  enum class Kind : uint8_t { kPrompt, kGenerate, kBoth };

  // Null where the environment names no file.
  static std::unique_ptr<StepProfile> from_environment();
  explicit StepProfile(std::string path) : path_(std::move(path)) {}

  void step_begins();
  // `empty`: nothing is left in the batcher.
  void step_ends(bool empty);
  void call_begins(Kind kind, uint32_t tokens, const Session::Shape& shape);
  void call_ends();
  // A row was computed whose result nobody reads.
  void filler() { ++now_.fillers; }

 private:
  using Clock = std::chrono::steady_clock;

  // Calls are told apart by the powers of two that their tokens and sequences reach.
  static constexpr size_t kKinds = 3, kTokenClasses = 24, kSequenceClasses = 10;
  struct Class {
    uint64_t calls = 0, tokens = 0, sequences = 0, reads = 0, copies = 0;
    Clock::duration time{};
  };
  struct Counts {
    uint64_t steps = 0, fillers = 0;
    Clock::duration in_steps{}, between{};
    // With copies of sequences before them, and without.
    std::array<std::array<std::array<std::array<Class, kSequenceClasses>, kTokenClasses>, kKinds>, 2> calls;
  };

  void write();

  const std::string path_;
  Counts now_;
  Class* call_ = nullptr;  // whose class the present call is
  bool resting_ = true;    // nothing was in the batcher when the last step ended
  Clock::time_point step_began_, step_ended_, call_began_;
};

}  // namespace ifab::llama
