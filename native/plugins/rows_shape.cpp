// SPDX-License-Identifier: Apache-2.0
#include "rows_shape.h"

#include <cmath>
#include <limits>

#include "scale.h"

namespace ifab::plugins {
namespace {

std::string sentence(const char* plugin, const char* field, const std::string& value, const std::string& expected) {
  return std::string(plugin) + ": " + field + " is " + value + ", and must be " + expected;
}

const char* format(float output_scale) {
  return output_scale > 0.0F ? "_fp8" : "_bf16";
}

}  // namespace

std::string refuse(const Norm& norm) {
  if (!std::isfinite(norm.epsilon) || norm.epsilon < 0.0F) {
    return sentence("ifab_norm", "epsilon", std::to_string(norm.epsilon), "a finite number from 0 on");
  }
  if (norm.added != 0 && norm.added != 1) return sentence("ifab_norm", "added", std::to_string(norm.added), "0 or 1");
  return refuse_scale("ifab_norm", norm.output_scale);
}

std::string refuse(const GatedUnit& unit) {
  return refuse_scale("ifab_gated_unit", unit.output_scale);
}

std::string refuse_rows(const char* plugin, int64_t width, int64_t tokens) {
  if (width < 8 || width % 8 != 0 || width > kWidestRow) {
    return sentence(plugin, "the width of a row", std::to_string(width),
                    "a multiple of 8, at most " + std::to_string(kWidestRow));
  }
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();  // blocks of one launch
  if (tokens >= 1 && tokens <= kMost) return {};
  return sentence(plugin, "the number of tokens", std::to_string(tokens), "1 to " + std::to_string(kMost));
}

std::string kernel_name(const Norm& norm) {
  return std::string("ifab_norm") + (norm.added != 0 ? "_added" : "_plain") + format(norm.output_scale);
}

std::string kernel_name(const GatedUnit& unit) {
  return std::string("ifab_gated_unit") + format(unit.output_scale);
}

NormArguments arguments_of(const Norm& norm, int32_t width) {
  NormArguments out;
  out.width = width;
  out.threads = row_threads(width);
  out.epsilon = norm.epsilon;
  out.output_factor = factor_of(norm.output_scale);
  return out;
}

GatedUnitArguments arguments_of(const GatedUnit& unit, int32_t width) {
  GatedUnitArguments out;
  out.width = width;
  out.threads = row_threads(width);
  out.output_factor = factor_of(unit.output_scale);
  return out;
}

}  // namespace ifab::plugins
