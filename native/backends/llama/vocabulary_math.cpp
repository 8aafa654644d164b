// SPDX-License-Identifier: Apache-2.0
#include "vocabulary_math.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace ifab::llama {
namespace {

constexpr size_t kLanes = 16;
using Floats = float __attribute__((vector_size(kLanes * sizeof(float))));
using Ints = int32_t __attribute__((vector_size(kLanes * sizeof(int32_t))));

Floats load(const float* from) {
  Floats out;
  std::memcpy(&out, from, sizeof out);
  return out;
}

// The last values of a row that does not end on a vector; the rest is `fill`.
Floats load_tail(std::span<const float> from, float fill) {
  float lanes[kLanes];
  for (size_t i = 0; i < kLanes; ++i) lanes[i] = i < from.size() ? from[i] : fill;
  return load(lanes);
}

Floats all(float value) {
  return value - Floats{};
}

// exp of every lane, lanes at most 0, to about one unit in the last place: 2^n times a polynomial of the rest.
Floats exponential(Floats x) {
  const Ints vanishes = ~(x >= -87.0f);  // also where x is no number
  const Floats clamped = vanishes ? all(-87.0f) : x;
  const Floats scaled = clamped * 1.44269504088896f - 0.5f;
  const Ints n = __builtin_convertvector(scaled, Ints);  // rounds towards zero: to the nearest, for arguments below 0
  const Floats whole = __builtin_convertvector(n, Floats);
  const Floats r = (clamped - whole * 0.693359375f) + whole * 2.12194440e-4f;
  Floats p = all(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  const Ints bits = (n + 127) << 23;
  Floats power;
  std::memcpy(&power, &bits, sizeof power);
  return vanishes ? Floats{} : p * power;
}

double sum(Floats values) {
  double total = 0;
  for (size_t i = 0; i < kLanes; ++i) total += static_cast<double>(values[i]);
  return total;
}

// Sums of float vectors stay exact enough over so many; beyond, they are added up in double.
constexpr size_t kChunk = 64 * kLanes;

template <class Keep>
double exponentials_of(std::span<const float> logits, float shift, float scale, Keep keep) {
  double total = 0;
  for (size_t start = 0; start < logits.size(); start += kChunk) {
    const std::span<const float> chunk = logits.subspan(start, std::min(kChunk, logits.size() - start));
    Floats partial{};
    size_t i = 0;
    for (; i + kLanes <= chunk.size(); i += kLanes) {
      const Floats weights = exponential((load(chunk.data() + i) - shift) * scale);
      keep(start + i, weights, kLanes);
      partial += weights;
    }
    if (i < chunk.size()) {
      const Floats weights = exponential((load_tail(chunk.subspan(i), -INFINITY) - shift) * scale);
      keep(start + i, weights, chunk.size() - i);
      partial += weights;
    }
    total += sum(partial);
  }
  return total;
}

}  // namespace

Largest largest(std::span<const float> logits) {
  // First the chunk that holds the largest value, then the place in it.
  Largest best{-1, -std::numeric_limits<float>::infinity()};
  size_t best_start = 0;
  for (size_t start = 0; start < logits.size(); start += kChunk) {
    const std::span<const float> chunk = logits.subspan(start, std::min(kChunk, logits.size() - start));
    Floats top = all(-INFINITY);
    size_t i = 0;
    for (; i + kLanes <= chunk.size(); i += kLanes) {
      const Floats values = load(chunk.data() + i);
      top = values > top ? values : top;
    }
    if (i < chunk.size()) {
      const Floats values = load_tail(chunk.subspan(i), -INFINITY);
      top = values > top ? values : top;
    }
    float value = top[0];
    for (size_t lane = 1; lane < kLanes; ++lane) value = top[lane] > value ? top[lane] : value;
    if (value > best.value) {
      best = {0, value};
      best_start = start;
    }
  }
  if (best.id < 0) return best;
  while (logits[best_start] != best.value) ++best_start;
  best.id = static_cast<int32_t>(best_start);
  return best;
}

double exponentials(std::span<const float> logits, float shift, float scale, std::span<float> weights) {
  return exponentials_of(logits, shift, scale, [&](size_t at, const Floats& values, size_t count) {
    std::memcpy(weights.data() + at, &values, count * sizeof(float));
  });
}

double sum_of_exponentials(std::span<const float> logits, float shift, float scale) {
  return exponentials_of(logits, shift, scale, [](size_t, const Floats&, size_t) {});
}

size_t at_least(std::span<const float> logits, float threshold, int32_t* ids) {
  size_t count = 0;
  size_t i = 0;
  for (; i + kLanes <= logits.size(); i += kLanes) {
    const Ints hits = load(logits.data() + i) >= threshold;
    int32_t any = 0;
    for (size_t lane = 0; lane < kLanes; ++lane) any |= hits[lane];
    if (any == 0) continue;
    for (size_t lane = 0; lane < kLanes; ++lane) {
      ids[count] = static_cast<int32_t>(i + lane);
      count += hits[lane] != 0 ? 1 : 0;
    }
  }
  for (; i < logits.size(); ++i) {
    ids[count] = static_cast<int32_t>(i);
    count += logits[i] >= threshold ? 1 : 0;
  }
  return count;
}

}  // namespace ifab::llama
