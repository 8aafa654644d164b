// SPDX-License-Identifier: Apache-2.0
//
// From an engine's enumeration to what has to be bound: the role of every tensor, where its memory lies, how large it
// can become. Decided once, at load; a tensor without a role, and a role without a tensor, is a finding.
//
// Two layouts are known, told apart by the rank of input_ids. Rows: prompts share rows of fixed length, told apart by
// segment numbers, or, where an engine lists neither positions nor segments, each has a row of its own (engines of
// engines/mining). Packed: all tokens one after another, as TensorRT-LLM's attention plugin
// takes them; its small host_* inputs are read by the processor although the runtime reports them on the card.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "contract.h"
#include "enumeration.h"
#include "status.h"

namespace ifab::tensorrt {

enum class Role {
  kTokenIds,            // rows: [rows, row_tokens]; packed: [tokens]
  kPositions,           // as kTokenIds: the place of each token in its prompt
  kSegments,            // rows only, as kTokenIds: which prompt of the row a token belongs to, -1 for padding
  kLastRows,            // rows only, [prompts]: flat place of each prompt's last token
  kLastTokenIds,        // packed only, [prompts]: tokens up to and with each prompt's last one
  kRequestTypes,        // packed, host, [prompts]: 0, every prompt is in its context phase
  kContextLengths,      // packed, card, [prompts]
  kHostContextLengths,  // packed, host, [prompts]
  kPerfKnobs,           // packed, host, int64 [16]: defaults of the plugin
  kContextProgress,     // packed, host, int64 [1]: 0, no layer-wise progress is reported
  kAttentionWindows,    // packed, host, [layers]: longest sequence
  kSinkTokens,          // packed, host, [1]: 0
  kHidden,              // output [prompts, hidden_size]
  kIgnored,             // an output that is bound because every output must be, and not read
};

struct Binding {
  Role role = Role::kIgnored;
  TensorInfo tensor;
  bool on_host = false;  // where its memory lies, by what reads it
  uint64_t bytes = 0;    // at the largest extents of the profile
  int32_t layer = 0;     // kHidden: which state, as in the contract's payload
};

struct BindingPlan {
  bool packed = false;
  bool shares_rows = false;       // rows: whether prompts are told apart within one
  uint32_t row_tokens = 0;        // rows: tokens of one row; packed: the longest prompt
  uint32_t rows = 0;              // rows: most of one launch
  uint32_t tokens = 0;            // most of one launch
  uint32_t prompts = 0;           // most of one launch
  std::vector<Binding> bindings;  // every tensor of the enumeration, in its order
  std::vector<size_t> hidden;     // places in bindings of the outputs of the payload, in the contract's order
};

// Appends everything in which the enumeration is not what a mining engine of this contract has.
BindingPlan plan_bindings(const Enumeration& enumeration, const ContractValues& contract,
                          std::vector<Finding>& findings);

}  // namespace ifab::tensorrt
