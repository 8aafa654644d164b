// SPDX-License-Identifier: Apache-2.0
#include "step_profile.h"

#include <algorithm>
#include <bit>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <utility>

#include "ifab/engine.h"
#include "log.h"

namespace ifab::llama {
namespace {

constexpr std::array<const char*, 3> kKindNames{"prompt", "generate", "both"};

// 1, 2, 3 to 4, 5 to 8, and so on.
size_t class_of(uint32_t count, size_t classes) {
  return std::min<size_t>(static_cast<size_t>(std::bit_width(std::max(count, 1u) - 1)), classes - 1);
}

double seconds(std::chrono::steady_clock::duration time) {
  return std::chrono::duration<double>(time).count();
}

}  // namespace

std::unique_ptr<StepProfile> StepProfile::from_environment() {
  const char* path = std::getenv(kProfileVariable);
  return path == nullptr || *path == '\0' ? nullptr : std::make_unique<StepProfile>(path);
}

void StepProfile::step_begins() {
  step_began_ = Clock::now();
  if (!resting_) now_.between += step_began_ - step_ended_;
}

void StepProfile::step_ends(bool empty) {
  step_ended_ = Clock::now();
  const bool rested = std::exchange(resting_, empty);
  if (rested && empty) return;  // a step of an engine that has nothing to do
  ++now_.steps;
  now_.in_steps += step_ended_ - step_began_;
  if (empty) write();
}

void StepProfile::call_begins(Kind kind, uint32_t tokens, const Session::Shape& shape) {
  call_ = &now_.calls[shape.copies > 0 ? 1 : 0][static_cast<size_t>(kind)][class_of(tokens, kTokenClasses)]
                     [class_of(shape.sequences, kSequenceClasses)];
  ++call_->calls;
  call_->tokens += tokens;
  call_->sequences += shape.sequences;
  call_->reads += shape.reads;
  call_->copies += shape.copies;
  call_began_ = Clock::now();
}

void StepProfile::call_ends() {
  call_->time += Clock::now() - call_began_;
}

void StepProfile::write() {
  const Counts counts = std::exchange(now_, {});
  const std::unique_ptr<FILE, int (*)(FILE*)> file(std::fopen(path_.c_str(), "a"), &std::fclose);
  if (file == nullptr) {
    log(IFAB_LOG_WARNING, "llama", "cannot append the profile to " + path_);
    return;
  }
  std::fprintf(file.get(),
               "{\"steps\": %" PRIu64 ", \"steps_s\": %.6f, \"between_s\": %.6f, \"fillers\": %" PRIu64
               ", \"calls\": [",
               counts.steps, seconds(counts.in_steps), seconds(counts.between), counts.fillers);
  const char* separator = "";
  for (const auto& kinds : counts.calls) {
    for (size_t kind = 0; kind < kKinds; ++kind) {
      for (size_t tokens = 0; tokens < kTokenClasses; ++tokens) {
        for (size_t sequences = 0; sequences < kSequenceClasses; ++sequences) {
          const Class& place = kinds[kind][tokens][sequences];
          if (place.calls == 0) continue;
          std::fprintf(file.get(),
                       "%s{\"kind\": \"%s\", \"tokens_to\": %u, \"sequences_to\": %u, \"calls\": %" PRIu64
                       ", \"tokens\": %" PRIu64 ", \"sequences\": %" PRIu64 ", \"reads\": %" PRIu64
                       ", \"copies\": %" PRIu64 ", \"seconds\": %.6f}",
                       separator, kKindNames[kind], 1u << tokens, 1u << sequences, place.calls, place.tokens,
                       place.sequences, place.reads, place.copies, seconds(place.time));
          separator = ", ";
        }
      }
    }
  }
  std::fprintf(file.get(), "]}\n");
}

}  // namespace ifab::llama
