// SPDX-License-Identifier: Apache-2.0
//
// What a simulated engine computes. Everything it emits is one of these functions of the whole prompt, so that a
// stream that got crossed, a head that got lost and a restart at the wrong place show in the values. Anybody can
// recompute them: engines/simulated.py does, in Python.
//
// All arithmetic is on unsigned 64-bit numbers, modulo 2^64. `seed` is the engine's (simulated.json), `request_seed`
// that of the request's sampling, E the contract's end token ids, V the size of the vocabulary, >> a logical shift.
//
//   mix(x):         x += 0x9E3779B97F4A7C15
//                   x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
//                   x = (x ^ (x >> 27)) * 0x94D049BB133111EB
//                   x ^ (x >> 31)
//   chain:          C(0) = mix(seed);  C(i + 1) = mix(C(i) ^ id(i))  over the prompt's ids, id(0) first
//   word:           w = mix(mix(mix(C(n) ^ request_seed) ^ sample) ^ k)  for token k, from 0, of a sample
//   token:          the smallest id of E, if end_one_in > 0 and E is not empty and (w >> 32) % end_one_in == 0
//                   else t = w % (V - |E|); for e of E, ascending: if t >= e then t += 1
//   log-probability of a generated token:   -((w >> 20) & 0xFFF) / 512
//   log-probability of prompt token i > 0:  -((C(i + 1) >> 20) & 0xFFF) / 512;  of token 0: 0
//   payload:        u(i) = mix(C(n) ^ i) for value i, from 0;
//                   float32: (u >> 40) / 2^23 - 1;  float16: (u >> 53) / 2^10 - 1;  bfloat16: (u >> 56) / 2^7 - 1
//   one_in(N):      a request is hit by a fault with trigger "one_in" and value N > 0 if mix(C(n) ^ N) % N == 0
//
// Divisions of log-probabilities and payloads are exact in the number format that carries them. The emitted token, if
// among the ids that end a sample, ends it with STOP and is not among its tokens.
#pragma once

#include <cstdint>
#include <span>

namespace ifab::simulated {

constexpr uint64_t mix(uint64_t x) {
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

constexpr uint64_t chain_start(uint64_t seed) {
  return mix(seed);
}
constexpr uint64_t chain_next(uint64_t chain, int32_t id) {
  return mix(chain ^ static_cast<uint32_t>(id));
}

// The part of a word that all tokens of a sample share.
constexpr uint64_t sample_key(uint64_t chain, uint64_t request_seed, uint32_t sample) {
  return mix(mix(chain ^ request_seed) ^ sample);
}
constexpr uint64_t token_word(uint64_t key, uint32_t k) {
  return mix(key ^ k);
}

// `end_ids` ascending.
constexpr int32_t token_of(uint64_t word, uint32_t vocab_size, std::span<const int32_t> end_ids, uint32_t end_one_in) {
  if (end_one_in > 0 && !end_ids.empty() && (word >> 32) % end_one_in == 0) return end_ids.front();
  auto token = static_cast<int32_t>(word % (vocab_size - end_ids.size()));
  for (const int32_t end : end_ids) {
    if (token >= end) ++token;
  }
  return token;
}

constexpr float logprob_of(uint64_t word) {
  return -static_cast<float>((word >> 20) & 0xFFF) / 512.0f;
}

// Writes `values` values of a payload, little-endian; `dtype` is IFAB_DTYPE_*.
void write_payload(uint64_t chain, uint32_t values, int32_t dtype, uint8_t* out);

constexpr bool hit_by(uint64_t chain, uint64_t one_in) {
  return one_in > 0 && mix(chain ^ one_in) % one_in == 0;
}

}  // namespace ifab::simulated
