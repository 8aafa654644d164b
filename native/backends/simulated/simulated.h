// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <span>
#include <vector>

#include "backend.h"
#include "block_pool.h"
#include "config.h"
#include "faults.h"
#include "id_map.h"

namespace ifab::simulated {

EngineFacts facts_of(const Config& config);

// A deterministic engine that computes nothing: a batcher like a real one's (sequences in slots, prompts in parts, a KV
// pool in blocks with reuse), whose tokens are hashes (formula.h) and whose time is a function of the work of a step.
//
// It trusts whoever admits, as vendors' batchers do: a request enters while there are slots and blocks for its prompt,
// and a sequence that later finds no block stands still until there is one. That enough blocks come is admission's
// business, not this batcher's. Allocates nothing after construction.
class SimulatedBackend final : public Backend {
 public:
  explicit SimulatedBackend(const Config& config);

  const EngineFacts& facts() const override { return facts_; }
  Room room() const override;
  Need need(const Request& request) const override;
  AdmitResult admit(const Request& request) override;
  StepReport step(StepMode mode, Sink& sink) override;
  void cancel(uint64_t request_id) override;
  uint64_t kv_blocks_used() const override { return pool_.used(); }
  void interrupt() noexcept override;

 private:
  static constexpr uint32_t kNone = UINT32_MAX;

  // A request in the batcher.
  struct Live {
    const Request* request = nullptr;
    uint64_t chain = 0;       // behind the last prompt token that is computed or cached
    uint32_t position = 0;    // prompt tokens computed or cached
    uint32_t cached = 0;      // of these, cached
    uint32_t registered = 0;  // leading full blocks of its prompt that others can find; those behind are its own
    uint32_t part = kNone;    // the block in which the prompt ends, until its first sample takes it over
    uint32_t samples_left = 0;
    Faults::Mask faults = 0;
    bool started = false;  // its samples generate
  };
  // One sample that generates.
  struct Sample {
    uint32_t live = kNone;
    uint32_t number = 0;  // of the request
    uint32_t generated = 0;
    uint32_t blocks = 0;  // its own: behind the full blocks of the prompt
    uint64_t key = 0;
    uint32_t row = kNone;  // of sample_tables_
  };
  // Sizes of a request in blocks.
  struct Shape {
    uint32_t full = 0;  // full blocks of the prompt, shared by its samples
    uint32_t each = 0;  // most that a sample needs behind them
    uint32_t part = 0;  // 1 where the prompt ends inside a block
    uint32_t total(uint32_t samples) const { return full + each * samples; }
  };

  Shape shape_of(const Request& request) const;
  // Leading blocks of a prompt that are there to share.
  struct Shared {
    uint32_t blocks = 0;
    uint32_t held = 0;            // of these, by live sequences
    bool next_announced = false;  // somebody computes the one behind them
  };
  // Writes their numbers to `table`, where it is not null.
  Shared shareable(const Request& request, uint32_t* table) const;
  std::span<const int32_t> block_ids(const Request& request, uint32_t index) const;
  uint32_t* prompt_table(uint32_t live) { return prompt_tables_.data() + size_t{live} * blocks_a_sequence_; }
  uint32_t* sample_table(uint32_t row) { return sample_tables_.data() + size_t{row} * blocks_a_sequence_; }

  // Takes the blocks of a prompt: holds those that are shared, and announces the others.
  void hold_prompt(uint32_t live, const Shape& shape, uint32_t shared);

  // One token of every sample that has a block for it. Returns the tokens of context that they looked at.
  uint64_t generate(StepReport& report, Sink& sink);
  // Whether the sample has a block for its next token; takes one where it needs to.
  bool has_block(Sample& sample);
  // One token. True where the sample ended with it.
  bool generate_one(Sample& sample, StepReport& report, Sink& sink);

  // Parts of prompts, oldest first, with what the step's budget has left.
  void compute_prompts(StepReport& report, Sink& sink);
  void compute_part(uint32_t live, uint32_t tokens, Sink& sink);
  void finish_prompt(uint32_t live, Sink& sink);
  void start_samples(uint32_t live);
  // Fills the payload of a request, where it has one. Returns why it could not, or an empty text.
  const char* extract_payload(const Live& live, Sink& sink);

  void drop_sample(const Sample& sample);
  void drop_live(uint32_t live);
  // Lets the time of a step pass, or says how long it would have been.
  void spend(StepReport& report, uint64_t context_tokens, std::chrono::steady_clock::time_point start);

  const Config config_;
  EngineFacts facts_;
  BlockPool pool_;
  Faults faults_;
  uint32_t blocks_a_sequence_;

  std::vector<Live> lives_;
  std::vector<uint32_t> free_lives_;
  IdMap<uint32_t> by_id_;
  std::vector<uint32_t> prompts_;  // lives whose prompt is not computed, in order of admission
  std::vector<Sample> samples_;    // samples that generate
  std::vector<uint32_t> free_rows_;
  std::vector<uint32_t> prompt_tables_;  // a row for each live request: the full blocks of its prompt
  std::vector<uint32_t> sample_tables_;  // a row for each sample: the blocks behind them
  std::vector<float> scores_;            // of one prompt

  uint32_t slots_left_;
  uint64_t promised_ = 0;        // blocks that live requests may still take
  uint64_t prompt_pending_ = 0;  // prompt tokens of live requests still to compute

  std::mutex interrupt_mutex_;
  std::condition_variable interrupts_;
  bool interrupted_ = false;
};

}  // namespace ifab::simulated
