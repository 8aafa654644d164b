// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

#include "rows.h"

namespace ifab::plugins {

// What is wrong with a norm or a gated unit, as one sentence that names field, value and limit; empty where nothing is.
std::string refuse(const Norm& norm);
std::string refuse(const GatedUnit& unit);

// What is wrong with rows of so many values, or with so many of them, for the operation of that plugin.
std::string refuse_rows(const char* plugin, int64_t width, int64_t tokens);

// The name of the kernel that computes it, as kernels.cu has it.
std::string kernel_name(const Norm& norm);
std::string kernel_name(const GatedUnit& unit);

// The arguments that do not depend on memory.
NormArguments arguments_of(const Norm& norm, int32_t width);
GatedUnitArguments arguments_of(const GatedUnit& unit, int32_t width);

}  // namespace ifab::plugins
