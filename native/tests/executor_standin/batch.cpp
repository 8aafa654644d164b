// SPDX-License-Identifier: Apache-2.0
#include "batch.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include "control.h"
#include "formula.h"
#include "ifab/engine.h"

namespace ifab::standin {
namespace {

// The one guide that the stand-in reads; of the others it takes any text.
void read_guide(const trt::GuidedDecodingParams& guide) {
  if (guide.getGuideType() == trt::GuidedDecodingParams::GuideType::kJSON_SCHEMA &&
      !nlohmann::json::accept(guide.getGuide().value_or(""))) {
    throw std::runtime_error("the JSON schema cannot be parsed");
  }
}

simulated::Config card_of(const EngineFile& engine, const trt::ExecutorConfig& config) {
  simulated::Config card = engine.simulated;
  card.slots = static_cast<uint32_t>(config.maxBatchSize.value.value_or(static_cast<int32_t>(engine.max_batch_size)));
  card.step_token_budget = static_cast<uint32_t>(config.maxNumTokens.value.value_or(INT32_MAX));
  if (engine.semantics.budget_beyond_engine_is_ignored) {
    card.step_token_budget = std::min(engine.max_step_tokens, card.step_token_budget);
  }
  card.splits_prompts = config.enableChunkedContext.value;
  if (!engine.cached) {
    card.kv_block_tokens = card.kv_pool_blocks = 0;
  } else if (config.kvCache.value.maxTokens.value && engine.semantics.pool_has_max_tokens) {
    card.kv_pool_blocks = static_cast<uint32_t>(*config.kvCache.value.maxTokens.value) / card.kv_block_tokens;
  }
  card.scoring = false;
  card.payload_values = 0;  // outputs are made here, where more than one row can be
  return card;
}

}  // namespace

Batch::Batch(const EngineFile& engine, const trt::ExecutorConfig& config)
    : engine_(engine),
      config_(config),
      reuse_(config.kvCache.value.enableBlockReuse.value &&
             (engine.paged_attention || !engine.semantics.reuse_needs_paged_attention) &&
             !(engine.context_logits && engine.semantics.context_logits_switch_reuse_off)),
      card_(std::make_unique<simulated::SimulatedBackend>(card_of(engine, config))) {}

bool Batch::is_urgent(trt::PriorityType priority) const {
  return std::any_of(active_.begin(), active_.end(),
                     [&](const Active& active) { return active.vendor->getPriority() < priority; });
}

void Batch::validate(const trt::Request& request) const {
  const size_t longest = engine_.max_sequence_tokens - (engine_.semantics.longest_prompt_leaves_a_token ? 1 : 0);
  const bool whole = !config_.enableChunkedContext.value && engine_.semantics.whole_prompts_fit_a_pass;
  const size_t most = whole ? std::min<size_t>(longest, card_->facts().step_token_budget) : longest;
  if (request.getInputTokenIds().size() > most) {
    throw std::runtime_error("Prompt length exceeds maximum input length " + std::to_string(most));
  }
  const auto guide = request.getGuidedDecodingParams();
  if (!guide) return;
  if (!config_.guidedDecoding.value) {
    if (!engine_.semantics.guides_need_configuration) return;
    throw std::runtime_error("guided decoding was not set up");
  }
  if (!engine_.semantics.guides_are_read_in_the_pass) read_guide(*guide);
}

void Batch::take(const Queued& queued) {
  Shared& shared =
      shared_.emplace(queued.id, Shared{queued.request, std::vector<bool>(queued.sequences())}).first->second;
  for (size_t index = 0; index < queued.sequences(); ++index) {
    Active& active = active_.emplace_back();
    active.id = index == 0 ? queued.id : queued.children[index - 1];
    active.parent = queued.id;
    active.index = static_cast<trt::SizeType32>(index);
    active.vendor = &shared.request;
    ifab::Request& request = active.simulated;
    request.id = active.id;
    request.prompt = shared.request.getInputTokenIds();
    request.max_tokens = static_cast<uint32_t>(shared.request.getMaxTokens());
    if (engine_.semantics.long_outputs_are_cut) {
      const auto prompt = static_cast<uint32_t>(request.prompt.size());
      request.max_tokens = std::min(request.max_tokens, engine_.max_sequence_tokens - prompt);
    }
    const auto seed = shared.request.getSamplingConfig().getSeed();
    request.sampling.seed = seed.value_or(engine_.semantics.seed_unset_is_zero ? 0 : active.id) + index;
    request.salt = engine_.semantics.salts_part_reuse ? shared.request.getCacheSaltID().value_or(0) : 0;
    if (!reuse_) request.salt = simulated::mix(request.salt ^ active.id);
    request.logprobs = true;
    if (const auto end = shared.request.getEndId()) request.stop_ids.push_back(*end);
    if (!engine_.semantics.end_unset_runs_on) request.stop_ids = engine_.simulated.end_ids;
    for (const trt::VecTokens& word : shared.request.getStopWords().value_or(std::list<trt::VecTokens>())) {
      request.stop_ids.push_back(word.front());
    }
    std::sort(request.stop_ids.begin(), request.stop_ids.end());
  }
}

void Batch::cancel(std::set<trt::IdType>& ids, std::vector<trt::Response>& responses) {
  std::set<trt::IdType> ended;
  for (auto at = active_.begin(); at != active_.end();) {
    const auto next = std::next(at);
    if (ids.contains(engine_.semantics.cancel_ends_every_sample ? at->parent : at->id)) {
      ended.insert(at->parent);
      if (engine_.semantics.cancelling_log_probs_aborts && at->vendor->getStreaming() &&
          at->vendor->getOutputConfig().returnLogProbs) {
        std::abort();
      }
      at->finished = true;
      at->reason = trt::FinishReason::kCANCELLED;
      if (engine_.semantics.cancelled_has_no_tokens) at->fresh.clear();
      responses.emplace_back(at->parent, result_of(*at));
      remove(at);
    }
    at = next;
  }
  for (const trt::IdType id : ended) ids.erase(id);
}

trt::IterationStats Batch::pass(std::vector<trt::Response>& responses) {
  trt::IterationStats stats;
  stats.iter = ++iteration_;
  stats.inflightBatchingStats.emplace();
  try {
    schedule();
    run(stats);
    answer(responses);
  } catch (const std::exception& error) {
    fail(std::string("Encountered an error in forwardAsync function: ") + error.what(), responses);
    if (!engine_.semantics.forward_goes_on) throw;
  }
  stats.numActiveRequests = static_cast<trt::SizeType32>(active_.size());
  if (engine_.cached) {
    const EngineFacts& facts = card_->facts();
    stats.kvCacheStats.emplace();
    stats.kvCacheStats->maxNumBlocks = static_cast<trt::SizeType32>(facts.kv_pool_blocks);
    stats.kvCacheStats->usedNumBlocks = static_cast<trt::SizeType32>(card_->kv_blocks_used());
    stats.kvCacheStats->tokensPerBlock = static_cast<trt::SizeType32>(facts.kv_block_tokens);
  }
  return stats;
}

bool Batch::fits(const Active& active) const {
  const Need need = card_->need(active.simulated);
  const Room room = card_->room();
  // Maximum utilisation asks for no more than the prompt's blocks, which the simulated engine looks after.
  if (engine_.semantics.utilisation_asks_for_prompts_only &&
      config_.scheduler.value.getCapacitySchedulerPolicy() == trt::CapacitySchedulerPolicy::kMAX_UTILIZATION) {
    return true;
  }
  return room.promised + need.blocks <= room.blocks;
}

void Batch::schedule() {
  const bool utilise =
      config_.scheduler.value.getCapacitySchedulerPolicy() == trt::CapacitySchedulerPolicy::kMAX_UTILIZATION;
  for (Active& active : active_) {
    if (active.inside) continue;
    if (engine_.semantics.holds_back_followers && reuse_ && card_->need(active.simulated).leader_computes) continue;
    const bool taken = fits(active) && card_->admit(active.simulated).outcome == AdmitOutcome::kAdmitted;
    if (taken) {
      active.inside = true;
    } else if (utilise && !engine_.semantics.no_room_is_no_error) {
      throw std::runtime_error("nothing fits");
    } else if (engine_.semantics.first_blocks_others) {
      break;
    }
  }
}

// The runtime counts the rows of an output against what it has asked for.
void Batch::check_outputs() const {
  const Semantics& semantics = engine_.semantics;
  for (const Active& active : active_) {
    const auto outputs = active.vendor->getOutputConfig().additionalModelOutputs;
    if (!active.inside || !outputs) continue;
    for (const trt::AdditionalModelOutput& output : *outputs) {
      const bool misspelt = !engine_.has_output(output.name) && semantics.misspelt_output_fails_everybody;
      // Of one token, a row for each token and one for each sequence are the same.
      const bool miscounted = engine_.ungathered.contains(output.name) != output.gatherContext &&
                              active.simulated.prompt.size() > 1 && semantics.rows_are_counted;
      if (misspelt || miscounted) throw std::runtime_error("final index mismatch");
    }
  }
}

void Batch::run(trt::IterationStats& stats) {
  if (active_.empty()) return;  // cancelled, all of them: there is nothing to pass over
  if (control().card_fails) throw std::runtime_error("CUDA runtime error: an illegal memory access was encountered");
  check_outputs();
  for (const Active& active : active_) {
    const auto guide = active.vendor->getGuidedDecodingParams();
    if (active.inside && guide && engine_.semantics.guides_are_read_in_the_pass) read_guide(*guide);
  }
  const auto inside = static_cast<trt::SizeType32>(
      std::count_if(active_.begin(), active_.end(), [](const Active& active) { return active.inside; }));
  broken_.clear();
  const StepReport report = card_->step(StepMode::kNormal, *this);
  trt::InflightBatchingStats& batch = *stats.inflightBatchingStats;
  if (report.progressed) batch.numScheduledRequests = inside;
  batch.numCtxTokens = static_cast<trt::SizeType32>(report.prompt_tokens);
}

void Batch::fail(const std::string& why, std::vector<trt::Response>& responses) {
  do {
    const auto newest = std::prev(active_.end());
    responses.emplace_back(engine_.semantics.siblings_fail_under_own_ids ? newest->id : newest->parent, why);
    remove(newest);
  } while (!active_.empty() && engine_.semantics.forward_fails_everybody);
}

void Batch::answer(std::vector<trt::Response>& responses) {
  for (const auto& [id, why] : broken_) {
    const auto at = std::find_if(active_.begin(), active_.end(), [&](const Active& active) { return active.id == id; });
    responses.emplace_back(at->id, why);
    at->inside = false;
    remove(at);
  }
  for (auto at = active_.begin(); at != active_.end();) {
    const auto next = std::next(at);
    const bool due = at->vendor->getStreaming() && at->fresh.size() >= engine_.tokens_an_answer;
    if (at->finished || due) {
      const bool finished = at->finished;
      responses.emplace_back(at->parent, result_of(*at));
      if (finished) remove(at);
    }
    at = next;
  }
}

trt::Result Batch::result_of(Active& active) {
  const Semantics& semantics = engine_.semantics;
  const trt::OutputConfig outputs = active.vendor->getOutputConfig();
  Shared& shared = shared_.at(active.parent);
  trt::Result result;
  result.sequenceIndex = active.index;
  result.isSequenceFinal = active.finished;
  shared.over[static_cast<size_t>(active.index)] = active.finished;
  result.isFinal = std::all_of(shared.over.begin(), shared.over.end(), [](bool over) { return over; });
  trt::VecTokens tokens = active.fresh;
  const bool streams = active.vendor->getStreaming() && semantics.streams_have_no_input;
  if (!streams && !outputs.excludeInputFromOutput && semantics.output_has_input) {
    tokens.insert(tokens.begin(), active.simulated.prompt.begin(), active.simulated.prompt.end());
  }
  result.outputTokenIds = {std::move(tokens)};
  if (outputs.returnLogProbs || !semantics.log_probs_are_asked_for) {
    trt::VecLogProbs log_probs = active.log_probs;
    if (!semantics.log_probs_are_cumulative) {
      log_probs.erase(log_probs.begin(), log_probs.end() - static_cast<std::ptrdiff_t>(active.fresh.size()));
    }
    result.logProbs = {{std::move(log_probs)}};
  }
  result.finishReasons = {active.finished && semantics.reasons_are_given ? active.reason
                                                                         : trt::FinishReason::kNOT_FINISHED};
  if (active.reason == trt::FinishReason::kCANCELLED) result.finishReasons = {active.reason};
  if (outputs.returnPerfMetrics || !semantics.metrics_are_asked_for) {
    const uint32_t block = std::max(card_->facts().kv_block_tokens, 1u);
    result.requestPerfMetrics.emplace();
    result.requestPerfMetrics->kvCacheMetrics.numReusedBlocks = static_cast<trt::SizeType32>(active.cached / block);
  }
  if (semantics.outputs_with_first_answer ? !active.answered : active.finished) add_outputs(active, result);
  active.fresh.clear();
  active.answered = true;
  return result;
}

bool Batch::is_configured(const std::string& output) const {
  if (!engine_.semantics.outputs_are_asked_for_twice) return true;
  const auto names = config_.additionalOutputs.value.value_or(std::vector<trt::AdditionalModelOutput>());
  return std::any_of(names.begin(), names.end(), [&](const auto& each) { return each.name == output; });
}

void Batch::add_outputs(const Active& active, trt::Result& result) {
  const auto wanted = active.vendor->getOutputConfig().additionalModelOutputs;
  if (!wanted) return;
  const bool wide = engine_.simulated.payload_dtype == IFAB_DTYPE_FLOAT32;
  const trt::DataType type = wide                                                    ? trt::DataType::kFP32
                             : engine_.simulated.payload_dtype == IFAB_DTYPE_FLOAT16 ? trt::DataType::kFP16
                                                                                     : trt::DataType::kBF16;
  for (size_t i = 0; i < wanted->size(); ++i) {
    const trt::AdditionalModelOutput& output = (*wanted)[i];
    if (!engine_.has_output(output.name) || !is_configured(output.name)) continue;
    uint64_t chain = simulated::chain_start(engine_.simulated.seed + i);
    for (const int32_t id : active.simulated.prompt) chain = simulated::chain_next(chain, id);
    // A row for each pass; those behind the first belong to generated tokens.
    const trt::Shape shape = {1, static_cast<int64_t>(active.simulated.max_tokens), engine_.simulated.hidden_size};
    trt::Tensor tensor =
        engine_.semantics.outputs_on_card ? trt::Tensor::card(type, shape) : trt::Tensor::cpu(type, shape);
    simulated::write_payload(chain, engine_.simulated.hidden_size, engine_.simulated.payload_dtype, tensor.bytes());
    result.additionalOutputs.emplace_back(
        (engine_.semantics.outputs_say_their_phase ? "generation_" : "") + output.name, std::move(tensor));
  }
}

void Batch::remove(std::list<Active>::iterator at) {
  if (at->inside) card_->cancel(at->id);
  const trt::IdType parent = at->parent;
  active_.erase(at);
  if (std::none_of(active_.begin(), active_.end(), [&](const Active& other) { return other.parent == parent; })) {
    shared_.erase(parent);
  }
}

Batch::Active* Batch::find(uint64_t id) {
  const auto at = std::find_if(active_.begin(), active_.end(), [&](const Active& active) { return active.id == id; });
  return at == active_.end() ? nullptr : &*at;
}

// ---- what the simulated engine tells ----

void Batch::context_done(uint64_t id, uint32_t cached, uint32_t, std::span<const float>) {
  find(id)->cached = cached;
}

void Batch::tokens(uint64_t id, uint32_t, std::span<const int32_t> tokens, std::span<const float> log_probs) {
  Active& active = *find(id);
  active.log_probs.insert(active.log_probs.end(), log_probs.begin(), log_probs.end());
  const auto guide = active.vendor->getGuidedDecodingParams();
  if (!guide) {
    active.fresh.insert(active.fresh.end(), tokens.begin(), tokens.end());
    return;
  }
  // A guide allows one text here, itself, byte by byte; so that tests see that it came through whole.
  const std::string text = guide->getGuide().value_or("");
  if (active.guided < text.size()) active.fresh.push_back(static_cast<unsigned char>(text[active.guided++]));
  if (active.guided == text.size()) {
    active.finished = true;
    active.reason = trt::FinishReason::kEND_ID;
  }
}

void Batch::finished(uint64_t id, uint32_t, int32_t reason, int32_t stop_id, std::string_view) {
  Active& active = *find(id);
  active.inside = false;        // the simulated engine has let go of it
  if (active.finished) return;  // by its guide
  active.finished = true;
  active.reason = trt::FinishReason::kLENGTH;
  if (reason != IFAB_FINISH_STOP) return;
  const bool end = active.vendor->getEndId() == std::optional<trt::SizeType32>(stop_id);
  active.reason = end ? trt::FinishReason::kEND_ID : trt::FinishReason::kSTOP_WORDS;
  if (end && !engine_.semantics.end_id_in_output) return;
  active.fresh.push_back(stop_id);
  active.log_probs.push_back(0);
}

void Batch::failed(uint64_t id, const Status& status) {
  broken_.emplace_back(id, status.message());
}

}  // namespace ifab::standin
