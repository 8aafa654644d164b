// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "document.h"
#include "status.h"

namespace ifab {

// The values of a contract that has passed its schema: every range and agreement that the schema states holds here.
// An empty optional is the contract's "not_applicable"; nothing is ever left out.
struct ContractValues {
  struct File {
    std::string path;  // relative to the engine directory, never leaving it
    uint64_t size_bytes = 0;
    std::string sha256;  // 64 lower-case hexadecimal digits
  };
  struct Model {
    std::string architecture;
    uint32_t layers = 0;
    uint32_t hidden_size = 0;
    uint32_t vocab_size = 0;
    std::string weights_dtype;
    std::string activations_dtype;
    std::optional<std::string> kv_cache_dtype;
  };
  struct Tokenizer {
    std::string file;
    std::vector<int32_t> end_token_ids;  // empty exactly where max_output_tokens is 0
  };
  struct Card {
    std::string family;
    std::optional<std::string> compute_capability;
    uint64_t memory_bytes = 0;  // of each card
    uint32_t count = 0;
    uint32_t tensor_parallel = 0;
    uint32_t pipeline_parallel = 0;
  };
  struct Limits {
    uint32_t max_input_tokens = 0;
    uint32_t max_sequence_tokens = 0;
    uint32_t max_output_tokens = 0;  // 0: the engine generates nothing
    uint32_t slots = 0;
    uint32_t step_token_budget = 0;
    uint32_t built_step_token_budget = 0;
    std::optional<uint32_t> kv_block_tokens;
    std::optional<double> kv_cache_memory_fraction;
    uint64_t host_cache_bytes = 0;
    uint32_t beams = 0;
    uint32_t longest_step_ms = 0;
  };
  struct Payload {
    std::vector<uint32_t> shape;  // outermost first
    int32_t dtype = 0;            // IFAB_DTYPE_*
    std::vector<int32_t> layers;  // -1: after the final norm, before the output head
    uint32_t size_bytes() const;  // at most 256 MiB, by the ranges of the schema
  };
  struct Capabilities {
    std::vector<int32_t> guide_kinds;  // IFAB_GUIDE_*
    uint32_t samples_max = 0;
    bool scoring = false;
    bool reproducible = false;
    std::optional<Payload> payload;
  };
  struct Runtime {
    std::string name;
    std::string version;
  };
  struct Build {
    std::string tool;
    std::string tool_version;
    std::vector<std::string> flags;
    std::optional<std::string> calibration;
    std::string date;
  };

  std::string engine_id;
  std::vector<File> files;
  Model model;
  Tokenizer tokenizer;
  Card card;
  Limits limits;
  Capabilities capabilities;
  Runtime runtime;
  Build build;
};

// The values of a contract document that its schema has passed without findings.
ContractValues contract_values(const Value& document);

// Reads the text of a contract.json. Appends everything that is wrong with it; returns the values where nothing is.
std::optional<ContractValues> read_contract(std::string_view text, std::vector<Finding>& findings);

}  // namespace ifab
