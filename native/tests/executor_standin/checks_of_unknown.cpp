// SPDX-License-Identifier: Apache-2.0
//
// Ways in which releases differ: which of the two the stand-in takes.
#include "bench.h"

namespace ifab::standin {
namespace {

using Outputs = std::vector<trt::AdditionalOutput>;

// The additional outputs of every answer to a streaming request of three tokens.
std::vector<Outputs> outputs(const Semantics& semantics) {
  Bench bench(semantics);
  bench.config.setAdditionalModelOutputs({trt::AdditionalModelOutput("logits")});
  trt::Request request = changed(request_of(8, 1, 3), [](trt::OutputConfig& output) {
    output.additionalModelOutputs = {trt::AdditionalModelOutput("logits")};
  });
  request.setStreaming(true);
  const trt::IdType id = bench.ask(request);
  bench.hear(1);
  std::vector<Outputs> all;
  for (const trt::Response& response : bench.of(id)) all.push_back(response.getResult().additionalOutputs);
  return all;
}

bool end_id_in_output(const Semantics& semantics) {
  SimulatedEngine engine = Bench::small();
  engine.end_one_in = 2;
  Bench bench(semantics, engine);
  trt::Request request = request_of(8, 1, 64);
  request.setEndId(256);
  const trt::IdType id = bench.ask(request);
  bench.hear(1);
  const std::vector<int32_t> tokens = bench.tokens(id);
  return !tokens.empty() && tokens.back() == 256;
}

bool outputs_say_their_phase(const Semantics& semantics) {
  const std::vector<Outputs> all = outputs(semantics);
  for (const Outputs& each : all) {
    if (!each.empty()) return each.front().name == "generation_logits";
  }
  return false;
}

bool outputs_with_first_answer(const Semantics& semantics) {
  const std::vector<Outputs> all = outputs(semantics);
  return all.size() == 3 && !all.front().empty() && all.back().empty();
}

bool outputs_on_card(const Semantics& semantics) {
  return outputs(semantics).front().front().output.getMemoryType() == trt::MemoryType::kGPU;
}

bool reasons_are_given(const Semantics& semantics) {
  Bench bench(semantics);
  const trt::IdType id = bench.ask(request_of(8, 1, 3));
  bench.hear(1);
  return bench.of(id).back().getResult().finishReasons.front() == trt::FinishReason::kLENGTH;
}

bool accepts_engines_without_cache(const Semantics& semantics) {
  Bench bench(semantics, SimulatedEngine::mining(64));
  return !bench.is_refused();
}

bool accepts_paged_attention_without_cache(const Semantics& semantics) {
  Bench bench(semantics, SimulatedEngine::mining(64),
              {.config = R"({"build_config": {"plugin_config": {"use_paged_context_fmha": true}}})"});
  return !bench.is_refused();
}

}  // namespace

const Checks& checks_of_unknown() {
  static const Checks all = {
      {"end_id_in_output", end_id_in_output},
      {"outputs_say_their_phase", outputs_say_their_phase},
      {"outputs_with_first_answer", outputs_with_first_answer},
      {"outputs_on_card", outputs_on_card},
      {"reasons_are_given", reasons_are_given},
      {"accepts_engines_without_cache", accepts_engines_without_cache},
      {"accepts_paged_attention_without_cache", accepts_paged_attention_without_cache},
  };
  return all;
}

}  // namespace ifab::standin
