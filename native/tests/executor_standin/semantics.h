// SPDX-License-Identifier: Apache-2.0
//
// How the stand-in behaves where the vendor's Executor is awkward, one switch a fact. All true is what is known of the
// vendor's release 1.2; tests turn one at a time, and each turned switch has to make a test fail. Below them are the
// ways in which releases differ or nobody knows: the backend has to do right with either. What the stand-in does beside
// these is plain.
#pragma once

#include <array>
#include <string_view>

namespace ifab::standin {

struct Semantics {
  // Construction.
  bool plugins_come_first = true;               // an Executor without registered plugins does not find its engine's
  bool world_must_match = true;                 // one rank of MPI for each card, for one card too
  bool batch_beyond_engine_throws = true;       // more sequences than the engine was built for
  bool budget_beyond_engine_is_ignored = true;  // with a warning in a log
  bool pool_has_max_tokens = true;
  bool paged_attention_needs_onboarding = true;
  bool padded_engines_are_refused = true;       // and those with a continuous cache
  bool reuse_needs_paged_attention = true;      // else it is switched off, with a warning in a log
  bool context_logits_switch_reuse_off = true;  // likewise
  bool outputs_need_dynamic_rows = true;
  bool setters_check_values = true;   // of a configuration: no 0 sink tokens, no whole share of the memory
  bool llguidance_is_refused = true;  // which the interface names

  // Taking requests.
  bool validates_in_the_loop = true;        // a wrong request is accepted, and answered with an error later
  bool guides_need_configuration = true;    // and that is an error of the request too
  bool guides_are_read_in_the_pass = true;  // that begins their request, so that a wrong one fails everybody
  bool queue_limit_throws = true;           // enqueueRequest() throws where the queue is full
  bool samples_count_in_the_queue = true;
  bool enqueue_throws_after_shutdown = true;
  bool longest_prompt_leaves_a_token = true;  // of the longest sequence
  bool whole_prompts_fit_a_pass = true;       // where they are not computed in chunks
  bool long_outputs_are_cut = true;           // at the longest sequence, with a warning
  bool output_has_input = true;               // without streaming, unless it is excluded
  bool end_unset_runs_on = true;              // no end id: nothing but stop words and length ends a sequence
  bool seed_unset_is_zero = true;             // requests without a seed all draw the same
  bool salts_part_reuse = true;

  // The batch.
  bool takes_at_most_a_batch = true;              // active sequences; the others wait in the queue
  bool priority_goes_beyond_a_batch = true;       // what is more urgent than the least urgent active one
  bool priority_goes_first = true;                // out of the queue
  bool holds_back_followers = true;               // while somebody computes the block that they would share
  bool first_blocks_others = true;                // whose need does not fit, even if later ones would
  bool no_room_is_no_error = true;                // maximum utilisation, nothing fits: an iteration that does nothing
  bool utilisation_asks_for_prompts_only = true;  // so that sequences may run out of room
  bool idle_does_nothing = true;                  // no iteration, and so no statistics, without a request
  bool forward_fails_everybody = true;            // an exception in a pass ends all active requests
  bool forward_goes_on = true;                    // and the loop with the next ones
  bool misspelt_output_fails_everybody = true;    // a name that the engine does not have, at the first pass
  bool rows_are_counted = true;  // of outputs, in every pass: those of each token, or of each sequence, as asked for

  // Answers and ends.
  bool cancel_reaches_active_only = true;  // what is queued stays until it is active
  bool cancelled_has_no_tokens = true;
  bool cancel_comes_after_a_pass = true;  // of what has just become active
  bool cancel_ends_every_sample = true;
  bool cancelling_log_probs_aborts = true;  // a request that streams them: the process ends
  bool log_probs_are_cumulative = true;     // every streamed answer carries those of all tokens so far
  bool log_probs_are_asked_for = true;
  bool metrics_are_asked_for = true;
  bool outputs_are_asked_for_twice = true;  // by the request, and by the configuration before
  bool streams_have_no_input = true;        // whatever was excluded
  bool siblings_fail_under_own_ids = true;  // samples of a request, when a pass fails: ids that nobody was told
  bool statistics_are_drained = true;       // each iteration is told once
  bool statistics_are_bounded = true;       // to as many as were asked for, the oldest go
  bool statistics_say_how_long = true;
  bool shutdown_waits = true;  // until what is active has ended
  bool awaits_throw_after_shutdown = true;

  // Not known, or different between releases.
  bool end_id_in_output = false;          // like a stop word
  bool outputs_say_their_phase = true;    // "generation_NAME"
  bool outputs_with_first_answer = true;  // else with the last one only
  bool outputs_on_card = false;
  bool reasons_are_given = true;  // else kNOT_FINISHED throughout
  bool accepts_engines_without_cache = true;
  bool accepts_paged_attention_without_cache = true;
};

struct Switch {
  std::string_view name;
  bool Semantics::* value;
};

// The facts, in the order above; what is not known is not among them.
inline constexpr std::array kFacts = {
    Switch{"plugins_come_first", &Semantics::plugins_come_first},
    Switch{"world_must_match", &Semantics::world_must_match},
    Switch{"batch_beyond_engine_throws", &Semantics::batch_beyond_engine_throws},
    Switch{"budget_beyond_engine_is_ignored", &Semantics::budget_beyond_engine_is_ignored},
    Switch{"pool_has_max_tokens", &Semantics::pool_has_max_tokens},
    Switch{"paged_attention_needs_onboarding", &Semantics::paged_attention_needs_onboarding},
    Switch{"padded_engines_are_refused", &Semantics::padded_engines_are_refused},
    Switch{"reuse_needs_paged_attention", &Semantics::reuse_needs_paged_attention},
    Switch{"context_logits_switch_reuse_off", &Semantics::context_logits_switch_reuse_off},
    Switch{"outputs_need_dynamic_rows", &Semantics::outputs_need_dynamic_rows},
    Switch{"setters_check_values", &Semantics::setters_check_values},
    Switch{"llguidance_is_refused", &Semantics::llguidance_is_refused},
    Switch{"validates_in_the_loop", &Semantics::validates_in_the_loop},
    Switch{"guides_need_configuration", &Semantics::guides_need_configuration},
    Switch{"guides_are_read_in_the_pass", &Semantics::guides_are_read_in_the_pass},
    Switch{"queue_limit_throws", &Semantics::queue_limit_throws},
    Switch{"samples_count_in_the_queue", &Semantics::samples_count_in_the_queue},
    Switch{"enqueue_throws_after_shutdown", &Semantics::enqueue_throws_after_shutdown},
    Switch{"longest_prompt_leaves_a_token", &Semantics::longest_prompt_leaves_a_token},
    Switch{"whole_prompts_fit_a_pass", &Semantics::whole_prompts_fit_a_pass},
    Switch{"long_outputs_are_cut", &Semantics::long_outputs_are_cut},
    Switch{"output_has_input", &Semantics::output_has_input},
    Switch{"end_unset_runs_on", &Semantics::end_unset_runs_on},
    Switch{"seed_unset_is_zero", &Semantics::seed_unset_is_zero},
    Switch{"salts_part_reuse", &Semantics::salts_part_reuse},
    Switch{"takes_at_most_a_batch", &Semantics::takes_at_most_a_batch},
    Switch{"priority_goes_beyond_a_batch", &Semantics::priority_goes_beyond_a_batch},
    Switch{"priority_goes_first", &Semantics::priority_goes_first},
    Switch{"holds_back_followers", &Semantics::holds_back_followers},
    Switch{"first_blocks_others", &Semantics::first_blocks_others},
    Switch{"no_room_is_no_error", &Semantics::no_room_is_no_error},
    Switch{"utilisation_asks_for_prompts_only", &Semantics::utilisation_asks_for_prompts_only},
    Switch{"idle_does_nothing", &Semantics::idle_does_nothing},
    Switch{"forward_fails_everybody", &Semantics::forward_fails_everybody},
    Switch{"forward_goes_on", &Semantics::forward_goes_on},
    Switch{"misspelt_output_fails_everybody", &Semantics::misspelt_output_fails_everybody},
    Switch{"rows_are_counted", &Semantics::rows_are_counted},
    Switch{"cancel_reaches_active_only", &Semantics::cancel_reaches_active_only},
    Switch{"cancelled_has_no_tokens", &Semantics::cancelled_has_no_tokens},
    Switch{"cancel_comes_after_a_pass", &Semantics::cancel_comes_after_a_pass},
    Switch{"cancel_ends_every_sample", &Semantics::cancel_ends_every_sample},
    Switch{"cancelling_log_probs_aborts", &Semantics::cancelling_log_probs_aborts},
    Switch{"log_probs_are_cumulative", &Semantics::log_probs_are_cumulative},
    Switch{"log_probs_are_asked_for", &Semantics::log_probs_are_asked_for},
    Switch{"metrics_are_asked_for", &Semantics::metrics_are_asked_for},
    Switch{"outputs_are_asked_for_twice", &Semantics::outputs_are_asked_for_twice},
    Switch{"streams_have_no_input", &Semantics::streams_have_no_input},
    Switch{"siblings_fail_under_own_ids", &Semantics::siblings_fail_under_own_ids},
    Switch{"statistics_are_drained", &Semantics::statistics_are_drained},
    Switch{"statistics_are_bounded", &Semantics::statistics_are_bounded},
    Switch{"statistics_say_how_long", &Semantics::statistics_say_how_long},
    Switch{"shutdown_waits", &Semantics::shutdown_waits},
    Switch{"awaits_throw_after_shutdown", &Semantics::awaits_throw_after_shutdown},
};

// What is not known, in the order above.
inline constexpr std::array kUnknown = {
    Switch{"end_id_in_output", &Semantics::end_id_in_output},
    Switch{"outputs_say_their_phase", &Semantics::outputs_say_their_phase},
    Switch{"outputs_with_first_answer", &Semantics::outputs_with_first_answer},
    Switch{"outputs_on_card", &Semantics::outputs_on_card},
    Switch{"reasons_are_given", &Semantics::reasons_are_given},
    Switch{"accepts_engines_without_cache", &Semantics::accepts_engines_without_cache},
    Switch{"accepts_paged_attention_without_cache", &Semantics::accepts_paged_attention_without_cache},
};

static_assert(sizeof(Semantics) == kFacts.size() + kUnknown.size(), "a switch is in neither list");

}  // namespace ifab::standin
