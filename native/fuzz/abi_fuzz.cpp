// SPDX-License-Identifier: Apache-2.0
//
// Any bytes as a sequence of calls of the C interface, held against a model of what callers are promised. Engines are
// simulated ones in virtual time; they live on from input to input, so that what one leaves behind meets the next.
#include <array>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "ifab/engine.h"
#include "properties.h"
#include "simulated_directory.h"

namespace {

using ifab::fuzz::require;
using ifab::test::SimulatedEngine;

constexpr uint32_t kMaxPrompt = 64;
constexpr uint32_t kMaxStops = 64;
constexpr uint32_t kMaxHeads = 16;
constexpr int kMostPolls = 100'000;  // until everything has ended

std::vector<SimulatedEngine> kinds() {
  SimulatedEngine small;
  small.vocab_size = 300;
  small.max_input_tokens = kMaxPrompt;
  small.max_sequence_tokens = 96;
  small.max_output_tokens = 32;
  small.slots = 4;
  small.step_token_budget = 24;
  small.kv_block_tokens = 4;
  small.kv_pool_blocks = 40;
  small.samples_max = 4;
  small.end_one_in = 16;
  small.step_faults = {{"stall", 40, 0}, {"stall", 90, 3}};
  small.request_faults = {{"fail_request", "prompt_token", 290},
                          {"wrong_order", "prompt_token", 291},
                          {"no_room", "prompt_token", 292, 3},
                          {"stall", "prompt_token", 293, 0}};
  SimulatedEngine mining = SimulatedEngine::mining(24);
  mining.max_input_tokens = mining.max_sequence_tokens = kMaxPrompt;
  mining.slots = 8;
  mining.request_faults = {{"payload_fails", "prompt_token", 290}};
  SimulatedEngine failing = small;
  failing.step_faults = {{"throw", 25, 0}};
  return {small, mining, failing};
}

// The input, read front to back; zeros once it is used up.
class Bytes {
 public:
  Bytes(const uint8_t* data, size_t size) : data_(data), size_(size) {}
  bool empty() const { return size_ == 0; }
  uint8_t byte() {
    if (size_ == 0) return 0;
    --size_;
    return *data_++;
  }
  // Mostly small, sometimes any.
  uint32_t number(uint32_t usual) {
    const uint8_t choice = byte();
    if (choice < 240) return usual == 0 ? 0 : choice % usual;
    uint32_t any = 0;
    fill(&any, sizeof any);
    return any;
  }
  void fill(void* out, size_t size) {
    auto* bytes = static_cast<uint8_t*>(out);
    for (size_t i = 0; i < size; ++i) bytes[i] = byte();
  }

 private:
  const uint8_t* data_;
  size_t size_;
};

// One engine and what its caller may rely on.
class Caller {
 public:
  explicit Caller(const std::string& directory) {
    require(ifab_engine_create(directory.c_str(), &engine_, nullptr, 0) == IFAB_OK, "a good directory loads");
  }
  ~Caller() { ifab_engine_destroy(&engine_); }
  Caller(const Caller&) = delete;
  Caller& operator=(const Caller&) = delete;

  void call(Bytes& bytes) {
    switch (bytes.byte() % 8) {
      case 0:
      case 1:
        return submit(bytes);
      case 2:
        return cancel(bytes);
      case 3:
        return poll(bytes);
      case 4:
        return stats();
      case 5:
        return describe(bytes);
      case 6:
        return ifab_engine_wake(engine_);
      default:
        return poll_well();
    }
  }

  // Everything accepted ends; cancelled or not.
  void finish() {
    std::vector<uint64_t> ids;
    for (const auto& [id, request] : live_) ids.push_back(id);
    uint32_t in_flight = 0;
    require(ifab_engine_cancel(engine_, ids.data(), static_cast<uint32_t>(ids.size()), &in_flight) == IFAB_OK,
            "cancel");
    require(in_flight <= ids.size(), "no more are in flight than were accepted");
    for (int polls = 0; !live_.empty(); ++polls) {
      require(polls < kMostPolls, "every request ends");
      poll_well();
    }
  }

  bool failed() {
    ifab_stats_t reading{};
    reading.struct_size = sizeof reading;
    require(ifab_engine_stats(engine_, &reading) == IFAB_OK, "stats");
    return reading.engine_failed != 0;
  }

 private:
  struct Live {
    std::vector<bool> ended;
    uint32_t left = 0;
    bool context_done = false;
  };

  void submit(Bytes& bytes) {
    std::array<int32_t, kMaxPrompt> prompt{};
    std::array<int32_t, kMaxStops> stops{};
    std::array<uint32_t, kMaxHeads> heads{};
    ifab_request_t request{};
    if (bytes.byte() % 16 == 0) bytes.fill(&request, sizeof request);
    request.id = bytes.byte() % 32;
    // Counts may be anything: what lies beyond a limit is refused before it is looked at.
    request.token_count = bytes.number(kMaxPrompt + 2);
    const int32_t base = bytes.byte();
    for (int32_t& id : prompt) id = base;
    if (bytes.byte() % 4 == 0) prompt[bytes.byte() % kMaxPrompt] = static_cast<int32_t>(bytes.number(300));
    request.token_ids = bytes.byte() == 255 ? nullptr : prompt.data();
    request.stop_count = bytes.byte() % 8 == 0 ? bytes.number(kMaxStops + 2) : 0;
    if (request.stop_count > 0) stops[0] = static_cast<int32_t>(bytes.number(300));
    request.stop_ids = stops.data();
    request.head_count = bytes.byte() % 8 == 0 ? bytes.number(3) : 0;
    if (request.head_count > 0) heads[0] = bytes.number(kMaxPrompt);
    request.head_ends = heads.data();
    request.max_tokens = bytes.number(34);
    request.samples = 1 + (bytes.byte() % 8 == 0 ? bytes.number(4) : 0);
    request.flags = bytes.byte() % 4 == 0 ? bytes.number(17) : 0;
    request.priority = static_cast<int8_t>(bytes.byte());
    request.salt = bytes.byte() % 2;
    if (bytes.byte() % 16 != 0) {
      request.sampling = {0, 1, 0, 1, 0, 0, 0, 0, bytes.byte()};
      request.guide_kind = IFAB_GUIDE_NONE;
      request.guide_size = 0;
    }
    request.guide = nullptr;
    ifab_submit_result_t result{};
    std::array<char, 64> text{};
    require(ifab_engine_submit(engine_, &request, 1, &result, text.data(), text.size()) == IFAB_OK, "submit");
    require(result.text_size <= text.size(), "a message keeps to its buffer");
    const bool live = live_.contains(request.id);
    if (result.status == IFAB_OK) {
      // The id may have come free already, with an end that this caller has not polled yet.
      if (live) superseded_[request.id].push_back(live_[request.id]);
      live_[request.id] = {std::vector<bool>(request.samples), request.samples, false};
    } else if (result.status == IFAB_ALREADY_EXISTS) {
      require(live, "only ids in flight are taken");
    }
  }

  void cancel(Bytes& bytes) {
    std::array<uint64_t, 3> ids = {bytes.byte() % 32u, bytes.byte() % 32u, bytes.byte()};
    uint32_t in_flight = 0;
    require(ifab_engine_cancel(engine_, ids.data(), bytes.byte() % 4, &in_flight) == IFAB_OK, "cancel");
    require(in_flight <= 3, "cancel counts what it was given");
  }

  void poll(Bytes& bytes) {
    ifab_poll_buffers_t buffers = whole();
    if (bytes.byte() % 4 == 0) buffers.struct_size = bytes.number(128);
    buffers.events_cap = bytes.number(kEvents + 1) % (kEvents + 1);
    buffers.tokens_cap = bytes.number(kTokens + 1) % (kTokens + 1);
    buffers.payload_cap = bytes.number(kPayload + 1) % (kPayload + 1);
    buffers.text_cap = (bytes.number(8) * 128) % (kText + 1);
    if (bytes.byte() % 8 == 0) ++buffers.payload;
    poll_into(buffers, static_cast<int8_t>(bytes.byte()) % 2, false);
  }

  // Waits only for what will come.
  void poll_well() { poll_into(whole(), live_.empty() ? 0 : 1, true); }

  void poll_into(ifab_poll_buffers_t buffers, int32_t timeout_ms, bool good) {
    uint32_t count = 0;
    const ifab_status_t status = ifab_engine_poll(engine_, &buffers, &count, timeout_ms, nullptr, 0);
    require(status == IFAB_OK || (!good && status == IFAB_INVALID_ARGUMENT), "poll");
    require(count <= buffers.events_cap, "poll keeps to its buffers");
    for (uint32_t i = 0; i < count; ++i) take(events_[i], buffers);
  }

  void take(const ifab_event_t& event, const ifab_poll_buffers_t& buffers) {
    require(event.token_offset + event.token_count <= buffers.tokens_cap, "tokens keep to their buffer");
    require(event.text_offset + event.text_size <= buffers.text_cap, "texts keep to their buffer");
    require(event.payload_offset + event.payload_size <= buffers.payload_cap, "payloads keep to their buffer");
    require(event.payload_offset % 64 == 0, "payloads are aligned");
    // Ends of an id come in the order in which its requests were accepted.
    auto& before = superseded_[event.request_id];
    const bool is_before = !before.empty();
    require(is_before || live_.contains(event.request_id), "an event belongs to a request that was accepted");
    Live& live = is_before ? before.front() : live_[event.request_id];
    if (event.kind == IFAB_EVENT_CONTEXT_DONE) {
      require(!live.context_done, "a context is done once");
      live.context_done = true;
      return;
    }
    if (event.kind == IFAB_EVENT_FAILED) return end(event.request_id, is_before);
    require(event.sample < live.ended.size() && !live.ended[event.sample], "an event belongs to a sample that lives");
    if (event.kind == IFAB_EVENT_TOKENS) return require(live.context_done, "tokens come after the context");
    require(event.kind == IFAB_EVENT_FINISHED, "there are four kinds of event");
    live.ended[event.sample] = true;
    if (--live.left == 0) end(event.request_id, is_before);
  }

  void end(uint64_t id, bool is_before) {
    if (is_before) {
      superseded_[id].erase(superseded_[id].begin());
    } else {
      live_.erase(id);
    }
  }

  void stats() {
    ifab_stats_t reading{};
    reading.struct_size = sizeof reading;
    require(ifab_engine_stats(engine_, &reading) == IFAB_OK, "stats");
    const uint64_t ended = reading.requests_finished + reading.requests_failed + reading.requests_cancelled;
    require(ended + reading.queued <= reading.requests_submitted, "requests are counted once");
    require(reading.progress_tick >= tick_, "progress does not go back");
    tick_ = reading.progress_tick;
  }

  void describe(Bytes& bytes) {
    std::array<char, 256> buffer{};
    size_t size = 0;
    const size_t cap = bytes.byte();
    const ifab_status_t status = ifab_engine_describe(engine_, buffer.data(), cap, &size, nullptr, 0);
    require(status == (size <= cap ? IFAB_OK : IFAB_OUT_OF_RANGE), "describe says whether its document fits");
  }

  ifab_poll_buffers_t whole() {
    return {sizeof(ifab_poll_buffers_t),
            events_.data(),
            tokens_.data(),
            logprobs_.data(),
            payload_.data(),
            text_.data(),
            kEvents,
            kTokens,
            kPayload,
            kText};
  }

  static constexpr uint32_t kEvents = 16;
  static constexpr uint32_t kTokens = 128;
  static constexpr uint32_t kPayload = 256;
  static constexpr uint32_t kText = 1024;

  ifab_engine_t* engine_ = nullptr;
  std::map<uint64_t, Live> live_;
  std::map<uint64_t, std::vector<Live>> superseded_;
  uint64_t tick_ = 0;
  std::array<ifab_event_t, kEvents> events_{};
  std::array<int32_t, kTokens> tokens_{};
  std::array<float, kTokens> logprobs_{};
  alignas(64) std::array<uint8_t, kPayload + 64> payload_{};
  std::array<char, kText> text_{};
};

// The engines, one a kind; made anew when one has failed, or when an input asks for it.
class Engines {
 public:
  Engines() {
    for (const SimulatedEngine& kind : kinds()) {
      const std::filesystem::path path = directory_.path() / std::to_string(callers_.size());
      ifab::test::write_simulated_directory(path, kind);
      paths_.push_back(path.string());
      callers_.push_back(nullptr);
    }
  }
  // Making an engine costs more than a hundred calls, so the one that fails soon is asked for seldom.
  static size_t kind_of(uint8_t choice) { return choice == 255 ? 2 : choice % 3 == 0 ? 1 : 0; }
  Caller& of(size_t kind) {
    if (callers_[kind] == nullptr) callers_[kind] = std::make_unique<Caller>(paths_[kind]);
    return *callers_[kind];
  }
  void end(size_t kind) { callers_[kind] = nullptr; }

 private:
  ifab::test::TemporaryDirectory directory_;
  std::vector<std::string> paths_;
  std::vector<std::unique_ptr<Caller>> callers_;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static Engines engines;
  Bytes bytes(data, size);
  const uint8_t choice = bytes.byte();
  const size_t kind = Engines::kind_of(choice);
  Caller& caller = engines.of(kind);
  while (!bytes.empty()) caller.call(bytes);
  if (choice == 254) return engines.end(kind), 0;  // with whatever is in flight
  caller.finish();
  if (caller.failed()) engines.end(kind);
  return 0;
}
