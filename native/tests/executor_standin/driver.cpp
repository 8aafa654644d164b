// SPDX-License-Identifier: Apache-2.0
#include "driver.h"

#include <algorithm>
#include <stdexcept>

#include "schema.h"

namespace ifab {
extern const BackendEntry executor_backend;
}

namespace ifab::standin {

bool Told::ended() const {
  return failed || std::all_of(samples.begin(), samples.end(), [](const Sample& sample) { return sample.reason != 0; });
}

std::vector<Finding> inspect(const std::filesystem::path& directory) {
  std::unique_ptr<const EngineDirectory> opened;
  if (Status status = EngineDirectory::open(directory, opened); !status.ok()) return {{"", status.message(), ""}};
  std::vector<Finding> findings = opened->findings();
  executor_backend.inspect(*opened, findings);
  return findings;
}

Status load(const std::filesystem::path& directory, std::unique_ptr<const EngineDirectory>& opened,
            std::unique_ptr<Backend>& out) {
  if (Status status = EngineDirectory::open(directory, opened); !status.ok()) return status;
  std::vector<Finding> findings = opened->findings();
  executor_backend.inspect(*opened, findings);
  if (!findings.empty()) return {IFAB_FAILED_PRECONDITION, describe(findings)};
  return executor_backend.load(*opened, out);
}

Driver::Driver(const test::SimulatedEngine& engine, const Patches& patches) {
  write_executor_directory(directory_.path(), engine, patches);
  if (Status status = load(directory_.path(), opened_, backend_); !status.ok()) {
    throw std::runtime_error(status.message());
  }
}

Request Driver::request_of(std::vector<int32_t> prompt, uint32_t max_tokens) const {
  Request request;
  request.prompt = std::move(prompt);
  request.max_tokens = max_tokens;
  request.sampling.top_p = 1;
  request.sampling.repetition_penalty = 1;
  request.stop_ids = contract().tokenizer.end_token_ids;
  request.want_payload = contract().capabilities.payload.has_value();
  return request;
}

uint64_t Driver::ask(std::vector<int32_t> prompt, uint32_t max_tokens) {
  return ask(request_of(std::move(prompt), max_tokens));
}

uint64_t Driver::ask(Request request) {
  const uint64_t id = requests_.size();
  if (try_to_ask(std::move(request)) != AdmitOutcome::kAdmitted) violations_.emplace_back("a request did not enter");
  return id;
}

AdmitOutcome Driver::try_to_ask(Request request) {
  const uint64_t id = requests_.size();
  request.id = id;
  auto owned = std::make_unique<Request>(std::move(request));
  const AdmitResult asked = backend_->admit(*owned);
  if (asked.outcome != AdmitOutcome::kAdmitted) return asked.outcome;
  Told& told = told_[id];
  told.samples.resize(owned->samples);
  told.payload.resize(backend_->facts().payload_bytes);
  requests_.emplace(id, std::move(owned));
  return asked.outcome;
}

void Driver::cancel(uint64_t id) {
  backend_->cancel(id);
  for (Told::Sample& sample : told_.at(id).samples) {
    if (sample.reason == 0) sample.reason = IFAB_FINISH_CANCELLED;
  }
}

StepReport Driver::step() {
  StepReport report = backend_->step(StepMode::kNormal, *this);
  prompt_tokens += report.prompt_tokens;
  if (!report.engine_failure.ok()) failure = report.engine_failure;
  return report;
}

bool Driver::run() {
  return run_until(
      [this] { return std::all_of(told_.begin(), told_.end(), [](const auto& each) { return each.second.ended(); }); });
}

void Driver::prompt_computed(uint64_t request_id, uint32_t tokens) {
  if (told_.contains(request_id)) told_[request_id].computed += tokens;
}

void Driver::tokens(uint64_t request_id, uint32_t sample, std::span<const int32_t> tokens,
                    std::span<const float> log_probs) {
  if (!told_.contains(request_id)) return;
  Told& told = told_[request_id];
  if (told.contexts_done != 1 || told.samples.at(sample).reason != 0) violations_.emplace_back("tokens out of order");
  Told::Sample& of = told.samples.at(sample);
  of.tokens.insert(of.tokens.end(), tokens.begin(), tokens.end());
  of.log_probs.insert(of.log_probs.end(), log_probs.begin(), log_probs.end());
  told.most_tokens_at_once = std::max(told.most_tokens_at_once, static_cast<uint32_t>(tokens.size()));
}

void Driver::context_done(uint64_t request_id, uint32_t cached, uint32_t computed, std::span<const float>) {
  if (!told_.contains(request_id)) return;
  Told& told = told_[request_id];
  ++told.contexts_done;
  told.cached = cached;
  if (computed != told.computed) violations_.emplace_back("computed tokens do not add up");
}

uint8_t* Driver::payload(uint64_t request_id) {
  return requests_.at(request_id)->want_payload ? told_[request_id].payload.data() : nullptr;
}

void Driver::finished(uint64_t request_id, uint32_t sample, int32_t reason, int32_t stop_id,
                      std::string_view payload_failure) {
  Told::Sample& of = told_.at(request_id).samples.at(sample);
  if (of.reason != 0 || told_[request_id].contexts_done != 1) violations_.emplace_back("an end out of order");
  of.reason = reason;
  of.stop_id = stop_id;
  of.payload_failure = payload_failure;
}

void Driver::failed(uint64_t request_id, const Status& status) {
  Told& told = told_.at(request_id);
  if (told.ended()) violations_.emplace_back("a failure after the end");
  told.failed = true;
  told.status = status;
}

}  // namespace ifab::standin
