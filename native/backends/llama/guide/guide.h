// SPDX-License-Identifier: Apache-2.0
//
// Guides as the backend uses them: compiled at submit, run beside a sample.
#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "automaton.h"
#include "request.h"
#include "sampler.h"
#include "status.h"
#include "token_bytes.h"

namespace ifab::guide {

// A guide that has been read. Constant; any thread.
struct Compiled final : CompiledGuide {
  int32_t kind = IFAB_GUIDE_NONE;
  std::string text;
  std::shared_ptr<const Grammar> grammar;
};

// Reads guides, and remembers the last ones: the rows of a job mostly have the same. Any thread.
class Compiler {
 public:
  // IFAB_INVALID_ARGUMENT with what is wrong and where; IFAB_UNIMPLEMENTED with the name of what is not supported.
  Status compile(int32_t kind, std::string_view text, std::shared_ptr<const CompiledGuide>& out);

 private:
  static constexpr size_t kRemembered = 64;

  std::mutex mutex_;
  std::list<std::shared_ptr<const Compiled>> last_;  // the last used first
};

// An automaton and the tokens that it allows in states where that was asked. Shared by samples of one guide.
class Guidance {
 public:
  Guidance(std::shared_ptr<const Compiled> compiled, const TokenBytes& tokens);

  const Compiled& compiled() const { return *compiled_; }
  Automaton& automaton() { return automaton_; }
  const TokenBytes& tokens() const { return tokens_; }
  // A bit for each token whose bytes may follow; empty beyond the automaton's limits. Valid until the next call.
  std::span<const uint64_t> allowed(Automaton::State state);
  // Whether new samples had better start with a fresh one.
  bool worn_out() const { return automaton_.size() > Automaton::kMostStates / 4; }

 private:
  static constexpr size_t kMostMasks = 256;

  std::shared_ptr<const Compiled> compiled_;
  const TokenBytes& tokens_;
  Automaton automaton_;
  std::unordered_map<Automaton::State, std::vector<uint64_t>> masks_;
};

// Guidances of the guides used last. Owner thread.
class GuidanceCache {
 public:
  explicit GuidanceCache(std::vector<std::string> pieces) : tokens_(pieces) {}
  std::shared_ptr<Guidance> get(const std::shared_ptr<const CompiledGuide>& compiled);

 private:
  static constexpr size_t kRemembered = 16;

  const TokenBytes tokens_;
  std::list<std::shared_ptr<Guidance>> last_;  // the last used first
};

// The guide of one sample, and where in it the sample is. Stop tokens are allowed exactly where the text may end.
class GuideRun final : public llama::TokenFilter {
 public:
  void start(std::shared_ptr<Guidance> guidance, std::span<const int32_t> stop_ids);
  void clear() { guidance_.reset(); }
  bool active() const { return guidance_ != nullptr; }

  bool allows(int32_t token) override;
  void mask(std::span<float> logits) override;
  // The sample goes on with this token, which allows() has allowed and which is no stop token.
  void accept(int32_t token);
  // Whether the text can only end now.
  bool only_ends() const { return guidance_->automaton().only_ends(state_); }
  // Why no token could be chosen: beyond the limits, or no token has the bytes that would have to follow.
  Status dead_end() const;

 private:
  Automaton::State after(int32_t token);
  bool is_stop(int32_t token) const;

  std::shared_ptr<Guidance> guidance_;
  std::span<const int32_t> stop_ids_;  // ascending
  Automaton::State state_ = Automaton::kDead;
  bool too_large_ = false;
};

}  // namespace ifab::guide
