// SPDX-License-Identifier: Apache-2.0
//
// Passes over one row of logits. A row has tens of thousands of values and there is one for each generated token, so
// these are written for vector units; the file is compiled for the processor that it is built on, like the runtime.
// Results depend on the values alone: sums are taken in one fixed order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace ifab::llama {

struct Largest {
  int32_t id = -1;  // the lowest id of those with the largest value; -1 where no value is above minus infinity
  float value = 0;
};

// The largest logit. Values that are no numbers are passed over.
Largest largest(std::span<const float> logits);

// exp((logit - shift) * scale) of every logit, for arguments of at most 0, into `weights` (as long as `logits`).
// Returns their sum. An argument below -87 gives 0, one that is no number too.
double exponentials(std::span<const float> logits, float shift, float scale, std::span<float> weights);

// The same sum without keeping the terms.
double sum_of_exponentials(std::span<const float> logits, float shift, float scale);

// Writes the ids of logits that are at least `threshold`, ascending, to `ids` (room for logits.size()). Returns how
// many.
size_t at_least(std::span<const float> logits, float threshold, int32_t* ids);

}  // namespace ifab::llama
