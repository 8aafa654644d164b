// SPDX-License-Identifier: Apache-2.0
#include "executor_backend.h"

#include <algorithm>
#include <exception>
#include <new>
#include <optional>
#include <string>
#include <utility>

#include "log.h"

namespace ifab::executor {
namespace {

namespace trt = tensorrt_llm::executor;

using std::chrono::milliseconds;

// A step waits for some iterations, since nobody can enter between two of them, and not so long that a request which
// comes to an idle runtime, or the end of the engine, has to wait for it.
constexpr double kIterationsAStep = 4;
constexpr milliseconds kShortestWait{5};
constexpr milliseconds kLongestWait{250};
// Beside the longest step of the contract: the first pass makes what later ones find.
constexpr milliseconds kProvingTime{30'000};
// One failed pass is some request's fault, and its batch runs again apart. After an error of the card every later pass
// fails too; after so many in a row, a prompt of our own tells these apart.
constexpr uint32_t kForwardFailures = 3;

// What compile_guide() gives: the runtime reads guides itself, in the first pass of their requests.
class UncompiledGuide final : public CompiledGuide {};

AnswerForm form_of(const ContractValues& contract, const Settings& settings) {
  AnswerForm form;
  form.block_tokens = contract.limits.kv_block_tokens.value_or(0);
  form.payload_outputs = settings.payload_outputs;
  if (const auto& payload = contract.capabilities.payload) {
    form.row_bytes = payload->size_bytes() / static_cast<uint32_t>(payload->layers.size());
    form.payload_type = payload->dtype == IFAB_DTYPE_FLOAT32   ? trt::DataType::kFP32
                        : payload->dtype == IFAB_DTYPE_FLOAT16 ? trt::DataType::kFP16
                                                               : trt::DataType::kBF16;
  }
  return form;
}

EngineFacts facts_of(const ContractValues& contract, const Settings& settings) {
  EngineFacts facts;
  facts.vocab_size = contract.model.vocab_size;
  facts.hidden_size = contract.model.hidden_size;
  facts.layers = contract.model.layers;
  facts.slots = contract.limits.slots;
  facts.max_sequence_tokens = contract.limits.max_sequence_tokens;
  facts.step_token_budget = contract.limits.step_token_budget;
  facts.kv_block_tokens = contract.limits.kv_block_tokens.value_or(0);
  if (const auto& payload = contract.capabilities.payload) {
    facts.payload_bytes = payload->size_bytes();
    facts.payload_dtype = payload->dtype;
  }
  // Samples share the prompt's prefill through reuse, and in no other way.
  facts.samples_max = settings.cache && settings.cache->block_reuse ? facts.slots : 1;
  facts.splits_prompts = settings.chunked_context;
  if (settings.guided_decoding) facts.guide_kinds = {IFAB_GUIDE_JSON_SCHEMA, IFAB_GUIDE_REGEX, IFAB_GUIDE_GRAMMAR};
  return facts;
}

// Hears the proving request.
class Proof final : public Sink {
 public:
  explicit Proof(size_t payload_bytes) : payload_(payload_bytes) {}
  void prompt_computed(uint64_t, uint32_t) override {}
  void tokens(uint64_t, uint32_t, std::span<const int32_t>, std::span<const float>) override {}
  void context_done(uint64_t, uint32_t, uint32_t, std::span<const float>) override {}
  uint8_t* payload(uint64_t) override { return payload_.data(); }
  void finished(uint64_t, uint32_t, int32_t, int32_t, std::string_view payload_failure) override {
    end = payload_failure.empty() ? Status() : Status(IFAB_INTERNAL, std::string(payload_failure));
  }
  void failed(uint64_t, const Status& status) override { end = status; }

  std::optional<Status> end;

 private:
  std::vector<uint8_t> payload_;
};

}  // namespace

ExecutorBackend::ExecutorBackend(const ContractValues& contract, Settings settings, std::unique_ptr<Runtime> runtime)
    : contract_(contract),
      settings_(std::move(settings)),
      form_(form_of(contract_, settings_)),
      runtime_(std::move(runtime)),
      facts_(facts_of(contract_, settings_)),
      blocks_(facts_.kv_block_tokens, settings_.cache && settings_.cache->block_reuse),
      slots_left_(facts_.slots) {
  form_.event_tokens = std::min(facts_.step_token_budget + facts_.slots, contract_.limits.max_output_tokens);
}

ExecutorBackend::~ExecutorBackend() {
  for (const auto& [id, live] : by_vendor_id_) {
    if (live == nullptr || !live->over()) runtime_->forget_at_end(id);
  }
}

// ---- what admission asks ----

Room ExecutorBackend::room() const {
  const uint64_t held = std::min(blocks_.held(), facts_.kv_pool_blocks);
  // The runtime cuts its own steps. A prompt that cannot be split waits there for a step that has room for it.
  return {.slots = slots_left_, .blocks = facts_.kv_pool_blocks - held, .promised = 0, .step_tokens = 0};
}

Need ExecutorBackend::need(const Request& request) const {
  const LiveBlocks::Need blocks = blocks_.need(request);
  Need need;
  need.slots = request.samples;
  need.blocks = blocks.blocks;
  need.blocks_ever = blocks.blocks_ever;
  need.prompt_tokens = static_cast<uint32_t>(request.prompt.size()) - blocks.shared_tokens;
  need.leader_computes = blocks.leader_computes;
  return need;
}

AdmitResult ExecutorBackend::admit(const Request& request) {
  if (request.samples > slots_left_) return {AdmitOutcome::kNoRoom, {}};
  VendorId vendor_id = 0;
  try {
    vendor_id = runtime_->executor().enqueueRequest(to_vendor(request, contract_, settings_));
  } catch (const std::exception& error) {
    const std::string text = error.what();
    // Sequences that were cancelled stay in its queue until they become active, so that it may be full although there
    // are slots.
    if (text.find("Maximum queue size") != std::string::npos) return {AdmitOutcome::kNoRoom, {}};
    return {AdmitOutcome::kRefused, {IFAB_INTERNAL, "the runtime does not take the request: " + text}};
  }
  auto live = std::make_unique<LiveRequest>(request, vendor_id, end_id_of(request, contract_), form_);
  by_vendor_id_.emplace(vendor_id, live.get());
  lives_.emplace(request.id, std::move(live));
  blocks_.enter(request);
  slots_left_ -= request.samples;
  return {AdmitOutcome::kAdmitted, {}};
}

Status ExecutorBackend::compile_guide(int32_t kind, std::string_view text,
                                      std::shared_ptr<const CompiledGuide>& out) const {
  if (std::find(facts_.guide_kinds.begin(), facts_.guide_kinds.end(), kind) == facts_.guide_kinds.end()) {
    return {IFAB_UNIMPLEMENTED, "guide_kind: the engine enforces no guides"};
  }
  if (Status status = guides_.check(kind, text); !status.ok()) return status;
  out = std::make_shared<UncompiledGuide>();
  return {};
}

// ---- one step ----

StepReport ExecutorBackend::step(StepMode, Sink& sink) {
  StepReport report;
  forward_failed_ = false;
  try {
    listen(ready_.empty() ? patience() : milliseconds(0));
    tell(report, sink);
    look(report);
    if (forward_failed_ && ++forward_failures_ >= kForwardFailures) {
      if (still_computes()) {
        forward_failures_ = 0;
      } else {
        report.engine_failure = {
            IFAB_UNAVAILABLE,
            std::to_string(forward_failures_) + " forward passes in a row failed, and one of a prompt of our own"};
      }
    }
  } catch (const std::bad_alloc&) {
    report.engine_failure = {IFAB_RESOURCE_EXHAUSTED, "out of memory in a step"};
  } catch (const std::exception& error) {
    report.engine_failure = {IFAB_UNAVAILABLE, std::string("the runtime does not answer: ") + error.what()};
  }
  return report;
}

milliseconds ExecutorBackend::patience() const {
  const auto wait = std::chrono::duration_cast<milliseconds>(kIterationsAStep * pulse_.iteration_time());
  return std::clamp(wait, kShortestWait, kLongestWait);
}

void ExecutorBackend::listen(milliseconds patience) {
  for (const trt::Response& response : runtime_->executor().awaitResponses(patience)) receive(response);
}

void ExecutorBackend::receive(const trt::Response& response) {
  const auto found = by_vendor_id_.find(response.getRequestId());
  // Where a pass fails, each sample of a request gets an error of its own, under an id that nobody has been told.
  if (found == by_vendor_id_.end()) return;
  const bool over = response.hasError() || response.getResult().isFinal;
  LiveRequest* live = found->second;
  if (over) by_vendor_id_.erase(found);
  if (live == nullptr) return;
  if (!live->in_line()) ready_.push_back(live);
  live->set_in_line(true);
  if (!response.hasError()) return live->take(response.getResult());
  Failure failure = failure_of(response.getErrorMsg(), live->request());
  forward_failed_ = forward_failed_ || failure.kind == Failure::Kind::kForward;
  live->fail(std::move(failure.status));
}

void ExecutorBackend::tell(StepReport& report, Sink& sink) {
  uint32_t tokens_left = facts_.step_token_budget + facts_.slots;
  std::vector<LiveRequest*> later;
  for (LiveRequest* live : ready_) {
    live->set_in_line(false);
    const bool before = live->context_told();
    if (!live->failed()) forward_failures_ = 0;
    const bool ended = live->tell(tokens_left, report, sink);
    if (!before && live->context_told()) blocks_.context_done(live->request());
    report.progressed = true;
    if (ended) {
      leave(*live);
    } else if (live->has_more()) {
      live->set_in_line(true);
      later.push_back(live);
    }
  }
  // What did not fit goes first in the next step.
  ready_ = std::move(later);
}

void ExecutorBackend::look(StepReport& report) {
  const Pulse::Beat beat = pulse_.take(runtime_->executor().getLatestIterationStats());
  activity_ = beat.activity;
  report.prompt_tokens = beat.prompt_tokens;
  report.progressed = report.progressed || beat.moved();
  if (activity_ == Activity::kStandingStill && !warned_) {
    log(IFAB_LOG_WARNING, "executor", "iterations of the runtime schedule nothing although requests wait");
  }
  if (activity_ != Activity::kQuiet) warned_ = activity_ == Activity::kStandingStill;
}

bool ExecutorBackend::still_computes() {
  trt::Executor& executor = runtime_->executor();
  VendorId own = 0;
  try {
    own = executor.enqueueRequest(to_vendor(proving_request(), contract_, settings_));
  } catch (const std::exception&) {
    return true;  // its queue is full, of what was cancelled: this is asked again after as many failures
  }
  by_vendor_id_.emplace(own, nullptr);  // of nobody
  const auto deadline = std::chrono::steady_clock::now() + milliseconds(contract_.limits.longest_step_ms);
  std::optional<bool> came_back;
  while (!came_back && std::chrono::steady_clock::now() < deadline) {
    for (const trt::Response& response : executor.awaitResponses(kLongestWait)) {
      receive(response);
      if (response.getRequestId() != own) continue;
      if (response.hasError() || response.getResult().isFinal) came_back = !response.hasError();
    }
  }
  return came_back.value_or(false);
}

// ---- ends ----

void ExecutorBackend::cancel(uint64_t request_id) {
  const auto found = lives_.find(request_id);
  if (found == lives_.end()) return;
  LiveRequest& live = *found->second;
  // An id that has ended there must not be cancelled: the runtime would remember it for ever.
  if (const auto there = by_vendor_id_.find(live.vendor_id()); there != by_vendor_id_.end()) {
    there->second = nullptr;
    runtime_->executor().cancelRequest(live.vendor_id());
  }
  std::erase(ready_, &live);
  leave(live);
}

// Its slot and blocks are free from here on, although the runtime gives up a cancelled request only once it is active
// and an iteration begins. What enters meanwhile waits in the runtime's queue.
void ExecutorBackend::leave(LiveRequest& live) {
  const auto there = by_vendor_id_.find(live.vendor_id());
  if (there != by_vendor_id_.end() && there->second != nullptr) {
    // It ended here before it ended there: an answer that made no sense.
    there->second = nullptr;
    runtime_->executor().cancelRequest(live.vendor_id());
  }
  blocks_.leave(live.request(), live.context_told());
  slots_left_ += live.request().samples;
  lives_.erase(live.request().id);
}

// ---- load ----

Request ExecutorBackend::proving_request() const {
  Request request;
  // Of two tokens: an output that has a row for each token, which the runtime cannot use, is told only by more than
  // one.
  request.prompt.assign(std::min(2u, contract_.limits.max_input_tokens), 0);
  request.max_tokens = std::min(1u, contract_.limits.max_output_tokens);
  request.sampling.repetition_penalty = 1;
  request.want_payload = facts_.payload_bytes > 0;
  return request;
}

Status ExecutorBackend::prove() {
  const Request request = proving_request();
  if (const AdmitResult asked = admit(request); asked.outcome != AdmitOutcome::kAdmitted) {
    return {IFAB_INTERNAL, "the proving step: " + asked.status.message()};
  }
  Proof proof(facts_.payload_bytes);
  const auto deadline =
      std::chrono::steady_clock::now() + milliseconds(contract_.limits.longest_step_ms) + kProvingTime;
  // The pool's figures come with an iteration's statistics, which may be a little later than its answers.
  while (!proof.end || (settings_.cache && pulse_.pool_blocks() == 0)) {
    const StepReport report = step(StepMode::kNormal, proof);
    if (!report.engine_failure.ok()) return {IFAB_INTERNAL, "the proving step: " + report.engine_failure.message()};
    if (proof.end && !proof.end->ok()) return {IFAB_INTERNAL, "the proving step: " + proof.end->message()};
    if (std::chrono::steady_clock::now() > deadline) {
      return {IFAB_DEADLINE_EXCEEDED, "the proving step: nothing came back"};
    }
  }
  facts_.kv_pool_blocks = pulse_.pool_blocks();
  if (settings_.cache && pulse_.block_tokens() != facts_.kv_block_tokens) {
    return {IFAB_FAILED_PRECONDITION, "limits.kv_block_tokens: " + std::to_string(facts_.kv_block_tokens) +
                                          ", and the runtime's blocks have " + std::to_string(pulse_.block_tokens())};
  }
  return {};
}

}  // namespace ifab::executor
