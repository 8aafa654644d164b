// SPDX-License-Identifier: Apache-2.0
//
// Requests in the vendor's form, and its endings in ours.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "contract.h"
#include "request.h"
#include "settings.h"
#include "status.h"
#include "tensorrt_llm/executor/executor.h"

namespace ifab::executor {

// The engine's end token that ends this request, which the runtime knows as its one end id; -1 where none does. Every
// other stop id goes as a stop word of one token.
int32_t end_id_of(const Request& request, const ContractValues& contract);

// A request as the runtime takes it. Its answers stream, unless it asks for log-probabilities: cancelling one that
// streams them ends the process in some releases.
tensorrt_llm::executor::Request to_vendor(const Request& request, const ContractValues& contract,
                                          const Settings& settings);

// How a sequence ended. With kStop and kLength it ended well; `stop_id` is the token that ended it, or -1.
struct Ending {
  enum class Kind { kStop, kLength, kCancelled, kBroken };
  Kind kind = Kind::kBroken;
  int32_t stop_id = -1;
  std::string why;  // for kBroken
};

// Reads an ending, and takes the stop token off `tokens`, the last ones of the sequence: the runtime leaves a stop word
// in its output, and an end id in some releases. `generated` are the sequence's tokens with these.
Ending ending_of(tensorrt_llm::executor::FinishReason reason, const Request& request, int32_t end_id,
                 uint64_t generated, std::vector<int32_t>& tokens);

// What an error response means. Everything but `kRequest` is somebody else's fault: the request may run again.
struct Failure {
  enum class Kind {
    kRequest,  // the runtime does not take the request
    kForward,  // the forward pass threw, and took along everything that was active
    kOther,
  };
  Kind kind = Kind::kOther;
  Status status;
};
Failure failure_of(std::string_view text, const Request& request);

}  // namespace ifab::executor
