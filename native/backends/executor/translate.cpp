// SPDX-License-Identifier: Apache-2.0
#include "translate.h"

#include <algorithm>
#include <list>
#include <optional>
#include <utility>

#include "text.h"

namespace ifab::executor {
namespace {

namespace trt = tensorrt_llm::executor;

constexpr std::string_view kFetching = "Encountered an error when fetching new request:";
constexpr std::string_view kForward = "Encountered an error in forward";  // ...Sync function, ...Async function
constexpr size_t kVendorTextBytes = 360;  // of its words, so that ours and theirs fit one event

// A head that others are expected to share outlives blocks that nobody named; the runtime's own level is 35 of 100.
constexpr trt::RetentionPriority kHeadPriority = 80;

trt::SizeType32 number(uint64_t value) {
  return static_cast<trt::SizeType32>(value);
}

trt::SamplingConfig sampling_of(const Request& request) {
  const ifab_sampling_t& from = request.sampling;
  trt::SamplingConfig sampling;
  sampling.setBeamWidth(1);
  sampling.setNumReturnSequences(number(request.samples));
  // Without one, every request of that prompt would draw the same: the runtime's own seed is 0. Sequence i of several
  // draws with the seed plus i.
  sampling.setSeed(from.seed);
  if (from.temperature == 0) {
    sampling.setTopK(1);
  } else {
    sampling.setTemperature(from.temperature);
    sampling.setTopK(from.top_k);
    sampling.setTopP(from.top_p);
    sampling.setMinP(from.min_p);
  }
  sampling.setRepetitionPenalty(from.repetition_penalty);
  sampling.setPresencePenalty(from.presence_penalty);
  sampling.setFrequencyPenalty(from.frequency_penalty);
  return sampling;
}

trt::OutputConfig outputs_of(const Request& request, const Settings& settings) {
  trt::OutputConfig outputs;
  outputs.returnLogProbs = request.logprobs;
  outputs.returnContextLogits = false;
  outputs.returnGenerationLogits = false;
  outputs.excludeInputFromOutput = true;
  outputs.returnEncoderOutput = false;
  outputs.returnPerfMetrics = true;  // says how many blocks of the prompt were reused
  if (request.want_payload) {
    std::vector<trt::AdditionalModelOutput> names;
    for (const std::string& name : settings.payload_outputs) names.emplace_back(name, false);
    outputs.additionalModelOutputs = std::move(names);
  }
  return outputs;
}

trt::GuidedDecodingParams guide_of(const Request& request) {
  using Type = trt::GuidedDecodingParams::GuideType;
  const Type type = request.guide_kind == IFAB_GUIDE_JSON_SCHEMA ? Type::kJSON_SCHEMA
                    : request.guide_kind == IFAB_GUIDE_REGEX     ? Type::kREGEX
                                                                 : Type::kEBNF_GRAMMAR;
  return trt::GuidedDecodingParams(type, request.guide);
}

std::string vendor_text(std::string_view text) {
  return std::string(cut_text(text, kVendorTextBytes));
}

}  // namespace

int32_t end_id_of(const Request& request, const ContractValues& contract) {
  for (const int32_t id : contract.tokenizer.end_token_ids) {
    if (std::binary_search(request.stop_ids.begin(), request.stop_ids.end(), id)) return id;
  }
  return -1;
}

trt::Request to_vendor(const Request& request, const ContractValues& contract, const Settings& settings) {
  const bool generates = request.max_tokens > 0;
  // An engine that generates nothing still has to be asked for one token, which is thrown away.
  trt::Request made(request.prompt, generates ? number(request.max_tokens) : 1);
  made.setStreaming(generates && !request.logprobs);
  made.setSamplingConfig(sampling_of(request));
  made.setOutputConfig(outputs_of(request, settings));
  made.setReturnAllGeneratedTokens(false);
  made.setPriority(static_cast<float>(request.priority + 100) / 200.0f);
  made.setCacheSaltID(request.salt);
  made.setClientId(request.id);
  const int32_t end_id = end_id_of(request, contract);
  if (end_id >= 0) made.setEndId(end_id);
  std::list<trt::VecTokens> words;
  for (const int32_t id : request.stop_ids) {
    if (id != end_id) words.push_back({id});
  }
  if (!words.empty()) made.setStopWords(words);
  if (!request.head_ends.empty()) {
    made.setKvCacheRetentionConfig(trt::KvCacheRetentionConfig(
        {trt::KvCacheRetentionConfig::TokenRangeRetentionConfig(0, number(request.head_ends.back()), kHeadPriority)}));
  }
  if (request.guide_kind != IFAB_GUIDE_NONE) made.setGuidedDecodingParams(guide_of(request));
  return made;
}

Ending ending_of(trt::FinishReason reason, const Request& request, int32_t end_id, uint64_t generated,
                 std::vector<int32_t>& tokens) {
  const bool stop_last =
      !tokens.empty() && std::binary_search(request.stop_ids.begin(), request.stop_ids.end(), tokens.back());
  const auto stopped = [&](int32_t id) {
    if (stop_last) tokens.pop_back();
    return Ending{Ending::Kind::kStop, id, {}};
  };
  switch (reason) {
    case trt::FinishReason::kEND_ID:
      return stopped(end_id);
    case trt::FinishReason::kSTOP_WORDS:
      if (stop_last) return stopped(tokens.back());
      return {Ending::Kind::kBroken, -1, "the runtime ended at a stop word that is not in its output"};
    case trt::FinishReason::kLENGTH:
      return {Ending::Kind::kLength, -1, {}};
    case trt::FinishReason::kCANCELLED:
      return {Ending::Kind::kCancelled, -1, "the runtime cancelled the request, which nobody asked for"};
    case trt::FinishReason::kTIMED_OUT:
      return {Ending::Kind::kBroken, -1, "the runtime gave the request up as too slow"};
    case trt::FinishReason::kNOT_FINISHED:
      break;
  }
  // Some paths of the runtime end a sequence without a reason. What it generated says it as well: an end id is the one
  // thing that ends a sequence early and need not be in its output.
  if (stop_last) return stopped(tokens.back());
  if (generated >= request.max_tokens) return {Ending::Kind::kLength, -1, {}};
  if (end_id >= 0) return stopped(end_id);
  return {Ending::Kind::kBroken, -1, "the runtime ended a sequence without a reason"};
}

Failure failure_of(std::string_view text, const Request& request) {
  if (text.starts_with(kFetching)) {
    const char* field = request.guide_kind != IFAB_GUIDE_NONE ? "guide" : "request";
    text.remove_prefix(kFetching.size());
    while (text.starts_with(' ')) text.remove_prefix(1);
    return {Failure::Kind::kRequest,
            {IFAB_INVALID_ARGUMENT, std::string(field) + ": the runtime does not take it: " + vendor_text(text)}};
  }
  if (text.starts_with(kForward)) {
    return {Failure::Kind::kForward,
            {IFAB_INTERNAL, "a forward pass failed, and with it all requests in it: " + vendor_text(text)}};
  }
  return {Failure::Kind::kOther, {IFAB_INTERNAL, "the runtime ended the request: " + vendor_text(text)}};
}

}  // namespace ifab::executor
