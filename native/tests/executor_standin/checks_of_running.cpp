// SPDX-License-Identifier: Apache-2.0
//
// Facts of the batch, of answers and of ends.
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>

#include "bench.h"

namespace ifab::standin {
namespace {

// ---- the batch ----

bool takes_at_most_a_batch(const Semantics& semantics) {
  Bench bench(semantics);
  control().gate.close();
  bench.executor();
  for (uint64_t i = 0; i < 6; ++i) bench.ask(8, i, 4);
  return pass(2) && control().most_active == 4;
}

bool holds_back_followers(const Semantics& semantics) {
  Bench bench(semantics);
  control().gate.close();
  bench.executor();
  // Four iterations for the head, which both share to the last block.
  for (int i = 0; i < 2; ++i) bench.ask(request_of(256, 1, 2));
  if (!pass(2)) return false;
  const trt::IterationStats stats = bench.last_iteration();
  return stats.numActiveRequests == 2 && stats.inflightBatchingStats->numScheduledRequests == 1;
}

bool first_blocks_others(const Semantics& semantics) {
  SimulatedEngine engine = Bench::small();
  engine.kv_pool_blocks = 10;
  Bench bench(semantics, engine);
  control().gate.close();
  bench.executor();
  bench.ask(request_of(16, 1, 80));  // 6 of 10 blocks, and its full length counts
  bench.ask(request_of(16, 2, 80));
  bench.ask(request_of(8, 3, 8));  // one block
  if (!pass(3)) return false;
  const trt::IterationStats stats = bench.last_iteration();
  return stats.numActiveRequests == 3 && stats.inflightBatchingStats->numScheduledRequests == 1;
}

bool no_room_is_no_error(const Semantics& semantics) {
  SimulatedEngine engine = Bench::small();
  engine.kv_pool_blocks = 2;
  Bench bench(semantics, engine);
  bench.config.setSchedulerConfig(trt::SchedulerConfig(trt::CapacitySchedulerPolicy::kMAX_UTILIZATION));
  control().gate.close();
  bench.executor();
  const trt::IdType id = bench.ask(request_of(64, 1, 4));
  if (!pass(1)) return false;
  bench.executor().cancelRequest(id);  // the end would wait for it
  const trt::IterationStats stats = bench.last_iteration();
  return stats.numActiveRequests == 1 && stats.inflightBatchingStats->numScheduledRequests == 0 &&
         bench.executor().awaitResponses(std::chrono::milliseconds(0)).empty();
}

bool utilisation_asks_for_prompts_only(const Semantics& semantics) {
  SimulatedEngine engine = Bench::small();
  engine.kv_pool_blocks = 10;
  Bench bench(semantics, engine);
  bench.config.setSchedulerConfig(trt::SchedulerConfig(trt::CapacitySchedulerPolicy::kMAX_UTILIZATION));
  control().gate.close();
  bench.executor();
  const trt::IdType ids[] = {bench.ask(request_of(16, 1, 80)), bench.ask(request_of(16, 2, 80))};  // 6 blocks each
  if (!pass(2)) return false;
  for (const trt::IdType id : ids) bench.executor().cancelRequest(id);  // they would run out of room
  return bench.last_iteration().inflightBatchingStats->numScheduledRequests == 2;
}

bool priority_goes_beyond_a_batch(const Semantics& semantics) {
  SimulatedEngine engine = Bench::small();
  engine.slots = 1;
  Bench bench(semantics, engine);
  control().gate.close();
  bench.executor();
  bench.ask(request_of(8, 1, 64));
  if (!pass(1)) return false;
  trt::Request urgent = request_of(8, 2, 1);
  urgent.setPriority(0.6f);
  bench.ask(request_of(8, 3, 1));
  bench.ask(urgent);
  return pass(1) && control().most_active == 2;
}

bool priority_goes_first(const Semantics& semantics) {
  SimulatedEngine engine = Bench::small();
  engine.slots = 1;
  Bench bench(semantics, engine);
  control().gate.close();
  bench.executor();
  trt::Request low = request_of(8, 1, 1), high = request_of(8, 2, 1);
  low.setPriority(0.4f);
  high.setPriority(0.6f);
  bench.ask(low);
  const trt::IdType first = bench.ask(high);
  control().gate.open();
  return bench.hear(2).front().getRequestId() == first;
}

bool idle_does_nothing(const Semantics& semantics) {
  Bench bench(semantics);
  bench.executor().awaitResponses(std::chrono::milliseconds(300)).clear();
  return bench.executor().getLatestIterationStats().empty();
}

SimulatedEngine that_throws() {
  SimulatedEngine engine = Bench::small();
  engine.request_faults = {{"throw", "prompt_token", 300, 0}};
  return engine;
}

trt::Request poison() {
  trt::Request request({1, 300, 2}, 4);
  return request;
}

bool forward_fails_everybody(const Semantics& semantics) {
  Bench bench(semantics, that_throws());
  control().gate.close();
  bench.executor();
  const trt::IdType innocent = bench.ask(request_of(8, 1, 8));
  const trt::IdType guilty = bench.ask(poison());
  control().gate.open();
  bench.hear(2);
  return bench.has_error(innocent) && bench.has_error(guilty) &&
         bench.of(guilty).back().getErrorMsg().starts_with("Encountered an error in forwardAsync function:");
}

bool forward_goes_on(const Semantics& semantics) {
  Bench bench(semantics, that_throws());
  bench.ask(poison());
  bench.hear(1);
  try {
    const trt::IdType next = bench.ask(request_of(8, 1, 4));
    bench.hear(1);
    return bench.of(next).size() == 1 && !bench.has_error(next);
  } catch (const std::exception&) {
    return false;
  }
}

bool misspelt_output_fails_everybody(const Semantics& semantics) {
  Bench bench(semantics);
  control().gate.close();
  bench.executor();
  const trt::IdType innocent = bench.ask(request_of(8, 1, 8));
  trt::Request request = request_of(8, 2, 8);
  trt::OutputConfig output = request.getOutputConfig();
  output.additionalModelOutputs = {trt::AdditionalModelOutput("hidden_0")};
  request.setOutputConfig(output);
  bench.ask(request);
  control().gate.open();
  bench.hear(2);
  return bench.has_error(innocent);
}

bool rows_are_counted(const Semantics& semantics) {
  Bench bench(semantics, Bench::small(), {.plan = R"({"outputs": [
      {"name": "gathered", "extents": [-1, 64], "dtype": "float32", "rows": "sequences"},
      {"name": "whole", "extents": [-1, 64], "dtype": "float32", "rows": "tokens"}]})"});
  const auto fails = [&](size_t prompt, const char* name, bool context) {
    const trt::IdType id = bench.ask(changed(request_of(prompt, 2, 1), [&](trt::OutputConfig& output) {
      output.additionalModelOutputs = {trt::AdditionalModelOutput(name, context)};
    }));
    bench.hear(1);
    return bench.has_error(id);
  };
  return !fails(1, "whole", false) && fails(2, "whole", false) && !fails(2, "whole", true) &&
         !fails(2, "gathered", false) && fails(2, "gathered", true);
}

// ---- answers and ends ----

bool cancel_reaches_active_only(const Semantics& semantics) {
  SimulatedEngine engine = Bench::small();
  engine.slots = 1;
  Bench bench(semantics, engine);
  control().gate.close();
  bench.executor();
  bench.ask(request_of(8, 1, 200));
  const trt::IdType queued = bench.ask(request_of(8, 2, 8));
  bench.executor().cancelRequest(queued);
  const bool passed = pass(3);
  const bool unheard = bench.executor().awaitResponses(std::chrono::milliseconds(0)).empty();
  return passed && unheard && bench.last_iteration().numQueuedRequests == 1;
}

bool cancelled_has_no_tokens(const Semantics& semantics) {
  Bench bench(semantics, Bench::small(), {.plan = R"({"tokens_an_answer": 100})"});
  control().gate.close();
  bench.executor();
  trt::Request request = request_of(8, 1, 64);
  request.setStreaming(true);
  const trt::IdType id = bench.ask(request);
  if (!pass(5)) return false;
  bench.executor().cancelRequest(id);
  control().gate.open();
  bench.hear(1);
  const trt::Result result = bench.of(id).back().getResult();
  return result.finishReasons.front() == trt::FinishReason::kCANCELLED && result.outputTokenIds.front().empty();
}

bool cancel_comes_after_a_pass(const Semantics& semantics) {
  Bench bench(semantics);
  control().gate.close();
  bench.executor();
  bench.executor().cancelRequest(bench.ask(request_of(8, 1, 64)));
  if (!pass(1)) return false;
  const bool computed = bench.last_iteration().inflightBatchingStats->numCtxTokens == 8;
  return computed && pass(1) && bench.hear(1).size() == 1;
}

bool cancel_ends_every_sample(const Semantics& semantics) {
  Bench bench(semantics);
  control().gate.close();
  bench.executor();
  const trt::IdType id = bench.ask(sampled(request_of(8, 1, 64), 2));
  if (!pass(2)) return false;
  bench.executor().cancelRequest(id);
  return pass(1) && bench.executor().awaitResponses(std::chrono::milliseconds(0)).size() == 2;
}

bool cancelling_log_probs_aborts(const Semantics& semantics) {
  const pid_t child = fork();
  if (child == 0) {
    signal(SIGABRT, SIG_DFL);  // no report of a sanitizer
    Bench bench(semantics);
    control().gate.close();
    bench.executor();
    trt::Request request = request_of(8, 1, 64);
    request.setStreaming(true);
    trt::OutputConfig output = request.getOutputConfig();
    output.returnLogProbs = true;
    request.setOutputConfig(output);
    const trt::IdType id = bench.ask(request);
    if (!pass(2)) _exit(1);
    bench.executor().cancelRequest(id);
    _exit(pass(1) ? 0 : 1);
  }
  int status = 0;
  return waitpid(child, &status, 0) == child && WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT;
}

bool log_probs_are_cumulative(const Semantics& semantics) {
  Bench bench(semantics);
  trt::Request request = request_of(8, 1, 5);
  request.setStreaming(true);
  trt::OutputConfig output = request.getOutputConfig();
  output.returnLogProbs = true;
  request.setOutputConfig(output);
  const trt::IdType id = bench.ask(request);
  bench.hear(1);
  return bench.of(id).back().getResult().logProbs->front().size() == 5;
}

// The last answer to such a request.
trt::Result answer(Bench& bench, const trt::Request& request) {
  const trt::IdType id = bench.ask(request);
  bench.hear(1);
  return bench.of(id).back().getResult();
}

bool log_probs_are_asked_for(const Semantics& semantics) {
  Bench bench(semantics);
  return !answer(bench, request_of(8, 1, 2)).logProbs;
}

bool metrics_are_asked_for(const Semantics& semantics) {
  Bench bench(semantics);
  return !answer(bench, trt::Request(prompt_of(8, 1), 2)).requestPerfMetrics;
}

bool outputs_are_asked_for_twice(const Semantics& semantics) {
  const trt::Request request = changed(request_of(8, 1, 2), [](trt::OutputConfig& output) {
    output.additionalModelOutputs = {trt::AdditionalModelOutput("logits")};
  });
  Bench silent(semantics);
  if (!answer(silent, request).additionalOutputs.empty()) return false;
  Bench bench(semantics);
  bench.config.setAdditionalModelOutputs({trt::AdditionalModelOutput("logits")});
  return answer(bench, request).additionalOutputs.size() == 1;
}

bool streams_have_no_input(const Semantics& semantics) {
  Bench bench(semantics);
  trt::Request request(prompt_of(8, 1), 3);
  request.setStreaming(true);
  const trt::IdType id = bench.ask(request);
  bench.hear(1);
  return bench.tokens(id).size() == 3;
}

bool siblings_fail_under_own_ids(const Semantics& semantics) {
  Bench bench(semantics, that_throws());
  trt::Request request = poison();
  trt::SamplingConfig sampling;
  sampling.setNumReturnSequences(2);
  request.setSamplingConfig(sampling);
  const trt::IdType id = bench.ask(request);
  bench.hear(2);
  return bench.of(id).size() == 1;
}

bool statistics_are_drained(const Semantics& semantics) {
  Bench bench(semantics);
  control().gate.close();
  bench.executor();
  bench.ask(8, 1, 8);
  return pass(4) && bench.executor().getLatestIterationStats().size() == 4 &&
         bench.executor().getLatestIterationStats().empty();
}

bool statistics_are_bounded(const Semantics& semantics) {
  Bench bench(semantics);
  bench.config.setIterStatsMaxIterations(2);
  control().gate.close();
  bench.executor();
  bench.ask(8, 1, 8);
  return pass(4) && bench.executor().getLatestIterationStats().size() == 2;
}

bool statistics_say_how_long(const Semantics& semantics) {
  Bench bench(semantics);
  control().gate.close();
  bench.executor();
  bench.ask(8, 1, 8);
  return pass(1) && bench.last_iteration().iterLatencyMS > 0;
}

bool shutdown_waits(const Semantics& semantics) {
  Bench bench(semantics);
  control().gate.close();
  bench.executor();
  const trt::IdType id = bench.ask(request_of(8, 1, 64));
  if (!pass(1)) return false;
  bench.executor().shutdown();
  bench.hear(1);
  return bench.of(id).size() == 1 && bench.of(id).front().getResult().isFinal;
}

bool awaits_throw_after_shutdown(const Semantics& semantics) {
  Bench bench(semantics);
  bench.executor().shutdown();
  try {
    (void)bench.executor().awaitResponses(std::chrono::milliseconds(0));
  } catch (const std::exception&) {
    return true;
  }
  return false;
}

}  // namespace

const Checks& checks_of_running() {
  static const Checks all = {
      {"takes_at_most_a_batch", takes_at_most_a_batch},
      {"holds_back_followers", holds_back_followers},
      {"first_blocks_others", first_blocks_others},
      {"no_room_is_no_error", no_room_is_no_error},
      {"utilisation_asks_for_prompts_only", utilisation_asks_for_prompts_only},
      {"priority_goes_beyond_a_batch", priority_goes_beyond_a_batch},
      {"priority_goes_first", priority_goes_first},
      {"idle_does_nothing", idle_does_nothing},
      {"forward_fails_everybody", forward_fails_everybody},
      {"forward_goes_on", forward_goes_on},
      {"misspelt_output_fails_everybody", misspelt_output_fails_everybody},
      {"rows_are_counted", rows_are_counted},
      {"cancel_reaches_active_only", cancel_reaches_active_only},
      {"cancelled_has_no_tokens", cancelled_has_no_tokens},
      {"cancel_comes_after_a_pass", cancel_comes_after_a_pass},
      {"cancel_ends_every_sample", cancel_ends_every_sample},
      {"cancelling_log_probs_aborts", cancelling_log_probs_aborts},
      {"log_probs_are_cumulative", log_probs_are_cumulative},
      {"log_probs_are_asked_for", log_probs_are_asked_for},
      {"metrics_are_asked_for", metrics_are_asked_for},
      {"outputs_are_asked_for_twice", outputs_are_asked_for_twice},
      {"streams_have_no_input", streams_have_no_input},
      {"siblings_fail_under_own_ids", siblings_fail_under_own_ids},
      {"statistics_are_drained", statistics_are_drained},
      {"statistics_are_bounded", statistics_are_bounded},
      {"statistics_say_how_long", statistics_say_how_long},
      {"shutdown_waits", shutdown_waits},
      {"awaits_throw_after_shutdown", awaits_throw_after_shutdown},
  };
  return all;
}

}  // namespace ifab::standin
