// SPDX-License-Identifier: Apache-2.0
//
// Continuous batching: which rows a step computes, and what becomes of them.
//
// Streams and a unified cache are stepped differently. Between streams the runtime computes several sequences together
// only where their ids are consecutive and ascending and they have equally many rows, so a step is one call for
// prompts, or one for each where last bits are promised, and one for all that generate (batcher_streams.cpp). A unified
// cache takes all rows of a step in one call, and may have no room for them (batcher_unified.cpp).
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "backend.h"
#include "chooser.h"
#include "config.h"
#include "jobs.h"
#include "ledger.h"
#include "payload_tap.h"
#include "prefixes.h"
#include "resident_heads.h"
#include "session.h"
#include "step_profile.h"

namespace ifab::llama {

class Batcher {
 public:
  // `tap` is null where the engine has no payload. The session and the tap outlive the batcher. Reads what each token
  // of the vocabulary stands for.
  Batcher(const Config& config, Session& session, PayloadTap* tap);

  void note_waiting(const Request& request) { waiting_.add(request); }
  void forget_waiting(const Request& request) { waiting_.remove(request); }

  Room room() const;
  Need need(const Request& request) const;
  // Takes a request in; false where there is no slot for each of its samples.
  bool admit(const Request& request);
  void cancel(uint64_t request_id);
  // Throws what the runtime throws; a runtime that cannot go on is in the report.
  StepReport step(StepMode mode, Sink& sink);
  uint64_t cells_used() const { return ledger_.cells(); }

 private:
  // ---- Prompts ----
  // Gives a job its sequence, with what another sequence holds of its prompt.
  void begin(Job& job, int32_t sequence);
  uint32_t most_shared(const Request& request) const;
  // Adds the next `tokens` tokens of a prompt to the batch, and remembers them as the part that decode() computes.
  struct Part {
    Job* job = nullptr;
    uint32_t tokens = 0;
    uint32_t first_row = 0;
    bool ends_prompt() const { return tokens == job->prompt_left(); }
  };
  Part add_part(Job& job, uint32_t tokens);
  void arm_tap(const Part& part);
  // What a decoded part means: progress, and with the end of the prompt the first tokens of its samples.
  void part_computed(const Part& part, StepReport& report, Sink& sink);
  void score(const Part& part);
  void prompt_computed(Job& job, std::span<const float> logits, StepReport& report, Sink& sink);

  // ---- Samples ----
  Draw draw_of(Sample& sample) const;
  // Takes the token that was chosen for a sample: tells it, and ends the sample where it ends.
  void go_on(Sample& sample, const Choice& choice, StepReport& report, Sink& sink);
  // Chooses for all samples of the batch, and goes on with each.
  void rows_computed(StepReport& report, Sink& sink);
  void finish(Sample& sample, int32_t reason, int32_t stop_id, Sink& sink);
  void fail(Job& job, const Status& status, Sink& sink);
  // Lets go of a sample, or of a prompt that is being computed, and of what it holds of the cache.
  void release(Sample& sample);
  void release_prompt(Job& job);
  void release_sequence(const Job& job, int32_t sequence, bool last);
  uint32_t sample_tokens_left(const Sample& sample) const;

  // ---- Streams ----
  void step_streams(StepMode mode, StepReport& report, Sink& sink);
  // Fills the batch with one prompt's next part, or with those of several, `tokens_left` tokens at most.
  uint32_t fill_prompt_batch(uint32_t tokens_left);
  bool computed_together(const Job& job) const;
  uint32_t prompts_to_begin(uint32_t tokens_left) const;
  uint32_t next_part(const Job& job, uint32_t tokens_left) const;
  void close_gaps();
  void generate_streams(StepReport& report, Sink& sink);
  void add_filler(int32_t sequence);

  // ---- Unified ----
  void step_unified(StepMode mode, StepReport& report, Sink& sink);
  void fill_unified_batch(uint32_t prompt_tokens);
  StepProfile::Kind kind_of_batch() const;

  // Runs the batch. False where the step is over: no room, or the report says that the engine cannot go on.
  bool decode(StepProfile::Kind kind, StepReport& report);

  const Config& config_;
  Session& session_;
  PayloadTap* tap_;
  Ledger ledger_;
  Prefixes prefixes_;
  WaitingHeads waiting_;
  ResidentHeads heads_;
  JobTable jobs_;
  Chooser chooser_;
  guide::GuidanceCache guidances_;
  const std::unique_ptr<StepProfile> profile_;  // null where nobody asked for one

  std::vector<Sample*> rows_;         // of the batch, by row; null for a filler
  std::vector<Chooser::Row> chosen_;  // for the samples among them, in order
  std::vector<Part> parts_;           // of the batch
  std::vector<Sample*> generating_;   // unified: what the batch goes on with
  std::vector<int32_t> fillers_;      // streams: sequences with a filler row
};

}  // namespace ifab::llama
