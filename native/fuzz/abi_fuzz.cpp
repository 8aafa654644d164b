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
constexpr uint32_t kMostAtOnce = 4;  // requests of one submit
constexpr int32_t kFirstMark = 288;  // the token ids that faults lie in wait for, and two beside them
constexpr int32_t kMarks = 8;
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
  // Prompts in one piece, heads that are not kept, no sample beside the first.
  SimulatedEngine whole = small;
  whole.splits_prompts = false;
  whole.step_token_budget = kMaxPrompt;
  whole.kv_block_tokens = whole.kv_pool_blocks = 0;
  whole.samples_max = 1;
  whole.scoring = false;
  whole.step_faults = {};
  whole.request_faults = {{"no_room", "one_in", 16, 20}, {"wrong_order", "one_in", 16}};
  return {small, mining, failing, whole};
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

// A request and what it points to.
struct Drawn {
  std::array<int32_t, kMaxPrompt> prompt{};
  std::array<int32_t, kMaxStops> stops{};
  std::array<uint32_t, kMaxHeads> heads{};
  std::array<char, 8> guide{};
  ifab_request_t request{};

  void draw(Bytes& bytes) {
    if (bytes.byte() % 16 == 0) bytes.fill(&request, sizeof request);
    request.id = bytes.byte() % 32;
    // Counts may be anything: what lies beyond a limit is refused before it is looked at.
    request.token_count = bytes.number(kMaxPrompt + 2);
    prompt.fill(bytes.byte());
    switch (bytes.byte() % 8) {
      case 0:
        prompt[bytes.byte() % kMaxPrompt] = static_cast<int32_t>(bytes.number(300));
        break;
      case 1:
        prompt[0] = kFirstMark + bytes.byte() % kMarks;
        break;
      default:
        break;
    }
    request.token_ids = bytes.byte() == 255 ? nullptr : prompt.data();
    request.stop_count = bytes.byte() % 8 == 0 ? bytes.number(kMaxStops + 2) : 0;
    if (request.stop_count > 0) stops[0] = static_cast<int32_t>(bytes.number(300));
    request.stop_ids = bytes.byte() == 255 ? nullptr : stops.data();
    request.head_count = bytes.byte() % 8 == 0 ? bytes.number(3) : 0;
    if (request.head_count > 0) heads = {bytes.number(kMaxPrompt), bytes.number(kMaxPrompt)};
    request.head_ends = bytes.byte() == 255 ? nullptr : heads.data();
    request.max_tokens = bytes.number(34);
    request.samples = 1 + (bytes.byte() % 8 == 0 ? bytes.number(5) - 1 : 0);
    request.flags = bytes.byte() % 4 == 0 ? bytes.number(17) : 0;
    request.priority = static_cast<int8_t>(bytes.byte());
    request.salt = bytes.byte() % 2;
    if (bytes.byte() % 16 != 0) {
      request.sampling = {0, 1, 0, 1, 0, 0, 0, 0, bytes.byte()};
      request.guide_kind = IFAB_GUIDE_NONE;
      request.guide_size = 0;
      draw_one_wrong(bytes);
    }
    request.guide = bytes.byte() % 2 == 0 ? nullptr : guide.data();
  }

 private:
  // All but one field right, so that what is refused is refused for that one.
  void draw_one_wrong(Bytes& bytes) {
    ifab_sampling_t& sampling = request.sampling;
    switch (bytes.byte() % 32) {
      case 0:
        return bytes.fill(&sampling.temperature, sizeof sampling.temperature);
      case 1:
        return bytes.fill(&sampling.top_p, sizeof sampling.top_p);
      case 2:
        return bytes.fill(&sampling.min_p, sizeof sampling.min_p);
      case 3:
        return bytes.fill(&sampling.repetition_penalty, sizeof sampling.repetition_penalty);
      case 4:
        return bytes.fill(&sampling.presence_penalty, sizeof sampling.presence_penalty);
      case 5:
        return bytes.fill(&sampling.frequency_penalty, sizeof sampling.frequency_penalty);
      case 6:
        return bytes.fill(&sampling.top_k, sizeof sampling.top_k);
      case 7:
        sampling.reserved = bytes.byte();
        return;
      case 8:
        request.guide_size = bytes.number(static_cast<uint32_t>(guide.size()) + 1);
        return;
      case 9:
        request.guide_kind = static_cast<int32_t>(bytes.byte() % 6) - 1;
        request.guide_size = bytes.number(static_cast<uint32_t>(guide.size()) + 1);
        return bytes.fill(guide.data(), guide.size());
      default:
        return;
    }
  }
};

// Lines of the library's log are texts of a known level, whoever writes them.
void heard(void*, int32_t level, const char* component, const char* message) {
  require(level >= IFAB_LOG_DEBUG && level <= IFAB_LOG_ERROR, "a line of the log has a level");
  require(component[0] != '\0' && message[0] != '\0', "a line of the log says who and what");
}

// One engine and what its caller may rely on.
class Caller {
 public:
  explicit Caller(const std::string& directory) : directory_(directory) {
    require(ifab_engine_create(directory.c_str(), &engine_, nullptr, 0) == IFAB_OK, "a good directory loads");
  }
  ~Caller() { ifab_engine_destroy(&engine_); }
  Caller(const Caller&) = delete;
  Caller& operator=(const Caller&) = delete;

  void call(Bytes& bytes) {
    switch (bytes.byte() % 9) {
      case 0:
      case 1:
        return submit(bytes);
      case 7:
        return call_wrongly(bytes);
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
    const uint32_t count = 1 + (bytes.byte() % 4 == 0 ? bytes.byte() % kMostAtOnce : 0);
    std::array<Drawn, kMostAtOnce> drawn{};
    std::array<ifab_request_t, kMostAtOnce> requests{};
    for (uint32_t i = 0; i < count; ++i) {
      drawn[i].draw(bytes);
      requests[i] = drawn[i].request;
    }
    std::array<ifab_submit_result_t, kMostAtOnce> results{};
    std::array<char, 64> text{};
    require(ifab_engine_submit(engine_, requests.data(), count, results.data(), text.data(), text.size()) == IFAB_OK,
            "submit");
    for (uint32_t i = 0; i < count; ++i) {
      require(results[i].text_offset + results[i].text_size <= text.size(), "a message keeps to its buffer");
      submitted(requests[i], results[i].status);
    }
  }

  void submitted(const ifab_request_t& request, ifab_status_t status) {
    const bool live = live_.contains(request.id);
    if (status == IFAB_OK) {
      // The id may have come free already, with an end that this caller has not polled yet.
      if (live) superseded_[request.id].push_back(live_[request.id]);
      live_[request.id] = {std::vector<bool>(request.samples), request.samples, false};
    } else if (status == IFAB_ALREADY_EXISTS) {
      require(live, "only ids in flight are taken");
    }
  }

  // Calls that are refused, or that need no engine.
  void call_wrongly(Bytes& bytes) {
    std::array<char, 8> err{};
    const size_t err_cap = bytes.byte() % (err.size() + 1);
    ifab_poll_buffers_t buffers = whole();
    ifab_request_t request{};
    ifab_submit_result_t result{};
    uint64_t id = bytes.byte();
    uint32_t count = 0;
    size_t size = 0;
    ifab_engine_t* none = nullptr;
    ifab_status_t status = IFAB_INVALID_ARGUMENT;
    switch (bytes.byte() % 24) {
      case 0:
        status = ifab_engine_submit(nullptr, &request, 1, &result, nullptr, 0);
        break;
      case 1:
        status = ifab_engine_submit(engine_, nullptr, 1, &result, nullptr, 0);
        break;
      case 2:
        status = ifab_engine_submit(engine_, &request, 1, nullptr, nullptr, 0);
        break;
      case 3:
        require(ifab_engine_submit(engine_, &request, 1, &result, nullptr, 64) == IFAB_OK, "texts are not asked for");
        require(result.status == IFAB_INVALID_ARGUMENT && result.text_size == 0, "a request of zeros is refused");
        break;
      case 4:
        require(ifab_engine_submit(engine_, nullptr, 0, nullptr, nullptr, 0) == IFAB_OK, "submit of nothing");
        break;
      case 5:
        status = ifab_engine_poll(nullptr, &buffers, &count, 0, err.data(), err_cap);
        break;
      case 6:
        status = ifab_engine_poll(engine_, nullptr, &count, 0, err.data(), err_cap);
        break;
      case 7:
        status = ifab_engine_poll(engine_, &buffers, nullptr, 0, err.data(), err_cap);
        break;
      case 8:
        status = ifab_engine_poll(engine_, &buffers, &count, -1 - bytes.byte(), err.data(), err_cap);
        break;
      case 9:
        status = ifab_engine_cancel(nullptr, &id, 1, &count);
        break;
      case 10:
        status = ifab_engine_cancel(engine_, nullptr, 1, &count);
        break;
      case 11:
        require(ifab_engine_cancel(engine_, &id, 1, nullptr) == IFAB_OK, "the count is not asked for");
        break;
      case 12: {
        ifab_stats_t reading{};
        reading.struct_size = static_cast<uint32_t>(sizeof reading) + 1 + bytes.byte();
        status = ifab_engine_stats(engine_, &reading);
        break;
      }
      case 13:
        status = ifab_engine_stats(bytes.byte() % 2 == 0 ? nullptr : engine_, nullptr);
        break;
      case 14:
        status = ifab_engine_describe(nullptr, nullptr, 0, &size, err.data(), err_cap);
        break;
      case 15:
        status = ifab_engine_describe(engine_, nullptr, SIZE_MAX, bytes.byte() % 2 == 0 ? nullptr : &size, err.data(),
                                      err_cap);
        break;
      case 16:
        status = ifab_engine_create(nullptr, &none, err.data(), err_cap);
        break;
      case 17:
        status = ifab_engine_create(directory_.c_str(), nullptr, err.data(), err_cap);
        break;
      case 18:
        require(ifab_engine_create("no such engine", &none, err.data(), err_cap) == IFAB_NOT_FOUND && none == nullptr,
                "what is not there does not load");
        break;
      case 19:
        ifab_engine_destroy(&none);
        ifab_engine_destroy(nullptr);
        ifab_engine_wake(nullptr);
        break;
      case 20:
        require(ifab_status_name(static_cast<int8_t>(bytes.byte()))[0] != '\0', "every status has a name");
        require(ifab_struct_size(IFAB_STRUCT_STATS) == sizeof(ifab_stats_t), "structs have the header's sizes");
        require(ifab_struct_size(bytes.byte() % 8) < 2 * sizeof(ifab_stats_t), "structs are small");
        break;
      case 21:
        ifab_log_set(bytes.byte() % 2 == 0 ? nullptr : heard, nullptr, bytes.byte());
        break;
      case 22:
        return check_contract(bytes);
      default:
        return inspect(bytes);
    }
    require(status == IFAB_INVALID_ARGUMENT, "what cannot be read is refused");
    require(count == 0, "a refused call writes nothing");
    require(err_cap == 0 || std::memchr(err.data(), 0, err_cap) != nullptr, "a message ends within its buffer");
  }

  void check_contract(Bytes& bytes) {
    std::array<char, 32> text{};
    std::array<char, 512> document{};
    bytes.fill(text.data(), text.size());
    const size_t cap = 2 * size_t{bytes.byte()};
    size_t size = 0;
    const ifab_status_t status =
        ifab_contract_check(bytes.byte() % 8 == 0 ? nullptr : text.data(), bytes.byte() % (text.size() + 1),
                            document.data(), cap, &size, nullptr, 0);
    require(status == IFAB_INVALID_ARGUMENT || (status == IFAB_OK) == (size <= cap), "check says whether it fits");
  }

  void inspect(Bytes& bytes) {
    const std::string above = directory_ + "/..";
    const char* const directories[] = {nullptr, "no such engine", above.c_str(), directory_.c_str()};
    const size_t which = bytes.byte() % 4;
    std::array<char, 256> document{};
    size_t size = 0;
    const ifab_status_t status =
        ifab_engine_inspect(directories[which], document.data(), document.size(), &size, nullptr, 0);
    if (which == 0) return require(status == IFAB_INVALID_ARGUMENT, "inspect of nothing");
    require(which == 3 ? status == IFAB_OK : status == IFAB_NOT_FOUND, "inspect finds what is there");
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

  const std::string directory_;
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
  static size_t kind_of(uint8_t choice) { return choice == 255 ? 2 : choice % 4 == 1 ? 1 : choice % 4 == 2 ? 3 : 0; }
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
