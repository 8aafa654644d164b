// SPDX-License-Identifier: Apache-2.0
#include "jobs.h"

#include <algorithm>

namespace ifab::llama {

JobTable::JobTable(const Config& config, uint32_t payload_bytes)
    : jobs_(config.slots), samples_(config.slots), owners_(config.slots) {
  for (size_t i = config.slots; i-- > 0;) {
    jobs_[i].samples.reserve(config.slots);
    jobs_[i].scores.reserve(config.sequence_tokens);
    jobs_[i].payload.resize(payload_bytes);
    samples_[i].generated.reserve(config.sequence_tokens);
    free_jobs_.push_back(&jobs_[i]);
    free_samples_.push_back(&samples_[i]);
  }
  prompts_.reserve(config.slots);
  neighbours_.reserve(config.slots);
}

Job& JobTable::take(const Request& request) {
  Job& job = *free_jobs_.back();
  free_jobs_.pop_back();
  job.request = &request;
  job.sequence = -1;
  job.done = job.cached = job.foreseen = 0;
  job.cells_left = 0;
  job.scores.clear();
  job.payload_failure.clear();
  for (uint32_t i = 0; i < request.samples; ++i) {
    Sample& sample = *free_samples_.back();
    free_samples_.pop_back();
    sample.job = &job;
    sample.index = i;
    sample.sequence = sample.token = -1;
    sample.generated.clear();
    job.samples.push_back(&sample);
  }
  prompts_.push_back(&job);
  return job;
}

void JobTable::end(Sample& sample) {
  Job& job = *sample.job;
  std::erase(job.samples, &sample);
  sample.job = nullptr;
  sample.guide.clear();
  free_samples_.push_back(&sample);
  if (!job.samples.empty()) return;
  std::erase(prompts_, &job);
  job.request = nullptr;
  free_jobs_.push_back(&job);
}

Job* JobTable::find(uint64_t request_id) {
  const auto job = std::find_if(jobs_.begin(), jobs_.end(), [&](const Job& candidate) {
    return candidate.request != nullptr && candidate.request->id == request_id;
  });
  return job == jobs_.end() ? nullptr : &*job;
}

void JobTable::prompt_computed(Job& job) {
  std::erase(prompts_, &job);
}

int32_t JobTable::lowest_free_sequence() const {
  const auto place = std::find_if(owners_.begin(), owners_.end(), [](const Owner& owner) { return owner.free(); });
  return static_cast<int32_t>(place - owners_.begin());
}

std::span<const int32_t> JobTable::neighbouring_free_sequences(uint32_t count) {
  neighbours_.clear();
  const auto last = static_cast<int32_t>(owners_.size());
  // A run that is looked at again has been taken whole: only the last one is taken in part.
  for (uint32_t left = count; left > 0;) {
    int32_t best = -1;
    uint32_t best_length = 0;
    for (int32_t id = 0; id < last; ++id) {
      if (!is_free(id)) continue;
      const int32_t begin = id;
      while (id < last && is_free(id)) ++id;
      const auto length = static_cast<uint32_t>(id - begin);
      if (std::find(neighbours_.begin(), neighbours_.end(), begin) != neighbours_.end()) continue;
      const bool better = best_length < left ? length > best_length : length >= left && length < best_length;
      if (better) best = begin, best_length = length;
    }
    if (best < 0) break;
    const uint32_t taken = std::min(left, best_length);
    for (uint32_t i = 0; i < taken; ++i) neighbours_.push_back(best + static_cast<int32_t>(i));
    left -= taken;
  }
  return neighbours_;
}

void JobTable::give_sequence(Job& job, int32_t sequence) {
  owner(sequence).job = &job;
  job.sequence = sequence;
}

void JobTable::give_sequence(Sample& sample, int32_t sequence) {
  owner(sequence).sample = &sample;
  sample.sequence = sequence;
  ++generating_;
}

void JobTable::move(Sample& sample, int32_t sequence) {
  owner(sample.sequence) = {};
  owner(sequence).sample = &sample;
  sample.sequence = sequence;
}

void JobTable::take_sequence_from(Job& job) {
  if (job.sequence >= 0) owner(job.sequence) = {};
  job.sequence = -1;
}

void JobTable::take_sequence_from(Sample& sample) {
  if (sample.sequence < 0) return;
  owner(sample.sequence) = {};
  sample.sequence = -1;
  --generating_;
}

int32_t JobTable::last_generating() const {
  auto id = static_cast<int32_t>(owners_.size()) - 1;
  while (id >= 0 && sample_with(id) == nullptr) --id;
  return id;
}

}  // namespace ifab::llama
