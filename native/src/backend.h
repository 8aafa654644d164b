// SPDX-License-Identifier: Apache-2.0
//
// The seam between everything common and one engine runtime.
//
// A backend knows how to hold sequences and how to take one step with them. It does not queue, validate, retry, count
// or talk to callers: the engine loop does, on the one thread that calls every method of a backend, load() included
// (interrupt() and compile_guide() excepted).
// Nothing here may name a particular runtime, and nothing above may ask which one it has.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "request.h"
#include "status.h"

namespace ifab {

class EngineDirectory;  // directory.h: the opened engine directory with its checked contract
class Sink;

// What a loaded engine says of itself; compared with the contract after load().
struct EngineFacts {
  uint32_t vocab_size = 0;
  uint32_t hidden_size = 0;
  uint32_t layers = 0;
  uint32_t slots = 0;
  uint32_t max_sequence_tokens = 0;
  uint32_t step_token_budget = 0;  // most tokens a step may compute
  uint32_t kv_block_tokens = 0;    // 0 without a cache
  uint64_t kv_pool_blocks = 0;     // 0 without a cache
  uint32_t payload_bytes = 0;      // of one finished request; 0 without payload
  int32_t payload_dtype = 0;
  bool scoring = false;
  uint32_t samples_max = 1;
  bool splits_prompts = true;  // a prompt may be computed over several steps; else it has to fit one step's budget
  std::vector<int32_t> guide_kinds;
};

// What the batcher could take in right now.
struct Room {
  uint32_t slots = 0;        // sequences
  uint64_t blocks = 0;       // KV blocks that are free or can be freed without touching a live sequence
  uint64_t promised = 0;     // of these, what live sequences may still come to take: the need of each at its admission,
                             // less what it holds by now. Admission gives nobody a promised block.
  uint32_t step_tokens = 0;  // tokens that what is in the batcher would compute in the next step, at most the budget
};

// What one request would take.
struct Need {
  uint32_t slots = 0;          // one a sample
  uint64_t blocks = 0;         // prompt + the most it may generate, less what it shares with blocks that live sequences
                               // hold. A resident block that nobody holds is not subtracted: Room counts it as free.
  uint64_t blocks_ever = 0;    // the same with nothing shared: more than the pool means that it can never run
  uint32_t prompt_tokens = 0;  // still to compute
  bool leader_computes = false;  // a live sequence is computing a head that this request would share
};

enum class AdmitOutcome {
  kAdmitted,  // in the batcher; the sink will hear its end
  kNoRoom,    // nothing changed; try again on a later step
  kRefused,   // this request can not run here; the status says why and nothing changed
};

struct AdmitResult {
  AdmitOutcome outcome = AdmitOutcome::kNoRoom;
  Status status;  // for kRefused
};

enum class StepMode {
  kNormal,
  kProgressOnly,  // taken because there was no room: nothing was admitted before it, and the backend shall favour what
                  // frees room over what fills it
};

// What one step did. A step that computed nothing and ended nothing did not progress.
struct StepReport {
  uint32_t prompt_tokens = 0;     // computed
  uint32_t generated_tokens = 0;  // sampled
  bool progressed = false;
  uint64_t clock_us = 0;  // time that the step stands for, where the engine keeps a clock of its own; 0: the
                          // caller's clock says how long it took
  Status engine_failure;  // not ok: the engine cannot go on; everything in flight is failed by the caller
};

class Backend {
 public:
  virtual ~Backend() = default;

  // Facts of the loaded engine; constant after load.
  virtual const EngineFacts& facts() const = 0;

  virtual Room room() const = 0;
  virtual Need need(const Request& request) const = 0;

  // A request was accepted and waits; `waiting` requests may tell the backend which heads are worth keeping. Both are
  // notices: a backend may ignore them. The reference stays valid until forget() or admit().
  virtual void note_waiting(const Request& request) { (void)request; }
  virtual void forget_waiting(const Request& request) { (void)request; }

  // Takes a request into the batcher. The request outlives its sequences.
  virtual AdmitResult admit(const Request& request) = 0;

  // Takes one step with what is in the batcher, within the token budget, and tells the sink what came of it. A fault
  // of one sequence is sink.failed() for its request and no more; no exception may leave.
  virtual StepReport step(StepMode mode, Sink& sink) = 0;

  // Takes a request out. The caller has told its end already; the sink hears nothing more of it. Unknown ids: no-op.
  virtual void cancel(uint64_t request_id) = 0;

  // KV blocks that live sequences and resident heads hold now.
  virtual uint64_t kv_blocks_used() const = 0;

  // Any thread: the engine is about to be destroyed; a step in progress may end early.
  virtual void interrupt() noexcept {}

  // Any thread: makes of a request's guide, whose kind is one of facts().guide_kinds, what admit() will find in the
  // request. IFAB_INVALID_ARGUMENT: it is not well formed, or no text could satisfy it. IFAB_UNIMPLEMENTED: it asks for
  // something that this backend does not enforce; the message names that.
  virtual Status compile_guide(int32_t kind, std::string_view text, std::shared_ptr<const CompiledGuide>& out) const {
    (void)kind, (void)text, (void)out;
    return {IFAB_UNIMPLEMENTED, "guide_kind: the engine enforces no guides"};
  }
};

// What a backend tells during a step. Implemented by publisher.h, which allocates nothing after load. A backend that
// breaks the order (context_done once, before the tokens of its request; nothing for a sample that ended) has that
// request failed, and no other.
class Sink {
 public:
  virtual ~Sink() = default;
  // So many tokens of a prompt were computed in this step: what a request has cost that ends before its context is
  // done. The sum up to context_done is computed_tokens there.
  virtual void prompt_computed(uint64_t request_id, uint32_t tokens) = 0;
  // New tokens of a sample, at most twice a step; logprobs is empty or as long as tokens.
  virtual void tokens(uint64_t request_id, uint32_t sample, std::span<const int32_t> tokens,
                      std::span<const float> logprobs) = 0;
  // The prompt is computed. prompt_logprobs is empty or as long as the prompt.
  virtual void context_done(uint64_t request_id, uint32_t cached_tokens, uint32_t computed_tokens,
                            std::span<const float> prompt_logprobs) = 0;
  // Room for the payload of a request whose sample 0 is about to finish, which carries it: facts().payload_bytes bytes,
  // 64-byte aligned, owned by the sink. Null where the request does not want it. Never fails: admission reserved it.
  virtual uint8_t* payload(uint64_t request_id) = 0;
  // A sample ended. stop_id is the token that ended it, or -1. payload_failure says why payload() was not filled;
  // empty where it was, or none was due.
  virtual void finished(uint64_t request_id, uint32_t sample, int32_t reason, int32_t stop_id,
                        std::string_view payload_failure) = 0;
  // The request ended with an error, all samples of it; the backend has dropped its sequences.
  virtual void failed(uint64_t request_id, const Status& status) = 0;
};

// How the library finds a backend. One entry a backend, listed in backends.cpp and nowhere else.
struct BackendEntry {
  // The file of an engine directory by which this backend knows its own, and what else it looks for, in words.
  const char* configuration_file;
  const char* looks_for;
  // Whether the directory is this backend's. Reads names and, at most, the configuration file.
  bool (*recognises)(const EngineDirectory& directory);
  // Everything wrong with the engine's own configuration and its agreement with the contract, without loading.
  void (*inspect)(const EngineDirectory& directory, std::vector<Finding>& findings);
  // Loads and proves the engine. Called on the engine's owner thread, as every method of the result will be.
  Status (*load)(const EngineDirectory& directory, std::unique_ptr<Backend>& out);
  // Whether this machine has what every engine of the backend needs beside its directory: a card, a driver, a library.
  // IFAB_UNAVAILABLE: what is not there. Null where the library itself is enough.
  Status (*runs_here)() = nullptr;
};

std::span<const BackendEntry> backends();

// A backend that this library is built without, by a file that only its engines have.
struct AbsentBackend {
  const char* file;
  const char* runs;
};

std::span<const AbsentBackend> absent_backends();

}  // namespace ifab
