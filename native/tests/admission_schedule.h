// SPDX-License-Identifier: Apache-2.0
//
// One random schedule run against Admission and the simulated backend, without threads, with every property of
// Admission checked at every step by a second opinion that shares no code with it.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "admission.h"
#include "admission_plan.h"
#include "formula.h"
#include "simulated.h"

namespace ifab::test {

// What a schedule came by, and the first property that did not hold.
struct ScheduleReport {
  bool no_room = false;
  bool stalled = false;
  bool progress_only = false;
  bool cancelled = false;
  bool leader_wait = false;
  uint64_t requests = 0;
  uint64_t steps = 0;
  uint64_t tokens = 0;
  std::string broken;
};

// The bounds that the rules promise, written down a second time.
struct Promised {
  static constexpr uint32_t kRetries = 4;
  static constexpr uint32_t kStalledSteps = 4;
  static constexpr uint32_t kPasses = 32;
  static constexpr uint32_t kLeaderWaits = 512;
  static constexpr uint32_t kLanes = 3;
  static constexpr uint32_t kStandstill = 64;      // steps in which nothing moves, faults that last included
  static constexpr uint64_t kMostSteps = 100'000;  // of a whole schedule
};

template <class Rules>
class Schedule final : private Sink {
 public:
  explicit Schedule(Plan plan)
      : plan_(std::move(plan)),
        backend_(plan_.config),
        admission_(backend_.facts()),
        random_(plan_.config.seed),
        payload_slots_(plan_.payload_slots),
        states_(plan_.requests.size()) {
    for (size_t i = 0; i < states_.size(); ++i) states_[i].waiting.request = &plan_.requests[i];
    report_.requests = states_.size();
  }

  ScheduleReport run() {
    while (ended_ < states_.size() && report_.broken.empty()) {
      arrive();
      cancel_some();
      read_some();
      admit();
      step();
      if (report_.steps > Promised::kMostSteps) broken("not every request ends");
    }
    if (report_.broken.empty()) check_all_given_back();
    report_.leader_wait = admission_.leader_waits() > 0;
    return report_;
  }

 private:
  enum class Where : uint8_t { kToCome, kWaiting, kInside, kEnded };
  struct State {
    Waiting waiting;
    Where where = Where::kToCome;
    bool context_done = false;
    uint32_t samples_left = 0;
    uint32_t leader_waits = 0;  // before this round
    std::array<uint32_t, 4> generated{};
    std::array<uint64_t, 4> keys{};
    bool has_payload_slot = false;
  };

  State& state_of(uint64_t id) { return states_[id - 1]; }
  const Request& request_of(const State& state) const { return *state.waiting.request; }
  size_t lane_of(const State& state) const { return static_cast<size_t>(request_of(state).priority + 1); }
  bool marked(const State& state, int32_t mark) const {
    const std::vector<int32_t>& prompt = request_of(state).prompt;
    return std::find(prompt.begin(), prompt.end(), mark) != prompt.end();
  }
  void broken(std::string what) {
    if (report_.broken.empty()) report_.broken = std::move(what);
  }

  // ---- what happens between steps ----

  void arrive() {
    const bool idle = admission_.waiting() == 0 && admission_.inside() == 0;
    for (uint32_t n = random_.between(idle ? 1 : 0, plan_.arrivals_most); n > 0 && come_ < states_.size(); --n) {
      State& state = states_[come_++];
      if (!anybody_waits(lane_of(state))) passes_[lane_of(state)] = passes_in_all_[lane_of(state)] = 0;
      state.where = Where::kWaiting;
      state.samples_left = request_of(state).samples;
      admission_.enqueue(state.waiting);
    }
  }

  void cancel_some() {
    if (plan_.cancel_one_in == 0 || come_ == 0 || !random_.one_in(plan_.cancel_one_in)) return;
    State& state = states_[random_.between(0, static_cast<uint32_t>(come_) - 1)];
    if (state.where == Where::kWaiting) {
      admission_.withdraw(state.waiting);
    } else if (state.where == Where::kInside) {
      backend_.cancel(request_of(state).id);
      admission_.left();
    } else {
      return;
    }
    report_.cancelled = true;
    end(state);
    if (admission_.waiting() == 0) normal_no_room_ = 0;
  }

  void end(State& state) {
    state.where = Where::kEnded;
    ++ended_;
    if (state.has_payload_slot) ++unread_payloads_;
    state.has_payload_slot = false;
    moved_ = true;
  }

  // The reader gives payload slots back when it likes, but not never.
  void read_some() {
    if (unread_payloads_ == 0 || random_.one_in(3)) return;
    payload_slots_ += unread_payloads_;
    unread_payloads_ = 0;
    moved_ = true;
  }

  void admit() {
    const uint64_t retries = admission_.retries();
    admitted_ = 0;
    for (size_t i = 0; i < come_; ++i) states_[i].leader_waits = states_[i].waiting.leader_waits;
    admission_.begin_round();
    for (;;) {
      const Decision decision =
          admission_.next(backend_, {.payload_slots = payload_slots_, .prompt_scores = UINT32_MAX});
      if (decision.kind == Decision::Kind::kNone) break;
      State& state = state_of(decision.waiting->request->id);
      if (decision.kind == Decision::Kind::kFailed) {
        if (!marked(state, Plan::kNoRoomForLong)) broken("a request failed that the batcher would have taken");
        end(state);
        normal_no_room_ = 0;
        continue;
      }
      check_order(state);
      state.where = Where::kInside;
      ++admitted_;
      moved_ = true;
      if (request_of(state).want_payload) {
        if (payload_slots_ == 0) return broken("a request entered without room for its payload");
        --payload_slots_;
        state.has_payload_slot = true;
      }
    }
    put_off_ = admission_.retries() > retries;
    report_.no_room = report_.no_room || put_off_;
  }

  // Called with `entered` inside already: who else should have been first?
  void check_order(const State& entered) {
    const size_t lane = lane_of(entered);
    for (size_t i = 0; i < come_; ++i) {
      State& other = states_[i];
      if (other.where != Where::kWaiting || &other == &entered) continue;
      const bool older = i < static_cast<size_t>(&entered - states_.data());
      if (lane_of(other) == lane ? !older : lane_of(other) < lane) continue;
      if (waits_for_leader(other)) continue;
      if (lane_of(other) == lane) return broken("a request passed an older one of its priority");
      if (passes_in_all_[lane] < Promised::kPasses) return broken("a request passed one of higher priority");
    }
    passes_[lane] = passes_in_all_[lane] = 0;
    for (size_t below = 0; below < lane; ++below) {
      if (anybody_waits(below)) ++passes_in_all_[below];
      if (!lane_waits_in_earnest(below)) continue;
      if (++passes_[below] > Promised::kPasses + Promised::kLanes) return broken("a priority starves");
    }
  }

  // Whether it was put off because of a leader in this round.
  static bool waits_for_leader(const State& state) { return state.waiting.leader_waits > state.leader_waits; }

  bool anybody_waits(size_t lane) const {
    return std::any_of(states_.begin(), states_.begin() + static_cast<ptrdiff_t>(come_),
                       [&](const State& state) { return state.where == Where::kWaiting && lane_of(state) == lane; });
  }

  // Whether somebody of that priority waits for its turn and nothing else.
  bool lane_waits_in_earnest(size_t lane) {
    for (size_t i = 0; i < come_; ++i) {
      const State& state = states_[i];
      if (state.where != Where::kWaiting || lane_of(state) != lane) continue;
      if (!waits_for_leader(state)) return true;
    }
    passes_[lane] = 0;
    return false;
  }

  void step() {
    const StepMode mode = admission_.mode();
    const bool anybody = admission_.inside() > 0;
    const StepReport step = backend_.step(mode, *this);
    ++report_.steps;
    report_.tokens += step.generated_tokens;
    while (left_ > 0) {
      admission_.left();
      --left_;
    }
    if (contexts_done_ > 0) admission_.context_done();
    contexts_done_ = 0;
    admission_.stepped(step);
    check_step(step, mode, anybody);
  }

  void check_step(const StepReport& step, StepMode mode, bool anybody) {
    const bool progress_only = mode == StepMode::kProgressOnly;
    report_.progress_only = report_.progress_only || progress_only;
    if (step.prompt_tokens + step.generated_tokens > backend_.facts().step_token_budget) {
      broken("a step exceeds the budget");
    }
    if (progress_only && admitted_ > 0) broken("a request entered before a progress-only step");
    if (anybody && !step.progressed) {
      report_.stalled = true;
      if (progress_only && !plan_.counted_stalls) broken("a progress-only step moved nothing");
    }
    normal_still_ = progress_only || step.progressed || !anybody ? 0 : normal_still_ + 1;
    if (normal_still_ > Promised::kStalledSteps) broken("stalled, and steps stay normal");
    normal_no_room_ = progress_only || admitted_ > 0 || !put_off_ ? 0 : normal_no_room_ + 1;
    if (normal_no_room_ > Promised::kRetries) broken("no room, and steps stay normal");
    const Room room = backend_.room();
    if (room.promised > room.blocks) broken("the pool is overcommitted");
    standstill_ = moved_ || step.progressed ? 0 : standstill_ + 1;
    moved_ = false;
    if (standstill_ > Promised::kStandstill) broken("nothing moves any more");
  }

  void check_all_given_back() {
    const Room room = backend_.room();
    if (room.slots != backend_.facts().slots) broken("slots were not given back");
    if (room.blocks != backend_.facts().kv_pool_blocks || room.promised != 0) broken("blocks were not given back");
    if (admission_.inside() != 0 || admission_.waiting() != 0) broken("Admission counts requests that have ended");
    if (room.step_tokens != 0) broken("an empty batcher has tokens to compute");
  }

  // ---- what the backend tells ----

  State* inside(uint64_t id) {
    State& state = state_of(id);
    if (state.where == Where::kInside) return &state;
    broken("an event of a request that is not inside");
    return nullptr;
  }

  void prompt_computed(uint64_t, uint32_t) override {}

  void context_done(uint64_t id, uint32_t cached, uint32_t computed, std::span<const float>) override {
    State* state = inside(id);
    if (state == nullptr) return;
    ++contexts_done_;
    state->context_done = true;
    const Request& request = request_of(*state);
    if (cached + computed != request.prompt.size()) broken("prompt tokens were lost");
    uint64_t chain = simulated::chain_start(plan_.config.seed);
    for (const int32_t token : request.prompt) chain = simulated::chain_next(chain, token);
    for (uint32_t sample = 0; sample < request.samples; ++sample) {
      state->keys[sample] = simulated::sample_key(chain, request.sampling.seed, sample);
    }
  }

  void tokens(uint64_t id, uint32_t sample, std::span<const int32_t> tokens, std::span<const float>) override {
    State* state = inside(id);
    if (state == nullptr) return;
    for (const int32_t token : tokens) {
      if (token != expected(*state, sample)) broken("a token that the prompt does not give");
      ++state->generated[sample];
    }
  }

  int32_t expected(const State& state, uint32_t sample) const {
    return simulated::token_of(simulated::token_word(state.keys[sample], state.generated[sample]),
                               plan_.config.vocab_size, plan_.config.end_ids, plan_.config.end_one_in);
  }

  uint8_t* payload(uint64_t) override { return nullptr; }

  void finished(uint64_t id, uint32_t sample, int32_t reason, int32_t stop_id, std::string_view) override {
    State* state = inside(id);
    if (state == nullptr) return;
    if (reason == IFAB_FINISH_STOP && stop_id != expected(*state, sample))
      broken("a stop that the prompt does not give");
    if (--state->samples_left > 0) return;
    end(*state);
    ++left_;
  }

  void failed(uint64_t, const Status&) override { broken("the batcher failed a request"); }

  // The backend, with every admission checked before it happens.
  class Audited final : public Backend {
   public:
    explicit Audited(const simulated::Config& config) : inner_(config) {}
    const EngineFacts& facts() const override { return inner_.facts(); }
    Room room() const override { return inner_.room(); }
    Need need(const Request& request) const override { return inner_.need(request); }
    AdmitResult admit(const Request& request) override {
      const Room room = inner_.room();
      const Need need = inner_.need(request);
      const uint32_t budget = facts().step_token_budget;
      if (need.slots > room.slots) owner->broken("a request enters without slots");
      if (need.blocks + room.promised > room.blocks) owner->broken("a request enters without blocks");
      if (facts().splits_prompts ? room.step_tokens >= budget : room.step_tokens + need.prompt_tokens > budget) {
        owner->broken("a request enters beyond the step budget");
      }
      const uint32_t waited = owner->state_of(request.id).waiting.leader_waits;
      if (owner->admission_.inside() > 0 && need.leader_computes && waited < Promised::kLeaderWaits) {
        owner->broken("a follower enters while its leader computes");
      }
      if (waited > Promised::kLeaderWaits) owner->broken("a follower waits too long for its leader");
      return inner_.admit(request);
    }
    StepReport step(StepMode mode, Sink& sink) override { return inner_.step(mode, sink); }
    void cancel(uint64_t id) override { inner_.cancel(id); }
    uint64_t kv_blocks_used() const override { return inner_.kv_blocks_used(); }

    Schedule* owner = nullptr;

   private:
    simulated::SimulatedBackend inner_;
  };

  const Plan plan_;
  Audited backend_;
  BasicAdmission<Rules> admission_;
  Random random_;
  uint32_t payload_slots_;
  uint32_t unread_payloads_ = 0;
  std::vector<State> states_;
  size_t come_ = 0;
  size_t ended_ = 0;
  uint32_t left_ = 0;           // the batcher, in the step that runs
  uint32_t contexts_done_ = 0;  // in the step that runs
  uint32_t admitted_ = 0;       // before it
  bool put_off_ = false;        // somebody, before it
  bool moved_ = false;          // something, since the last step
  // Since one of the lane entered: of all that passed it, which give it the right to pass in turn, and of those that
  // passed while it waited for its turn and nothing else, which are bounded.
  std::array<uint32_t, Promised::kLanes> passes_in_all_{};
  std::array<uint32_t, Promised::kLanes> passes_{};
  uint32_t normal_still_ = 0;
  uint32_t normal_no_room_ = 0;
  uint32_t standstill_ = 0;
  ScheduleReport report_;

 public:
  // Set apart since the audit needs the finished object.
  static ScheduleReport of(uint64_t seed) {
    Schedule schedule(Plan::of(seed));
    schedule.backend_.owner = &schedule;
    return schedule.run();
  }
};

}  // namespace ifab::test
