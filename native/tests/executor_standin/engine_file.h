// SPDX-License-Identifier: Apache-2.0
//
// The stand-in's engine, rank0.engine: JSON where the vendor has a plan. {"simulated": a simulated.json,
// "end_token_ids": [...], "outputs": [{"name", "extents", "dtype", "rows": "sequences" or "tokens"}], "semantics":
// {switch: bool}, "tokens_an_answer": N}.
#pragma once

#include <cstdint>
#include <filesystem>
#include <set>
#include <string>
#include <vector>

#include "enumeration.h"
#include "semantics.h"
#include "simulated.h"

namespace ifab::standin {

struct EngineFile {
  simulated::Config simulated;
  std::vector<tensorrt::TensorInfo> tensors;
  std::set<std::string> ungathered;  // of these, those with a row for each token
  Semantics semantics;
  uint32_t tokens_an_answer = 1;  // tokens that a streaming request has made before it is answered
  // From config.json.
  uint32_t max_batch_size = 0;
  uint32_t max_step_tokens = 0;
  uint32_t max_sequence_tokens = 0;
  uint32_t ranks = 0;
  bool cached = false;
  bool in_flight = false;  // packed input, and a cache that is paged or absent
  bool paged_attention = false;
  bool context_logits = false;

  bool has_output(const std::string& name) const;
};

// Throws std::runtime_error where a file cannot be read.
EngineFile read_engine(const std::filesystem::path& directory);

}  // namespace ifab::standin
