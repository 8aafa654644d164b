// SPDX-License-Identifier: Apache-2.0
//
// The llama backend as the library sees it: how its engine directories are known, how an engine is loaded and proved,
// and what it answers. The work is in batcher.cpp.
#include <cmath>
#include <exception>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <utility>

#include "backend.h"
#include "batcher.h"
#include "config.h"
#include "ifab/engine.h"
#include "payload_tap.h"
#include "session.h"

namespace ifab {
namespace llama {
namespace {

class LlamaBackend final : public Backend {
 public:
  LlamaBackend(Config config, std::unique_ptr<PayloadTap> tap, std::unique_ptr<Session> session)
      : config_(std::move(config)),
        tap_(std::move(tap)),
        session_(std::move(session)),
        batcher_(config_, *session_, tap_.get()) {
    facts_.vocab_size = session_->vocab_size();
    facts_.hidden_size = session_->hidden_size();
    facts_.layers = session_->layers();
    facts_.slots = config_.slots;
    facts_.max_sequence_tokens = config_.sequence_tokens;
    facts_.step_token_budget = config_.step_token_budget;
    facts_.kv_block_tokens = kBlockTokens;
    facts_.kv_pool_blocks = config_.streams() ? blocks_for(config_.sequence_tokens) * config_.sequences()
                                              : config_.pool_tokens / kBlockTokens;
    facts_.payload_bytes = tap_ ? tap_->payload_bytes() : 0;
    facts_.payload_dtype = config_.payload ? config_.payload->dtype : 0;
    facts_.scoring = true;
    facts_.samples_max = config_.slots;
    facts_.guide_kinds = {IFAB_GUIDE_JSON_SCHEMA, IFAB_GUIDE_REGEX, IFAB_GUIDE_GRAMMAR};
  }

  const EngineFacts& facts() const override { return facts_; }
  Room room() const override { return batcher_.room(); }
  Need need(const Request& request) const override { return batcher_.need(request); }
  void note_waiting(const Request& request) override { batcher_.note_waiting(request); }
  void forget_waiting(const Request& request) override { batcher_.forget_waiting(request); }
  AdmitResult admit(const Request& request) override {
    return {batcher_.admit(request) ? AdmitOutcome::kAdmitted : AdmitOutcome::kNoRoom, {}};
  }
  void cancel(uint64_t request_id) override { batcher_.cancel(request_id); }
  uint64_t kv_blocks_used() const override { return blocks_for(batcher_.cells_used()); }
  void interrupt() noexcept override { session_->interrupt(); }
  Status compile_guide(int32_t kind, std::string_view text, std::shared_ptr<const CompiledGuide>& out) const override {
    return guides_.compile(kind, text, out);
  }

  StepReport step(StepMode mode, Sink& sink) override {
    StepReport report;
    try {
      report = batcher_.step(mode, sink);
    } catch (const std::bad_alloc&) {
      report.engine_failure = {IFAB_RESOURCE_EXHAUSTED, "out of memory in a step"};
    } catch (const std::exception& error) {
      report.engine_failure = {IFAB_INTERNAL, error.what()};
    }
    return report;
  }

 private:
  const Config config_;
  std::unique_ptr<PayloadTap> tap_;  // outlives the session, whose graph calls it
  std::unique_ptr<Session> session_;
  Batcher batcher_;
  mutable guide::Compiler guides_;  // has a lock of its own
  EngineFacts facts_;
};

// One block of a prompt and one generated token, before anybody relies on the engine. A runtime that was built for
// another processor ends the process here, at load, and not while it serves.
Status prove(Session& session) {
  const auto bad = [](const char* what) {
    return Status(IFAB_INTERNAL, std::string("the proving step failed: ") + what);
  };
  const auto probe = [&](uint32_t first, uint32_t count) {
    session.clear_batch();
    for (uint32_t i = 0; i < count; ++i)
      session.add_row(0, static_cast<int32_t>((first + i) % 7), first + i, i + 1 == count);
    return session.decode() == Session::Outcome::kDone;
  };
  if (!probe(0, kBlockTokens)) return bad("a block of a prompt was not computed");
  if (!probe(kBlockTokens, 1)) return bad("a token was not computed");
  for (const float logit : session.logits(0)) {
    if (!std::isfinite(logit)) return bad("its logits are not numbers");
  }
  session.drop(0);
  return session.length(0) == 0 ? Status() : bad("the cache kept what was dropped");
}

bool recognises(const EngineDirectory& directory) {
  return directory.has(kConfigurationFile);
}

std::optional<Config> read(const EngineDirectory& directory, std::vector<Finding>& findings) {
  std::string text;
  if (Status status = directory.read_text(kConfigurationFile, text); !status.ok()) {
    findings.push_back({kConfigurationFile, status.message(), "a file that can be read"});
    return std::nullopt;
  }
  return read_config(text, findings);
}

void inspect(const EngineDirectory& directory, std::vector<Finding>& findings) {
  if (const std::optional<Config> config = read(directory, findings))
    compare_with_directory(*config, directory, findings);
}

Status load(const EngineDirectory& directory, std::unique_ptr<Backend>& out) {
  std::vector<Finding> findings;
  std::optional<Config> config = read(directory, findings);
  if (!config) return {IFAB_FAILED_PRECONDITION, "llama.json changed while the engine was loaded"};
  std::unique_ptr<PayloadTap> tap;
  if (config->payload) tap = std::make_unique<PayloadTap>(*config->payload);
  std::unique_ptr<Session> session;
  Status status = Session::open(*config, directory.file_path(config->gguf), tap.get(), session);
  if (!status.ok()) return status;
  if (const std::string weights = session->weights_dtype(); weights != directory.contract()->model.weights_dtype) {
    return {IFAB_FAILED_PRECONDITION, "model.weights_dtype: the model's weights are " + weights +
                                          ", the contract says " + directory.contract()->model.weights_dtype};
  }
  if (config->payload) {
    for (const int32_t layer : config->payload->layers) {
      if (layer >= static_cast<int32_t>(session->layers())) {
        return {IFAB_FAILED_PRECONDITION, "llama.json:payload.layers: " + std::to_string(layer) + ", the model has " +
                                              std::to_string(session->layers()) + " layers"};
      }
    }
    tap->set_hidden_size(session->hidden_size());
  }
  if (status = prove(*session); !status.ok()) return status;
  out = std::make_unique<LlamaBackend>(std::move(*config), std::move(tap), std::move(session));
  return {};
}

}  // namespace
}  // namespace llama

extern const BackendEntry llama_backend;
const BackendEntry llama_backend{llama::kConfigurationFile, "the embedded llama.cpp runtime with a GGUF model",
                                 &llama::recognises, &llama::inspect, &llama::load};

}  // namespace ifab
