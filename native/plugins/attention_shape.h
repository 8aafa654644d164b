// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

#include "attention.h"

namespace ifab::plugins {

// What is wrong with a shape, as one sentence that names field, value and limit; empty where nothing is.
std::string refuse(const AttentionShape& shape);

// What is wrong with a number of tokens for a shape.
std::string refuse_tokens(const AttentionShape& shape, int64_t tokens);

// The name of the kernel that computes a shape, as kernels.cu has it.
std::string kernel_name(const AttentionShape& shape);

// How a launch is cut.
struct Geometry {
  int32_t query_tile = 0;
  int32_t key_tile = 0;
  int64_t blocks = 0;
  int32_t threads = 0;
  int32_t shared_bytes = 0;
};

// Takes the largest tile of keys with which two blocks fit into a multiprocessor's shared memory, `reserved` bytes of
// which the card takes for each block.
Geometry geometry(const AttentionShape& shape, int64_t rows, int32_t multiprocessor_bytes, int32_t reserved);

// The values that do not depend on memory.
AttentionArguments arguments_of(const AttentionShape& shape, const Geometry& geometry);

}  // namespace ifab::plugins
