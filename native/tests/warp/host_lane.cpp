// SPDX-License-Identifier: Apache-2.0
#include "host_lane.h"

#include <ucontext.h>

#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <exception>
#include <limits>
#include <stdexcept>
#include <string>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#define IFAB_FIBERS_ARE_WATCHED 1
#else
#define IFAB_FIBERS_ARE_WATCHED 0
#endif

namespace ifab::warp {

// What lanes hand in to an instruction of the warp, and what they take back.
struct Operands {
  uint32_t line = 0;
  std::array<uint32_t, 4> a{};
  std::array<uint32_t, 2> b{};
  std::array<float, 4> sum{};
  std::array<uint32_t, 4> words{};
};

class Block {
 public:
  static constexpr size_t kStack = 256 * 1024;
  static constexpr size_t kLanes = 32;
  enum class Instruction { kNone, kSyncBlock, kSyncWarp, kMatrices, kMatricesTurned, kMultiply, kExchange };
  struct Copy {
    uint32_t to;
    const uint16_t* from;
  };
  struct Fiber {
    ucontext_t context{};
    std::unique_ptr<uint8_t[]> stack;
    bool done = false;
    Instruction at = Instruction::kNone;
    Operands operands;
    std::vector<std::vector<Copy>> groups{1};
  };

  Block(int32_t of_grid, int32_t threads, uint32_t shared_bytes, const std::function<void(HostLane)>& body)
      : number(of_grid), body_(body), fibers(static_cast<size_t>(threads)), shared(shared_bytes, 0xff) {}

  // Each warp runs as far as it can before the next begins, so that what a barrier must order, and does not, comes out
  // of order.
  void run(bool backwards) {
    for (size_t i = 0; i < fibers.size(); ++i) begin(i);
    const size_t warps = fibers.size() / kLanes;
    while (!all_done()) {
      for (size_t i = 0; i < warps; ++i) advance((backwards ? warps - 1 - i : i) * kLanes, backwards);
      for (Fiber& fiber : fibers) {
        if (fiber.done != fibers[0].done) throw std::logic_error("a warp waits for another that has ended");
        fiber.at = Instruction::kNone;
      }
    }
  }

  // Called by a fiber: waits for the others of its warp or block.
  Operands& meet(int32_t thread, Instruction instruction, const Operands& operands) {
    Fiber& fiber = fibers[static_cast<size_t>(thread)];
    fiber.operands = operands;
    fiber.at = instruction;
    leave(fiber, false);
    return fiber.operands;
  }

  void check(uint32_t at, uint32_t bytes) const {
    if (at % bytes != 0 || uint64_t{at} + bytes > shared.size()) throw std::logic_error("wrong place in shared memory");
  }

 private:
  static void enter(uint32_t low, uint32_t high, uint32_t thread) {
    auto* block = reinterpret_cast<Block*>(uint64_t{low} | uint64_t{high} << 32);
    block->live(thread);
  }

  void live(uint32_t thread) {
#if IFAB_FIBERS_ARE_WATCHED
    __sanitizer_finish_switch_fiber(nullptr, &home_stack_, &home_size_);
#endif
    try {
      body_(HostLane(*this, static_cast<int32_t>(thread)));
    } catch (...) {
      problem = std::current_exception();
    }
    fibers[thread].done = true;
    fibers[thread].at = Instruction::kNone;
    leave(fibers[thread], true);
  }

  void begin(size_t i) {
    Fiber& fiber = fibers[i];
    fiber.stack = std::make_unique_for_overwrite<uint8_t[]>(kStack);
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = kStack;
    fiber.context.uc_link = &home_;
    const auto self = reinterpret_cast<uint64_t>(this);
    makecontext(&fiber.context, reinterpret_cast<void (*)()>(&Block::enter), 3, static_cast<uint32_t>(self),
                static_cast<uint32_t>(self >> 32), static_cast<uint32_t>(i));
  }

  void resume(size_t i) {
#if IFAB_FIBERS_ARE_WATCHED
    void* fake = nullptr;
    __sanitizer_start_switch_fiber(&fake, fibers[i].stack.get(), kStack);
#endif
    swapcontext(&home_, &fibers[i].context);
#if IFAB_FIBERS_ARE_WATCHED
    __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#endif
  }

  void leave(Fiber& fiber, [[maybe_unused]] bool for_good) {
#if IFAB_FIBERS_ARE_WATCHED
    void* fake = nullptr;
    __sanitizer_start_switch_fiber(for_good ? nullptr : &fake, home_stack_, home_size_);
#endif
    swapcontext(&fiber.context, &home_);
#if IFAB_FIBERS_ARE_WATCHED
    __sanitizer_finish_switch_fiber(fake, &home_stack_, &home_size_);
#endif
  }

  bool all_done() const {
    for (const Fiber& fiber : fibers) {
      if (!fiber.done) return false;
    }
    return true;
  }

  // Runs the warp of 32 fibers from `first` on to the block's next barrier, or to its end.
  void advance(size_t first, bool backwards) {
    while (true) {
      for (size_t i = 0; i < kLanes; ++i) {
        const size_t which = first + (backwards ? kLanes - 1 - i : i);
        if (!fibers[which].done) resume(which);
        if (problem) std::rethrow_exception(problem);
      }
      const Fiber& one = fibers[first];
      for (size_t lane = 1; lane < kLanes; ++lane) {
        const Fiber& other = fibers[first + lane];
        if (other.at != one.at || other.done != one.done) {
          throw std::logic_error("lanes of a warp are at different instructions");
        }
      }
      if (one.done || one.at == Instruction::kSyncBlock) return;
      carry_out(one.at, first);
    }
  }

  uint32_t word_at(uint32_t place) const {
    check(place, 4);
    uint32_t word = 0;
    std::memcpy(&word, shared.data() + place, 4);
    return word;
  }

  void carry_out(Instruction instruction, size_t warp) {
    switch (instruction) {
      case Instruction::kMatrices:
      case Instruction::kMatricesTurned:
        matrices(warp, instruction == Instruction::kMatricesTurned);
        break;
      case Instruction::kMultiply:
        multiply(warp);
        break;
      case Instruction::kExchange: {
        std::array<uint32_t, kLanes> given{};
        for (size_t lane = 0; lane < kLanes; ++lane) given[lane] = fibers[warp + lane].operands.a[0];
        for (size_t lane = 0; lane < kLanes; ++lane) {
          Operands& operands = fibers[warp + lane].operands;
          operands.words[0] = given[lane ^ operands.line];
        }
        break;
      }
      default:
        break;
    }
  }

  // ldmatrix .x4: lanes 8m to 8m+7 give the addresses of the lines of matrix m, 16 bytes each. Register m of lane l
  // holds line l/4, elements 2*(l%4) and the next; turned, it holds column l/4, lines 2*(l%4) and the next.
  void matrices(size_t warp, bool turned) {
    for (size_t m = 0; m < 4; ++m) {
      std::array<std::array<uint32_t, 8>, 8> element{};
      for (size_t r = 0; r < 8; ++r) {
        const uint32_t line = fibers[warp + m * 8 + r].operands.line;
        check(line, 16);
        for (uint32_t e = 0; e < 8; ++e) element[r][e] = word_at(line + e / 2 * 4) >> (e % 2 * 16) & 0xffffU;
      }
      for (size_t lane = 0; lane < kLanes; ++lane) {
        const size_t line = lane / 4, pair = lane % 4 * 2;
        fibers[warp + lane].operands.words[m] = turned ? element[pair][line] | element[pair + 1][line] << 16
                                                       : element[line][pair] | element[line][pair + 1] << 16;
      }
    }
  }

  // mma.m16n8k16 .row.col, bf16: with group = lane/4 and place = lane%4,
  //   a[i], i = 0..7: row = group, or group + 8 for i of 2, 3, 6, 7; column = 2 * place + i % 2, and 8 more from i = 4;
  //   b[i], i = 0..3: row = 2 * place + i % 2, and 8 more from i = 2; column = group;
  //   c[i], i = 0..3: row = group, and 8 more from i = 2; column = 2 * place + i % 2.
  void multiply(size_t warp) {
    std::array<std::array<float, 16>, 16> a{};
    std::array<std::array<float, 8>, 16> b{};
    for (size_t lane = 0; lane < kLanes; ++lane) {
      const Operands& operands = fibers[warp + lane].operands;
      const size_t group = lane / 4, place = lane % 4;
      for (size_t i = 0; i < 8; ++i) {
        const bool lower = i == 2 || i == 3 || i == 6 || i == 7;
        a[group + (lower ? 8 : 0)][2 * place + i % 2 + (i >= 4 ? 8 : 0)] =
            from_bfloat16(static_cast<uint16_t>(operands.a[i / 2] >> (i % 2 * 16)));
      }
      for (size_t i = 0; i < 4; ++i) {
        b[2 * place + i % 2 + (i >= 2 ? 8 : 0)][group] =
            from_bfloat16(static_cast<uint16_t>(operands.b[i / 2] >> (i % 2 * 16)));
      }
    }
    for (size_t lane = 0; lane < kLanes; ++lane) {
      Operands& operands = fibers[warp + lane].operands;
      for (size_t i = 0; i < 4; ++i) {
        const size_t row = lane / 4 + (i >= 2 ? 8 : 0), column = lane % 4 * 2 + i % 2;
        float total = operands.sum[i];
        for (size_t k = 0; k < 16; ++k) total += a[row][k] * b[k][column];
        operands.sum[i] = total;
      }
    }
  }

 public:
  int32_t number;

 private:
  std::function<void(HostLane)> body_;
  ucontext_t home_{};
  const void* home_stack_ = nullptr;
  size_t home_size_ = 0;

 public:
  std::vector<Fiber> fibers;
  std::vector<uint8_t> shared;
  std::exception_ptr problem;
};

int32_t HostLane::block() const {
  return block_->number;
}
void HostLane::sync_block() const {
  block_->meet(thread_, Block::Instruction::kSyncBlock, {});
}
void HostLane::sync_warp() const {
  block_->meet(thread_, Block::Instruction::kSyncWarp, {});
}

plugins::Chunk HostLane::read_chunk(const void* from) const {
  plugins::Chunk chunk;
  std::memcpy(&chunk, from, sizeof chunk);
  return chunk;
}
void HostLane::write_chunk(uint8_t* to, const plugins::Chunk& chunk) const {
  std::memcpy(to, &chunk, sizeof chunk);
}

void HostLane::write_half_chunk(uint8_t* to, uint32_t low, uint32_t high) const {
  const std::array<uint32_t, 2> words = {low, high};
  std::memcpy(to, words.data(), sizeof words);
}

void HostLane::load(uint32_t from, void* to, uint32_t bytes) const {
  block_->check(from, bytes);
  std::memcpy(to, block_->shared.data() + from, bytes);
}
void HostLane::store(uint32_t to, const void* from, uint32_t bytes) const {
  block_->check(to, bytes);
  std::memcpy(block_->shared.data() + to, from, bytes);
}
plugins::Chunk HostLane::load_chunk(uint32_t from) const {
  plugins::Chunk chunk;
  load(from, &chunk, sizeof chunk);
  return chunk;
}
void HostLane::store_chunk(uint32_t to, const plugins::Chunk& chunk) const {
  store(to, &chunk, sizeof chunk);
}
uint32_t HostLane::load_word(uint32_t from) const {
  uint32_t word = 0;
  load(from, &word, sizeof word);
  return word;
}
void HostLane::store_word(uint32_t to, uint32_t word) const {
  store(to, &word, sizeof word);
}
void HostLane::store_half_word(uint32_t to, uint16_t word) const {
  store(to, &word, sizeof word);
}

void HostLane::copy(uint32_t to, const uint16_t* from) const {
  block_->fibers[static_cast<size_t>(thread_)].groups.back().push_back({to, from});
}
void HostLane::commit() const {
  block_->fibers[static_cast<size_t>(thread_)].groups.emplace_back();
}
void HostLane::arrive(int32_t groups) const {
  auto& waiting = block_->fibers[static_cast<size_t>(thread_)].groups;
  while (waiting.size() > static_cast<size_t>(groups) + 1) {
    for (const Block::Copy& copy : waiting.front()) store(copy.to, copy.from, 16);
    waiting.erase(waiting.begin());
  }
}

void HostLane::load_matrices(uint32_t line, uint32_t (&out)[4]) const {
  Operands operands;
  operands.line = line;
  const Operands& after = block_->meet(thread_, Block::Instruction::kMatrices, operands);
  for (size_t i = 0; i < 4; ++i) out[i] = after.words[i];
}
void HostLane::load_matrices_turned(uint32_t line, uint32_t (&out)[4]) const {
  Operands operands;
  operands.line = line;
  const Operands& after = block_->meet(thread_, Block::Instruction::kMatricesTurned, operands);
  for (size_t i = 0; i < 4; ++i) out[i] = after.words[i];
}
void HostLane::multiply(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) const {
  Operands operands;
  operands.a = {a[0], a[1], a[2], a[3]};
  operands.b = {b0, b1};
  operands.sum = {sum[0], sum[1], sum[2], sum[3]};
  const Operands& after = block_->meet(thread_, Block::Instruction::kMultiply, operands);
  for (size_t i = 0; i < 4; ++i) sum[i] = after.sum[i];
}
float HostLane::exchange(float value, int32_t bits) const {
  Operands operands;
  operands.line = static_cast<uint32_t>(bits);
  operands.a[0] = std::bit_cast<uint32_t>(value);
  return std::bit_cast<float>(block_->meet(thread_, Block::Instruction::kExchange, operands).words[0]);
}

float HostLane::power_of_two(float value) const {
  return std::exp2(value);
}
float HostLane::reciprocal_root(float value) const {
  return static_cast<float>(1.0 / std::sqrt(static_cast<double>(value)));
}
uint32_t HostLane::bfloat16_pair(float low, float high) const {
  return to_bfloat16(low) | static_cast<uint32_t>(to_bfloat16(high)) << 16;
}
uint16_t HostLane::fp8_pair(float low, float high) const {
  return static_cast<uint16_t>(to_fp8(low) | to_fp8(high) << 8);
}

void run_block(int32_t number, int32_t threads, uint32_t shared_bytes, bool backwards,
               const std::function<void(HostLane)>& body) {
  Block(number, threads, shared_bytes, body).run(backwards);
}

uint16_t to_bfloat16(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  if (std::isnan(value)) return 0x7fff;
  return static_cast<uint16_t>((bits + 0x7fffU + (bits >> 16 & 1U)) >> 16);
}
float from_bfloat16(uint16_t bits) {
  return std::bit_cast<float>(uint32_t{bits} << 16);
}

float from_fp8(uint8_t bits) {
  const int exponent = bits >> 3 & 15, fraction = bits & 7;
  if (exponent == 15 && fraction == 7) return std::numeric_limits<float>::quiet_NaN();
  const float magnitude = exponent == 0 ? std::ldexp(static_cast<float>(fraction), -9)
                                        : std::ldexp(static_cast<float>(8 + fraction), exponent - 10);
  return (bits & 0x80) != 0 ? -magnitude : magnitude;
}
uint8_t to_fp8(float value) {
  const uint8_t sign = std::signbit(value) ? 0x80 : 0;
  if (std::isnan(value)) return static_cast<uint8_t>(sign | 0x7f);
  const double wanted = std::fabs(static_cast<double>(value));
  uint8_t best = 0;
  for (uint8_t bits = 1; bits <= 0x7e; ++bits) {
    const double here = std::fabs(from_fp8(bits) - wanted), before = std::fabs(from_fp8(best) - wanted);
    if (here < before || (here == before && bits % 2 == 0)) best = bits;
  }
  return static_cast<uint8_t>(sign | best);
}

}  // namespace ifab::warp
