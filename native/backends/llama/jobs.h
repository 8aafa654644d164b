// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "config.h"
#include "guide/guide.h"
#include "request.h"

namespace ifab::llama {

struct Job;

// One sample of a request in the batcher.
struct Sample {
  Job* job = nullptr;  // null: free
  uint32_t index = 0;
  int32_t sequence = -1;  // -1 until its prompt is computed
  int32_t token = -1;     // chosen, and not in the cache yet
  std::vector<int32_t> generated;
  guide::GuideRun guide;
};

// One request in the batcher, from its admission until its last sample has ended.
struct Job {
  const Request* request = nullptr;  // null: free
  int32_t sequence = -1;             // that computes the prompt; -1 before it begins and once samples have their own
  uint32_t done = 0;                 // prompt tokens that are in the cache
  uint32_t cached = 0;               // of these, taken from another sequence
  uint32_t foreseen = 0;             // before it begins: what it could take from another sequence at its admission
  uint64_t cells_left = 0;           // unified: cells that it may still come to take
  std::vector<Sample*> samples;      // those that have not ended
  std::vector<float> scores;
  std::vector<uint8_t> payload;
  std::string payload_failure;

  std::span<const int32_t> prompt() const { return request->prompt; }
  uint32_t prompt_left() const { return static_cast<uint32_t>(request->prompt.size()) - done; }
  // What of its prompt will be computed, as far as is known.
  uint32_t to_compute() const { return prompt_left() - (sequence < 0 ? foreseen : 0); }
  // What of its prompt others can start from.
  std::span<const int32_t> shareable() const { return prompt().first(whole_blocks(done)); }
};

// Who is in the batcher, and which sequence ids they have. Ids below the number of slots belong to live sequences.
// Allocates at construction only.
class JobTable {
 public:
  JobTable(const Config& config, uint32_t payload_bytes);

  uint32_t free_slots() const { return static_cast<uint32_t>(free_samples_.size()); }
  // Takes places for a request and its samples; there must be a free slot for each. It joins the end of prompts().
  Job& take(const Request& request);
  // Gives back a sample that has ended; with the last one, the job.
  void end(Sample& sample);
  Job* find(uint64_t request_id);

  // Jobs whose prompts are not computed, in the order in which they will be.
  const std::vector<Job*>& prompts() const { return prompts_; }
  void prompt_computed(Job& job);

  // The lowest id that nobody has.
  int32_t lowest_free_sequence() const;
  // `count` ids that nobody has, in as few runs of neighbours as there can be: out of the shortest run that is long
  // enough, or else first out of the longest. The lowest of equal runs. Valid until the next call.
  std::span<const int32_t> neighbouring_free_sequences(uint32_t count);
  void give_sequence(Job& job, int32_t sequence);
  void give_sequence(Sample& sample, int32_t sequence);
  // The sample moves on to an id that nobody has.
  void move(Sample& sample, int32_t sequence);
  void take_sequence_from(Job& job);
  void take_sequence_from(Sample& sample);
  // The generating sample with that id, if any.
  Sample* sample_with(int32_t sequence) const { return owners_[static_cast<size_t>(sequence)].sample; }
  bool is_free(int32_t sequence) const { return owners_[static_cast<size_t>(sequence)].free(); }
  // The highest id of a generating sample; -1 where none generates.
  int32_t last_generating() const;
  uint32_t generating() const { return generating_; }

  template <class Visit>
  void for_each(Visit visit) const {
    for (const Job& job : jobs_) {
      if (job.request != nullptr) visit(job);
    }
  }

 private:
  struct Owner {
    Job* job = nullptr;
    Sample* sample = nullptr;
    bool free() const { return job == nullptr && sample == nullptr; }
  };
  Owner& owner(int32_t sequence) { return owners_[static_cast<size_t>(sequence)]; }

  std::vector<Job> jobs_;
  std::vector<Sample> samples_;
  std::vector<Job*> free_jobs_;
  std::vector<Sample*> free_samples_;
  std::vector<Job*> prompts_;
  std::vector<Owner> owners_;  // by sequence id
  std::vector<int32_t> neighbours_;
  uint32_t generating_ = 0;
};

}  // namespace ifab::llama
