// SPDX-License-Identifier: Apache-2.0
//
// The scale of a result: 0 where it leaves in bfloat16, above 0 where it leaves as FP8 of the value over it.
#pragma once

#include <cmath>
#include <string>

namespace ifab::plugins {

// What is wrong with a scale, or nothing.
inline std::string refuse_scale(const char* plugin, float scale) {
  if (scale == 0.0F || (scale > 0.0F && std::isnormal(scale) && std::isnormal(1.0F / scale))) return {};
  return std::string(plugin) + ": output_scale is " + std::to_string(scale) +
         ", and must be 0 (bfloat16) or a positive scale of FP8 that has a reciprocal";
}

// What values are multiplied by before they leave.
inline float factor_of(float scale) {
  return scale > 0.0F ? 1.0F / scale : 1.0F;
}

}  // namespace ifab::plugins
