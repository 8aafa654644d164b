// SPDX-License-Identifier: Apache-2.0
#include "mining_backend.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

namespace ifab::tensorrt {

MiningBackend::MiningBackend(const ContractValues& contract, BindingPlan plan, std::unique_ptr<Launcher> launcher)
    : plan_(std::move(plan)),
      launcher_(std::move(launcher)),
      launches_{Launch{Batch(plan_, contract.limits.step_token_budget)},
                Launch{Batch(plan_, contract.limits.step_token_budget)}} {
  facts_.vocab_size = contract.model.vocab_size;
  facts_.hidden_size = contract.model.hidden_size;
  facts_.layers = contract.model.layers;
  facts_.slots = contract.limits.slots;
  facts_.max_sequence_tokens = plan_.row_tokens;
  facts_.step_token_budget = contract.limits.step_token_budget;
  facts_.payload_dtype = contract.capabilities.payload->dtype;
  facts_.payload_bytes = contract.capabilities.payload->size_bytes();
  facts_.splits_prompts = false;
  state_bytes_ = facts_.payload_bytes / plan_.hidden.size();
  pending_.reserve(facts_.slots);
}

Room MiningBackend::room() const {
  return {.slots = facts_.slots - live_,
          .blocks = 0,
          .promised = 0,
          .step_tokens = std::min(pending_tokens_, facts_.step_token_budget)};
}

Need MiningBackend::need(const Request& request) const {
  Need need;
  need.slots = 1;
  need.prompt_tokens = static_cast<uint32_t>(request.prompt.size());
  return need;
}

AdmitResult MiningBackend::admit(const Request& request) {
  if (live_ == facts_.slots) return {AdmitOutcome::kNoRoom, {}};
  const auto longer = [](const Request* left, const Request* right) {
    return left->prompt.size() > right->prompt.size();
  };
  pending_.insert(std::upper_bound(pending_.begin(), pending_.end(), &request, longer), &request);
  pending_tokens_ += static_cast<uint32_t>(request.prompt.size());
  ++live_;
  return {AdmitOutcome::kAdmitted, {}};
}

// Longest first: what a row has left takes the shorter ones. Who did not fit stays, in order, for the next launch.
void MiningBackend::compose(Batch& batch) {
  batch.clear();
  std::erase_if(pending_, [&](const Request* request) { return batch.add(*request); });
  pending_tokens_ -= batch.prompt_tokens();
}

StepReport MiningBackend::step(StepMode, Sink& sink) {
  StepReport report;
  Launch& next = launches_[next_];
  const uint32_t buffer = next_;
  if (!pending_.empty()) {
    compose(next.batch);
    next.under_way = true;
    report.progressed = true;
    if (Status status = launcher_->launch(next.batch, buffer); status.code() == IFAB_UNAVAILABLE) {
      report.engine_failure = std::move(status);
      return report;
    } else if (!status.ok()) {
      // The launch was refused and nothing else: its sequences complete without a payload, and the pipeline moves.
      finish(next, buffer, status, sink);
      return report;
    }
    next_ ^= 1u;
  }
  const uint32_t other = buffer ^ 1u;
  if (launches_[other].under_way) {
    collect(launches_[other], other, sink, report);
  } else if (next.under_way && pending_.empty()) {
    collect(next, buffer, sink, report);
  }
  return report;
}

void MiningBackend::collect(Launch& launch, uint32_t buffer, Sink& sink, StepReport& report) {
  const Status status = launcher_->collect(buffer);
  if (status.code() == IFAB_UNAVAILABLE) {
    report.engine_failure = status;
    return;
  }
  report.progressed = true;
  report.prompt_tokens += launch.batch.prompt_tokens();
  finish(launch, buffer, status, sink);
}

void MiningBackend::finish(Launch& launch, uint32_t buffer, const Status& status, Sink& sink) {
  launch.under_way = false;
  size_t row = 0;
  for (const Batch::Item& item : launch.batch.items()) {
    const uint64_t place = row++ * state_bytes_;
    if (item.dropped) continue;
    --live_;
    sink.prompt_computed(item.id, item.tokens);
    sink.context_done(item.id, 0, item.tokens, {});
    uint8_t* payload = status.ok() ? sink.payload(item.id) : nullptr;
    for (size_t which = 0; payload != nullptr && which < plan_.hidden.size(); ++which) {
      std::memcpy(payload + which * state_bytes_, launcher_->output(buffer, which).data() + place, state_bytes_);
    }
    sink.finished(item.id, 0, IFAB_FINISH_COMPLETE, -1, status.ok() ? std::string_view{} : status.message());
  }
}

void MiningBackend::cancel(uint64_t request_id) {
  const auto waiting =
      std::find_if(pending_.begin(), pending_.end(), [&](const Request* r) { return r->id == request_id; });
  if (waiting != pending_.end()) {
    pending_tokens_ -= static_cast<uint32_t>((*waiting)->prompt.size());
    pending_.erase(waiting);
    --live_;
    return;
  }
  for (Launch& launch : launches_) {
    if (!launch.under_way) continue;
    for (Batch::Item& item : launch.batch.items()) {
      if (item.id != request_id || item.dropped) continue;
      item.dropped = true;
      --live_;
      return;
    }
  }
}

Status MiningBackend::prove() {
  // Of two tokens, since of one a state for each token and one for each prompt are the same.
  Request request;
  request.prompt.assign(std::min(2u, plan_.row_tokens), 0);
  Batch& batch = launches_[0].batch;
  batch.clear();
  if (!batch.add(request)) return {IFAB_INTERNAL, "the proving step: a launch has no room for two tokens"};
  if (Status status = launcher_->launch(batch, 0); !status.ok()) return status;
  if (Status status = launcher_->collect(0); !status.ok()) return status;
  batch.clear();
  for (size_t which = 0; which < plan_.hidden.size(); ++which) {
    const std::span<const uint8_t> output = launcher_->output(0, which);
    if (std::all_of(output.begin(), output.end(), [](uint8_t byte) { return byte == 0; })) {
      return {IFAB_INTERNAL,
              "the proving step: output " + plan_.bindings[plan_.hidden[which]].tensor.name + " is all zeros"};
    }
  }
  return {};
}

}  // namespace ifab::tensorrt
