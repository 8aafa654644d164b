// SPDX-License-Identifier: Apache-2.0
//
// A model of the few warp instructions that kernels use, on the processor: each thread of a block is a fiber, and an
// instruction of a whole warp waits until all 32 have come to it. The layouts of registers are those that the PTX ISA
// documents for mma.m16n8k16 (bf16) and ldmatrix (m8n8), written down anew; nothing is taken from a kernel.
//
// Stricter than a card: asynchronous copies arrive at the wait for them and not before, shared memory begins as
// not-a-number, and lanes of a warp that come to different instructions are an error.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "lane.h"

namespace ifab::warp {

class Block;

class HostLane {
 public:
  HostLane(Block& block, int32_t thread) : block_(&block), thread_(thread) {}

  int32_t thread() const { return thread_; }
  int32_t block() const;
  void sync_block() const;
  void sync_warp() const;

  int32_t read(const int32_t* from) const { return *from; }
  plugins::Chunk read_chunk(const void* from) const;
  plugins::Chunk read_chunk_once(const void* from) const { return read_chunk(from); }
  void write_chunk(uint8_t* to, const plugins::Chunk& chunk) const;
  void write_half_chunk(uint8_t* to, uint32_t low, uint32_t high) const;

  plugins::Chunk load_chunk(uint32_t from) const;
  void store_chunk(uint32_t to, const plugins::Chunk& chunk) const;
  uint32_t load_word(uint32_t from) const;
  void store_word(uint32_t to, uint32_t word) const;
  void store_half_word(uint32_t to, uint16_t word) const;

  void copy(uint32_t to, const uint16_t* from) const;
  void commit() const;
  template <int32_t kGroups>
  void wait() const {
    arrive(kGroups);
  }

  void load_matrices(uint32_t line, uint32_t (&out)[4]) const;
  void load_matrices_turned(uint32_t line, uint32_t (&out)[4]) const;
  void multiply(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) const;
  float exchange(float value, int32_t bits) const;

  float power_of_two(float value) const;
  float reciprocal(float value) const { return 1.0F / value; }
  float reciprocal_root(float value) const;
  uint32_t bfloat16_pair(float low, float high) const;
  uint16_t fp8_pair(float low, float high) const;

 private:
  void arrive(int32_t groups) const;
  void store(uint32_t to, const void* from, uint32_t bytes) const;
  void load(uint32_t from, void* to, uint32_t bytes) const;

  Block* block_;
  int32_t thread_;
};

// Runs one block of threads to their ends. `backwards`: threads run in falling order, so that an order which a kernel
// leaves to chance shows. Throws std::logic_error where the block misuses its machine.
void run_block(int32_t number, int32_t threads, uint32_t shared_bytes, bool backwards,
               const std::function<void(HostLane)>& body);

// bfloat16, rounded to nearest, ties to even.
uint16_t to_bfloat16(float value);
float from_bfloat16(uint16_t bits);
// The e4m3 nearest to a value, ties to the even one, at most 448; found among all of them.
uint8_t to_fp8(float value);
float from_fp8(uint8_t bits);

}  // namespace ifab::warp
