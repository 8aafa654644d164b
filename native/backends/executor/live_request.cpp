// SPDX-License-Identifier: Apache-2.0
#include "live_request.h"

#include <algorithm>
#include <cstring>
#include <span>
#include <utility>

namespace ifab::executor {
namespace {

namespace trt = tensorrt_llm::executor;

// The additional output of that name. Releases differ in whether they say which phase it belongs to.
const trt::Tensor* output_of(const trt::Result& result, const std::string& name) {
  for (const trt::AdditionalOutput& output : result.additionalOutputs) {
    if (output.name == name || output.name == "generation_" + name) return &output.output;
  }
  return nullptr;
}

}  // namespace

LiveRequest::LiveRequest(const Request& request, VendorId vendor_id, int32_t end_id, const AnswerForm& form)
    : request_(&request),
      vendor_id_(vendor_id),
      end_id_(end_id),
      form_(&form),
      sequences_(request.samples),
      left_(request.samples) {
  if (!request.want_payload) return;
  payload_.resize(form.payload_outputs.size() * form.row_bytes);
  payload_missing_ = "the runtime returned no output";
}

void LiveRequest::take(const trt::Result& result) {
  const auto index = static_cast<size_t>(result.sequenceIndex);
  if (index >= sequences_.size()) return fail({IFAB_INTERNAL, "the runtime answered for a sample not asked for"});
  Sequence& sequence = sequences_[index];
  if (sequence.over) return fail({IFAB_INTERNAL, "the runtime answered for a sample that had ended"});
  if (index == 0) {
    if (!answered_) take_cached(result);
    answered_ = true;
    if (!payload_missing_.empty()) take_payload(result);
  }
  over_ = over_ || result.isFinal;
  take_tokens(sequence, result);
}

void LiveRequest::take_tokens(Sequence& sequence, const trt::Result& result) {
  std::vector<int32_t> tokens;
  if (!result.outputTokenIds.empty()) tokens = result.outputTokenIds.front();
  const uint64_t before = sequence.received;
  sequence.received += tokens.size();
  const size_t came = tokens.size();
  sequence.over = result.isSequenceFinal || result.isFinal;
  if (sequence.over) {
    const trt::FinishReason reason =
        result.finishReasons.empty() ? trt::FinishReason::kNOT_FINISHED : result.finishReasons.front();
    if (request_->max_tokens == 0) {
      sequence.ending = {Ending::Kind::kLength, -1, {}};
      tokens.clear();
    } else {
      sequence.ending = ending_of(reason, *request_, end_id_, sequence.received, tokens);
    }
    if (sequence.ending.kind == Ending::Kind::kBroken || sequence.ending.kind == Ending::Kind::kCancelled) {
      return fail({IFAB_INTERNAL, sequence.ending.why});
    }
  }
  if (request_->logprobs && !tokens.empty()) {
    // The runtime gives those of the whole sequence each time.
    if (!result.logProbs || result.logProbs->empty() || result.logProbs->front().size() < came) {
      return fail({IFAB_INTERNAL, "the runtime returned tokens without their log-probabilities"});
    }
    const std::vector<float>& all = result.logProbs->front();
    const size_t first = all.size() >= before + came ? before : 0;
    sequence.logprobs.insert(sequence.logprobs.end(), all.begin() + static_cast<std::ptrdiff_t>(first),
                             all.begin() + static_cast<std::ptrdiff_t>(first + tokens.size()));
  }
  sequence.tokens.insert(sequence.tokens.end(), tokens.begin(), tokens.end());
}

void LiveRequest::take_cached(const trt::Result& result) {
  if (!result.requestPerfMetrics || form_->block_tokens == 0) return;
  const int32_t reused = std::max(result.requestPerfMetrics->kvCacheMetrics.numReusedBlocks, 0);
  const uint64_t tokens = static_cast<uint64_t>(reused) * form_->block_tokens;
  // One token of a prompt is computed, even where all its blocks were there.
  cached_ = static_cast<uint32_t>(std::min<uint64_t>(tokens, request_->prompt.size() - 1));
}

// The first row of an output is the prompt's last token: the pass over the prompt made it, together with the first
// generated token. It comes with the first answer, or, in some releases, with the last one only.
void LiveRequest::take_payload(const trt::Result& result) {
  for (size_t i = 0; i < form_->payload_outputs.size(); ++i) {
    const std::string& name = form_->payload_outputs[i];
    const trt::Tensor* found = output_of(result, name);
    if (found == nullptr) {
      payload_missing_ = "the runtime returned no output " + name;
      return;
    }
    const trt::Tensor row = found->getMemoryType() == trt::MemoryType::kGPU ? found->copyToCpu() : *found;
    if (row.getDataType() != form_->payload_type || row.getSizeInBytes() < form_->row_bytes) {
      payload_missing_ = "the runtime returned output " + name + " in another form than the contract's";
      return;
    }
    std::memcpy(payload_.data() + i * form_->row_bytes, row.getData(), form_->row_bytes);
  }
  payload_missing_.clear();
}

void LiveRequest::fail(Status status) {
  if (failure_.ok()) failure_ = std::move(status);
}

bool LiveRequest::has_more() const {
  if (!failure_.ok()) return true;
  if (!answered_) return false;
  if (!context_told_) return true;
  return std::any_of(sequences_.begin(), sequences_.end(), [](const Sequence& sequence) {
    return !sequence.all_told() || (sequence.over && !sequence.ended);
  });
}

bool LiveRequest::tell(uint32_t& tokens_left, StepReport& report, Sink& sink) {
  if (!failure_.ok()) {
    sink.failed(request_->id, failure_);
    return true;
  }
  if (!answered_) return false;
  if (!context_told_) tell_context(sink);
  for (uint32_t sample = 0; sample < sequences_.size(); ++sample) {
    Sequence& sequence = sequences_[sample];
    if (!sequence.all_told()) tell_tokens(sample, tokens_left, report, sink);
    if (sequence.over && sequence.all_told() && !sequence.ended) tell_end(sample, report, sink);
  }
  return left_ == 0;
}

void LiveRequest::tell_context(Sink& sink) {
  const auto computed = static_cast<uint32_t>(request_->prompt.size()) - cached_;
  sink.prompt_computed(request_->id, computed);
  sink.context_done(request_->id, cached_, computed, {});
  context_told_ = true;
}

void LiveRequest::tell_tokens(uint32_t sample, uint32_t& tokens_left, StepReport& report, Sink& sink) {
  Sequence& sequence = sequences_[sample];
  const size_t waiting = sequence.tokens.size() - sequence.told;
  const size_t count = std::min<size_t>({waiting, tokens_left, form_->event_tokens});
  if (count == 0) return;
  sink.tokens(request_->id, sample, std::span(sequence.tokens).subspan(sequence.told, count),
              sequence.logprobs.empty() ? std::span<const float>()
                                        : std::span<const float>(sequence.logprobs).subspan(sequence.told, count));
  sequence.told += count;
  tokens_left -= static_cast<uint32_t>(count);
  report.generated_tokens += static_cast<uint32_t>(count);
  if (!sequence.all_told()) return;
  sequence.tokens.clear();
  sequence.logprobs.clear();
  sequence.told = 0;
}

void LiveRequest::tell_end(uint32_t sample, StepReport& report, Sink& sink) {
  Sequence& sequence = sequences_[sample];
  std::string_view missing;
  if (sample == 0 && request_->want_payload) {
    missing = payload_missing_;
    if (missing.empty()) {
      if (uint8_t* out = sink.payload(request_->id)) std::memcpy(out, payload_.data(), payload_.size());
    }
  }
  const bool stopped = sequence.ending.kind == Ending::Kind::kStop;
  if (stopped && sequence.ending.stop_id >= 0) ++report.generated_tokens;
  const int32_t reason = request_->max_tokens == 0 ? IFAB_FINISH_COMPLETE
                         : stopped                 ? IFAB_FINISH_STOP
                                                   : IFAB_FINISH_LENGTH;
  sequence.ended = true;
  --left_;
  sink.finished(request_->id, sample, reason, sequence.ending.stop_id, missing);
}

}  // namespace ifab::executor
