// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "client.h"
#include "formula.h"
#include "simulated_directory.h"

namespace ifab::test {

// What a simulated engine will answer, by its formulas.
inline uint64_t chain_of(const SimulatedEngine& engine, const std::vector<int32_t>& prompt) {
  uint64_t chain = simulated::chain_start(engine.seed);
  for (const int32_t id : prompt) chain = simulated::chain_next(chain, id);
  return chain;
}

inline std::vector<int32_t> expected_tokens(const SimulatedEngine& engine, const Ask& ask, uint32_t sample) {
  const uint64_t key = simulated::sample_key(chain_of(engine, ask.prompt), ask.seed, sample);
  std::vector<int32_t> stops = ask.stop_ids;
  if ((ask.flags & IFAB_REQUEST_IGNORE_END) == 0) {
    stops.insert(stops.end(), engine.end_token_ids.begin(), engine.end_token_ids.end());
  }
  std::vector<int32_t> tokens;
  for (uint32_t k = 0; k < ask.max_tokens; ++k) {
    const int32_t token =
        simulated::token_of(simulated::token_word(key, k), engine.vocab_size, engine.end_token_ids, engine.end_one_in);
    if (std::find(stops.begin(), stops.end(), token) != stops.end()) break;
    tokens.push_back(token);
  }
  return tokens;
}

inline std::vector<uint8_t> expected_payload(const SimulatedEngine& engine, const std::vector<int32_t>& prompt) {
  const bool wide = engine.payload_dtype == "float32";
  const int32_t dtype = wide                                ? IFAB_DTYPE_FLOAT32
                        : engine.payload_dtype == "float16" ? IFAB_DTYPE_FLOAT16
                                                            : IFAB_DTYPE_BFLOAT16;
  std::vector<uint8_t> bytes(size_t{engine.hidden_size} * (wide ? 4 : 2));
  simulated::write_payload(chain_of(engine, prompt), engine.hidden_size, dtype, bytes.data());
  return bytes;
}

}  // namespace ifab::test
