// SPDX-License-Identifier: Apache-2.0
#include "driver.h"

#include <algorithm>
#include <cstdlib>
#include <stdexcept>

namespace ifab {
extern const BackendEntry llama_backend;
}

namespace ifab::test {

bool Told::ended() const {
  if (failed) return true;
  for (const Sample& sample : samples) {
    if (sample.reason == 0) return false;
  }
  return true;
}

Driver::Driver(const TinyEngine& engine) : temporary_(std::make_unique<TemporaryDirectory>()) {
  write_tiny_directory(temporary_->path(), engine);
  load(temporary_->path());
}

Driver::Driver(const std::filesystem::path& directory) {
  load(directory);
}

void Driver::load(const std::filesystem::path& directory) {
  Status status = EngineDirectory::open(directory, directory_);
  if (!status.ok()) throw std::runtime_error(status.message());
  std::vector<Finding> findings = directory_->findings();
  llama_backend.inspect(*directory_, findings);
  for (const Finding& finding : findings) {
    throw std::runtime_error(finding.path + ": " + finding.found + ", expected " + finding.expected);
  }
  status = llama_backend.load(*directory_, backend_);
  if (!status.ok()) throw std::runtime_error(status.message());
}

uint64_t Driver::ask(std::vector<int32_t> prompt, uint32_t max_tokens) {
  Request request = plain_request(std::move(prompt), max_tokens);
  request.stop_ids = contract().tokenizer.end_token_ids;
  request.want_payload = contract().capabilities.payload.has_value();
  return ask(std::move(request));
}

uint64_t Driver::ask(Request request) {
  const uint64_t id = requests_.size();
  request.id = id;
  requests_.push_back(std::make_unique<Request>(std::move(request)));
  told_.emplace_back();
  told_.back().samples.resize(requests_.back()->samples);
  told_.back().payload.resize(backend_->facts().payload_bytes);
  waiting_.push_back(id);
  backend_->note_waiting(*requests_.back());
  return id;
}

void Driver::cancel(uint64_t id) {
  Told& told = told_[id];
  if (told.ended()) return;
  const auto waits = std::find(waiting_.begin(), waiting_.end(), id);
  if (waits != waiting_.end()) {
    waiting_.erase(waits);
    backend_->forget_waiting(*requests_[id]);
  } else {
    backend_->cancel(id);
    --inside_;
  }
  for (Told::Sample& sample : told.samples) {
    if (sample.reason == 0) sample.reason = IFAB_FINISH_CANCELLED;
  }
}

void Driver::admit() {
  while (!waiting_.empty()) {
    const uint64_t id = waiting_.front();
    const Request& request = *requests_[id];
    if (admission) {
      const Room room = backend_->room();
      const Need need = backend_->need(request);
      if (need.leader_computes && inside_ > 0) return;
      if (need.slots > room.slots || room.promised + need.blocks > room.blocks) return;
    }
    if (backend_->admit(request).outcome != AdmitOutcome::kAdmitted) return;
    waiting_.pop_front();
    ++inside_;
  }
}

StepReport Driver::step(StepMode mode) {
  admit();
  const StepReport report = backend_->step(mode, *this);
  ++steps;
  prompt_tokens += report.prompt_tokens;
  if (!report.engine_failure.ok()) violations_.push_back("engine failure: " + report.engine_failure.message());
  if (report.prompt_tokens > backend_->facts().step_token_budget) violations_.emplace_back("more than the budget");
  return report;
}

bool Driver::run(uint32_t most) {
  while (!idle() && most-- > 0) {
    step();
    if (!violations_.empty()) return false;
  }
  return idle();
}

Told* Driver::alive(uint64_t request_id, const char* what) {
  if (request_id < told_.size() && !told_[request_id].ended()) return &told_[request_id];
  violations_.push_back(std::string(what) + " of request " + std::to_string(request_id) +
                        ", which has ended or never was");
  return nullptr;
}

void Driver::check_end(uint64_t request_id) {
  if (told_[request_id].ended()) --inside_;
}

void Driver::prompt_computed(uint64_t request_id, uint32_t tokens) {
  if (Told* told = alive(request_id, "part of the prompt")) told->computed_step_by_step += tokens;
}

void Driver::tokens(uint64_t request_id, uint32_t sample, std::span<const int32_t> tokens,
                    std::span<const float> logprobs) {
  Told* told = alive(request_id, "tokens");
  if (told == nullptr) return;
  if (!told->context_done || sample >= told->samples.size() || told->samples[sample].reason != 0) {
    violations_.emplace_back("tokens out of order");
    return;
  }
  Told::Sample& of = told->samples[sample];
  of.tokens.insert(of.tokens.end(), tokens.begin(), tokens.end());
  of.logprobs.insert(of.logprobs.end(), logprobs.begin(), logprobs.end());
}

void Driver::context_done(uint64_t request_id, uint32_t cached_tokens, uint32_t computed_tokens,
                          std::span<const float> prompt_logprobs) {
  Told* told = alive(request_id, "context done");
  if (told == nullptr) return;
  if (told->context_done) violations_.emplace_back("context done twice");
  told->context_done = true;
  told->cached = cached_tokens;
  told->computed = computed_tokens;
  told->scores.assign(prompt_logprobs.begin(), prompt_logprobs.end());
  if (computed_tokens != told->computed_step_by_step) violations_.emplace_back("computed tokens do not add up");
}

uint8_t* Driver::payload(uint64_t request_id) {
  Told* told = alive(request_id, "payload");
  return told == nullptr || !requests_[request_id]->want_payload ? nullptr : told->payload.data();
}

void Driver::finished(uint64_t request_id, uint32_t sample, int32_t reason, int32_t stop_id,
                      std::string_view payload_failure) {
  Told* told = alive(request_id, "end of a sample");
  if (told == nullptr) return;
  if (sample >= told->samples.size() || told->samples[sample].reason != 0) {
    violations_.emplace_back("a sample ended twice");
    return;
  }
  Told::Sample& of = told->samples[sample];
  of.reason = reason;
  of.stop_id = stop_id;
  of.payload_failure = payload_failure;
  check_end(request_id);
}

void Driver::failed(uint64_t request_id, const Status& status) {
  Told* told = alive(request_id, "failure");
  if (told == nullptr) return;
  told->failed = true;
  told->status = status;
  check_end(request_id);
}

std::filesystem::path real_engine() {
  const char* path = std::getenv("IFAB_TEST_LLAMA_ENGINE");
  if (path == nullptr || !std::filesystem::exists(std::filesystem::path(path) / "contract.json")) return {};
  return path;
}

bool long_tests() {
  const char* value = std::getenv("IFAB_TEST_LONG");
  return value != nullptr && *value != '\0' && *value != '0';
}

std::vector<int32_t> random_prompt(uint64_t seed, size_t size, uint32_t vocab_size) {
  std::vector<int32_t> prompt(size);
  uint64_t state = seed * 0x9E3779B97F4A7C15u + 0xD1B54A32D192ED03u;
  for (int32_t& token : prompt) {
    state ^= state >> 12;
    state ^= state << 25;
    state ^= state >> 27;
    const uint64_t value = state * 0x2545F4914F6CDD1Du >> 33;
    token = static_cast<int32_t>(17 + value % (vocab_size - 17));
  }
  return prompt;
}

Request plain_request(std::vector<int32_t> prompt, uint32_t max_tokens) {
  Request request;
  request.prompt = std::move(prompt);
  request.max_tokens = max_tokens;
  request.sampling.top_p = 1;
  request.sampling.repetition_penalty = 1;
  return request;
}

}  // namespace ifab::test
