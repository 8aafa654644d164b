// SPDX-License-Identifier: Apache-2.0
#include "validate.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstring>
#include <string>
#include <string_view>

#include "admission.h"

namespace ifab {
namespace {

constexpr uint32_t kMaxStopIds = 64;
constexpr uint32_t kMaxHeads = 16;
constexpr uint64_t kMaxGuideBytes = uint64_t{1} << 20;
constexpr uint32_t kKnownFlags =
    IFAB_REQUEST_IGNORE_END | IFAB_REQUEST_LOGPROBS | IFAB_REQUEST_PROMPT_LOGPROBS | IFAB_REQUEST_NO_PAYLOAD;

Status invalid(std::string_view field, const std::string& text) {
  return {IFAB_INVALID_ARGUMENT, std::string(field) + ": " + text};
}

Status unimplemented(std::string_view field, const std::string& text) {
  return {IFAB_UNIMPLEMENTED, std::string(field) + ": " + text};
}

std::string text_of(double value) {
  char buffer[32];
  const auto end = std::to_chars(buffer, buffer + sizeof buffer, value);
  return {buffer, end.ptr};
}

using Lanes = uint32_t __attribute__((vector_size(16)));
constexpr uint32_t kLanes = sizeof(Lanes) / sizeof(uint32_t);

// The top bit is set exactly where the id is outside of the vocabulary, whose last id is `last`.
template <class T>
T outside(T id, T last) {
  return id | (last - id);
}

// Whether any id is outside of the vocabulary. Prompts are long and every one of their ids is looked at: lanes by hand,
// since compilers leave the plain loop as it is at -O2, and it costs seven times as much.
bool any_outside(const int32_t* ids, uint32_t count, uint32_t vocab_size) {
  const uint32_t last = vocab_size - 1;
  Lanes even{};
  Lanes odd{};
  uint32_t i = 0;
  for (; count - i >= 2 * kLanes; i += 2 * kLanes) {
    Lanes pair[2];
    std::memcpy(pair, ids + i, sizeof pair);
    even |= outside(pair[0], Lanes{} + last);
    odd |= outside(pair[1], Lanes{} + last);
  }
  uint32_t bits = 0;
  for (uint32_t lane = 0; lane < kLanes; ++lane) bits |= even[lane] | odd[lane];
  for (; i < count; ++i) bits |= outside(static_cast<uint32_t>(ids[i]), last);
  return (bits >> 31) != 0;
}

// Names the first id outside of the vocabulary.
Status check_ids(std::string_view field, const int32_t* ids, uint32_t count, uint32_t vocab_size) {
  if (!any_outside(ids, count, vocab_size)) return {};
  const auto* bad = std::find_if(ids, ids + count, [&](int32_t id) { return static_cast<uint32_t>(id) >= vocab_size; });
  return invalid(std::string(field) + "[" + std::to_string(bad - ids) + "]",
                 std::to_string(*bad) + ", expected 0 to " + std::to_string(vocab_size - 1));
}

Status check_prompt(const ifab_request_t& raw, const ContractValues& contract) {
  const uint32_t limit = contract.limits.max_input_tokens;
  if (raw.token_count == 0 || raw.token_count > limit) {
    return invalid("token_ids", std::to_string(raw.token_count) + " tokens, expected 1 to " + std::to_string(limit));
  }
  if (raw.token_ids == nullptr) return invalid("token_ids", "NULL with a count");
  return check_ids("token_ids", raw.token_ids, raw.token_count, contract.model.vocab_size);
}

Status check_lengths(const ifab_request_t& raw, const ContractValues& contract) {
  const ContractValues::Limits& limits = contract.limits;
  const uint32_t least = limits.max_output_tokens == 0 ? 0 : 1;
  if (raw.max_tokens < least || raw.max_tokens > limits.max_output_tokens) {
    const std::string expected = limits.max_output_tokens == 0 ? "0: the engine generates nothing"
                                                               : "1 to " + std::to_string(limits.max_output_tokens);
    return invalid("max_tokens", std::to_string(raw.max_tokens) + ", expected " + expected);
  }
  if (uint64_t{raw.token_count} + raw.max_tokens > limits.max_sequence_tokens) {
    return invalid("max_tokens", std::to_string(raw.max_tokens) + ", with " + std::to_string(raw.token_count) +
                                     " prompt tokens expected at most " + std::to_string(limits.max_sequence_tokens) +
                                     " together");
  }
  const uint32_t samples_max = limits.max_output_tokens == 0 ? 1 : contract.capabilities.samples_max;
  if (raw.samples == 0 || (raw.samples > samples_max && samples_max > 1)) {
    return invalid("samples", std::to_string(raw.samples) + ", expected 1 to " + std::to_string(samples_max));
  }
  if (raw.samples > samples_max) {
    return unimplemented("samples", std::to_string(raw.samples) + ", and the engine makes one sample of a prompt");
  }
  if (raw.priority < kLowestPriority || raw.priority > kHighestPriority) {
    return invalid("priority", std::to_string(raw.priority) + ", expected " + std::to_string(kLowestPriority) + " to " +
                                   std::to_string(kHighestPriority));
  }
  return {};
}

Status check_stops(const ifab_request_t& raw, const ContractValues& contract) {
  if (raw.stop_count > kMaxStopIds) {
    return invalid("stop_ids",
                   std::to_string(raw.stop_count) + " ids, expected at most " + std::to_string(kMaxStopIds));
  }
  if (raw.stop_count > 0 && raw.stop_ids == nullptr) return invalid("stop_ids", "NULL with a count");
  return check_ids("stop_ids", raw.stop_ids, raw.stop_count, contract.model.vocab_size);
}

Status check_heads(const ifab_request_t& raw) {
  if (raw.head_count > kMaxHeads) {
    return invalid("head_ends",
                   std::to_string(raw.head_count) + " heads, expected at most " + std::to_string(kMaxHeads));
  }
  if (raw.head_count > 0 && raw.head_ends == nullptr) return invalid("head_ends", "NULL with a count");
  uint32_t before = 0;
  for (uint32_t i = 0; i < raw.head_count; ++i) {
    if (raw.head_ends[i] <= before || raw.head_ends[i] >= raw.token_count) {
      return invalid("head_ends[" + std::to_string(i) + "]",
                     std::to_string(raw.head_ends[i]) + ", expected ascending lengths above 0 and below token_count, " +
                         std::to_string(raw.token_count));
    }
    before = raw.head_ends[i];
  }
  return {};
}

struct Range {
  const char* field;
  float value;
  float low;
  float high;
  bool low_excluded;
};

Status check_sampling(const ifab_sampling_t& sampling) {
  const Range ranges[] = {
      {"sampling.temperature", sampling.temperature, 0, 100, false},
      {"sampling.top_p", sampling.top_p, 0, 1, true},
      {"sampling.min_p", sampling.min_p, 0, 1, false},
      {"sampling.repetition_penalty", sampling.repetition_penalty, 0, 10, true},
      {"sampling.presence_penalty", sampling.presence_penalty, -2, 2, false},
      {"sampling.frequency_penalty", sampling.frequency_penalty, -2, 2, false},
  };
  for (const Range& range : ranges) {
    const bool above = range.low_excluded ? range.value > range.low : range.value >= range.low;
    if (above && range.value <= range.high) continue;  // false for NaN
    return invalid(range.field, text_of(range.value) + ", expected " + (range.low_excluded ? "above " : "") +
                                    text_of(range.low) + " to " + text_of(range.high));
  }
  if (sampling.top_k < 0) return invalid("sampling.top_k", std::to_string(sampling.top_k) + ", expected 0 or more");
  if (sampling.reserved != 0) {
    return invalid("sampling.reserved", std::to_string(sampling.reserved) + ", expected 0");
  }
  return {};
}

Status check_flags(const ifab_request_t& raw, const ContractValues& contract) {
  if ((raw.flags & ~kKnownFlags) != 0) {
    return invalid("flags", std::to_string(raw.flags) + ", expected bits of " + std::to_string(kKnownFlags));
  }
  if ((raw.flags & IFAB_REQUEST_PROMPT_LOGPROBS) != 0 && !contract.capabilities.scoring) {
    return unimplemented("flags", "PROMPT_LOGPROBS, and the engine does not score prompts");
  }
  if ((raw.flags & IFAB_REQUEST_LOGPROBS) != 0 && contract.limits.max_output_tokens == 0) {
    return unimplemented("flags", "LOGPROBS, and the engine generates nothing");
  }
  return {};
}

const char* guide_name(int32_t kind) {
  switch (kind) {
    case IFAB_GUIDE_JSON_SCHEMA:
      return "json_schema";
    case IFAB_GUIDE_REGEX:
      return "regex";
    default:
      return "grammar";
  }
}

bool is_utf8(std::string_view text) {
  for (size_t i = 0; i < text.size();) {
    const auto lead = static_cast<unsigned char>(text[i]);
    const size_t size = lead < 0x80 ? 1 : lead >= 0xC2 && lead < 0xE0 ? 2 : (lead & 0xF0u) == 0xE0 ? 3 : 4;
    if (lead >= 0x80 && (lead < 0xC2 || lead > 0xF4)) return false;
    if (text.size() - i < size) return false;
    uint32_t point = size == 1 ? lead : lead & (0x7Fu >> size);
    for (size_t k = 1; k < size; ++k) {
      const auto byte = static_cast<unsigned char>(text[i + k]);
      if ((byte & 0xC0u) != 0x80) return false;
      point = (point << 6) | (byte & 0x3Fu);
    }
    const bool overlong = (size == 3 && point < 0x800) || (size == 4 && point < 0x10000);
    if (overlong || point > 0x10FFFF || (point >= 0xD800 && point < 0xE000)) return false;
    i += size;
  }
  return true;
}

Status check_guide(const ifab_request_t& raw, const ContractValues& contract) {
  if (raw.guide_kind == IFAB_GUIDE_NONE) {
    if (raw.guide_size == 0) return {};
    return invalid("guide_size", std::to_string(raw.guide_size) + ", expected 0 without a guide_kind");
  }
  if (raw.guide_kind < IFAB_GUIDE_NONE || raw.guide_kind > IFAB_GUIDE_GRAMMAR) {
    return invalid("guide_kind", std::to_string(raw.guide_kind) + ", expected IFAB_GUIDE_*");
  }
  const auto& kinds = contract.capabilities.guide_kinds;
  if (std::find(kinds.begin(), kinds.end(), raw.guide_kind) == kinds.end()) {
    return unimplemented("guide_kind", std::string(guide_name(raw.guide_kind)) + ", which the engine does not enforce");
  }
  if (raw.guide_size == 0 || raw.guide_size > kMaxGuideBytes) {
    return invalid("guide_size",
                   std::to_string(raw.guide_size) + " bytes, expected 1 to " + std::to_string(kMaxGuideBytes));
  }
  if (raw.guide == nullptr) return invalid("guide", "NULL with a guide_kind");
  if (!is_utf8({raw.guide, raw.guide_size})) return invalid("guide", "not valid UTF-8");
  return {};
}

Request request_of(const ifab_request_t& raw, const ContractValues& contract) {
  Request request;
  request.id = raw.id;
  request.prompt.assign(raw.token_ids, raw.token_ids + raw.token_count);
  request.stop_ids.assign(raw.stop_ids, raw.stop_ids + raw.stop_count);
  if ((raw.flags & IFAB_REQUEST_IGNORE_END) == 0) {
    const auto& ends = contract.tokenizer.end_token_ids;
    request.stop_ids.insert(request.stop_ids.end(), ends.begin(), ends.end());
  }
  std::sort(request.stop_ids.begin(), request.stop_ids.end());
  request.head_ends.assign(raw.head_ends, raw.head_ends + raw.head_count);
  if (raw.guide_kind != IFAB_GUIDE_NONE) request.guide.assign(raw.guide, raw.guide_size);
  request.guide_kind = raw.guide_kind;
  request.sampling = raw.sampling;
  request.salt = raw.salt;
  request.max_tokens = raw.max_tokens;
  request.samples = raw.samples;
  request.priority = raw.priority;
  request.logprobs = (raw.flags & IFAB_REQUEST_LOGPROBS) != 0;
  request.prompt_logprobs = (raw.flags & IFAB_REQUEST_PROMPT_LOGPROBS) != 0;
  request.want_payload = contract.capabilities.payload.has_value() && (raw.flags & IFAB_REQUEST_NO_PAYLOAD) == 0;
  return request;
}

}  // namespace

Status validate(const ifab_request_t& raw, const ContractValues& contract, const EngineFacts& facts, Request& out) {
  Status status = check_prompt(raw, contract);
  if (status.ok()) status = check_lengths(raw, contract);
  if (status.ok()) status = check_stops(raw, contract);
  if (status.ok()) status = check_heads(raw);
  if (status.ok()) status = check_sampling(raw.sampling);
  if (status.ok()) status = check_flags(raw, contract);
  if (status.ok()) status = check_guide(raw, contract);
  if (!status.ok()) return status;
  out = request_of(raw, contract);
  return never_fits(facts, out);
}

}  // namespace ifab
