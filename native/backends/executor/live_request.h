// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "backend.h"
#include "contract.h"
#include "settings.h"
#include "tensorrt_llm/executor/executor.h"
#include "translate.h"

namespace ifab::executor {

// What all requests of an engine have in common.
struct AnswerForm {
  uint32_t block_tokens = 0;  // 0 without a cache
  uint32_t event_tokens = 0;  // most tokens told at once
  uint32_t row_bytes = 0;     // of one payload output
  tensorrt_llm::executor::DataType payload_type = tensorrt_llm::executor::DataType::kUNKNOWN;
  std::vector<std::string> payload_outputs;
};

// One request in the runtime: what has come back for it, and what of that has been told.
class LiveRequest {
 public:
  using VendorId = tensorrt_llm::executor::IdType;

  // `form` outlives it.
  LiveRequest(const Request& request, VendorId vendor_id, int32_t end_id, const AnswerForm& form);

  const Request& request() const { return *request_; }
  VendorId vendor_id() const { return vendor_id_; }
  // The runtime has let go of it: it must not be cancelled there any more.
  bool over() const { return over_; }
  bool context_told() const { return context_told_; }
  bool failed() const { return !failure_.ok(); }
  // Whether its owner has it in line to be told.
  bool in_line() const { return in_line_; }
  void set_in_line(bool in_line) { in_line_ = in_line; }

  // Takes a result in.
  void take(const tensorrt_llm::executor::Result& result);
  // It ends with that, whatever else came back.
  void fail(Status status);

  // Tells the sink what has come back, tokens within `tokens_left`, which goes down by as many. True where the request
  // has ended. Something is left to tell where has_more() says so.
  bool tell(uint32_t& tokens_left, StepReport& report, Sink& sink);
  bool has_more() const;

 private:
  // One sample.
  struct Sequence {
    std::vector<int32_t> tokens;  // come back and not told: from `told` on
    std::vector<float> logprobs;  // as long as tokens, or empty
    size_t told = 0;
    uint64_t received = 0;  // tokens that came back so far
    bool over = false;      // nothing more comes back
    bool ended = false;     // and its end is told
    Ending ending;
    bool all_told() const { return told == tokens.size(); }
  };

  void take_tokens(Sequence& sequence, const tensorrt_llm::executor::Result& result);
  void take_cached(const tensorrt_llm::executor::Result& result);
  void take_payload(const tensorrt_llm::executor::Result& result);
  void tell_context(Sink& sink);
  void tell_tokens(uint32_t sample, uint32_t& tokens_left, StepReport& report, Sink& sink);
  void tell_end(uint32_t sample, StepReport& report, Sink& sink);

  const Request* request_;
  VendorId vendor_id_;
  int32_t end_id_;
  const AnswerForm* form_;
  std::vector<Sequence> sequences_;
  uint32_t left_;          // samples whose end is not told
  bool answered_ = false;  // the first answer of sample 0 is here, and so the prompt is computed
  bool context_told_ = false;
  bool over_ = false;
  bool in_line_ = false;
  uint32_t cached_ = 0;  // tokens of the prompt that were reused
  std::vector<uint8_t> payload_;
  std::string payload_missing_;  // why payload_ is not whole; empty where it is, or none is due
  Status failure_;
};

}  // namespace ifab::executor
