// SPDX-License-Identifier: Apache-2.0
#include "session.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <mutex>
#include <stdexcept>

#include "ggml-backend.h"
#include "log.h"
#include "payload_tap.h"

namespace ifab::llama {
namespace {

// While a session loads, the first complaint of the runtime on this thread: it gives reasons through its log alone.
thread_local std::string* complaint = nullptr;

void take_log_line(ggml_log_level level, const char* text, void*) {
  if (level != GGML_LOG_LEVEL_ERROR && level != GGML_LOG_LEVEL_WARN) return;
  std::string line(text);
  while (!line.empty() && std::isspace(static_cast<unsigned char>(line.back())) != 0) line.pop_back();
  if (line.empty()) return;
  if (level == GGML_LOG_LEVEL_ERROR && complaint != nullptr && complaint->empty()) *complaint = line;
  log(level == GGML_LOG_LEVEL_ERROR ? IFAB_LOG_ERROR : IFAB_LOG_DEBUG, "llama.cpp", line);
}

void start_runtime() {
  static std::once_flag once;
  std::call_once(once, [] {
    llama_log_set(take_log_line, nullptr);
    llama_backend_init();
  });
}

class Complaint {
 public:
  Complaint() { complaint = &text_; }
  ~Complaint() { complaint = nullptr; }
  Complaint(const Complaint&) = delete;
  Complaint& operator=(const Complaint&) = delete;
  std::string with(const std::string& what) const { return text_.empty() ? what : what + " (" + text_ + ")"; }

 private:
  std::string text_;
};

// Threads that are kept between steps, and that sleep instead of spinning while there is no step: the services share
// the processor with the engine.
ggml_threadpool* make_threads(uint32_t count) {
  ggml_threadpool_params params = ggml_threadpool_params_default(static_cast<int>(count));
  params.poll = 0;
  return ggml_threadpool_new(&params);
}

// The first card that the process sees; null where there is none, or the runtime is built without cards.
ggml_backend_dev_t first_card() {
  for (size_t i = 0; i < ggml_backend_dev_count(); ++i) {
    ggml_backend_dev_t device = ggml_backend_dev_get(i);
    if (ggml_backend_dev_type(device) == GGML_BACKEND_DEVICE_TYPE_GPU) return device;
  }
  return nullptr;
}

[[noreturn]] void misuse(const char* what) {
  throw std::logic_error(std::string("llama session: ") + what);
}

}  // namespace

Status Session::open(const Config& config, const std::string& gguf_path, PayloadTap* tap,
                     std::unique_ptr<Session>& out) {
  start_runtime();
  const Complaint complaint_of_this_load;
  std::unique_ptr<Session> session(new Session);
  // A list of devices ends with null; the processor is not named in it.
  std::array<ggml_backend_dev_t, 2> devices{};
  const bool cuda = config.device == Config::Device::kCuda;
  if (cuda && (devices[0] = first_card()) == nullptr) {
    return {IFAB_FAILED_PRECONDITION,
            "llama.json:device is \"cuda\", and this process sees no card, or its runtime is built without CUDA"};
  }
  llama_model_params params = llama_model_default_params();
  params.devices = devices.data();
  params.n_gpu_layers = cuda ? -1 : 0;
  params.split_mode = LLAMA_SPLIT_MODE_NONE;
  session->model_.reset(llama_model_load_from_file(gguf_path.c_str(), params));
  if (session->model_ == nullptr) {
    return {IFAB_FAILED_PRECONDITION, complaint_of_this_load.with("cannot load the model " + gguf_path)};
  }
  const llama_model* model = session->model_.get();
  if (!llama_model_has_decoder(model) || llama_model_has_encoder(model) || llama_model_is_recurrent(model) ||
      llama_model_is_hybrid(model) || llama_model_is_diffusion(model) || llama_model_n_swa(model) != 0) {
    return {IFAB_FAILED_PRECONDITION,
            gguf_path + " is not a decoder with full attention, the kind of model that this backend runs"};
  }
  session->vocab_size_ = static_cast<uint32_t>(llama_vocab_n_tokens(session->vocab()));
  session->hidden_size_ = static_cast<uint32_t>(llama_model_n_embd(model));
  session->layers_ = static_cast<uint32_t>(llama_model_n_layer(model));
  if (Status status = session->make_context(config, tap); !status.ok()) {
    return {status.code(), complaint_of_this_load.with(status.message())};
  }
  out = std::move(session);
  return {};
}

Status Session::make_context(const Config& config, PayloadTap* tap) {
  streams_ = config.streams();
  sequences_ = config.sequences();
  capacity_ = config.step_token_budget;
  most_outputs_ = std::max(sequences_, kBlockTokens);
  const uint32_t each = (config.sequence_tokens + kCacheGranule - 1) / kCacheGranule * kCacheGranule;
  const uint64_t cells = streams_ ? uint64_t{each} * sequences_ : config.pool_tokens;
  if (cells > UINT32_MAX)
    return {IFAB_FAILED_PRECONDITION, "the cache would have more cells than the runtime can count"};

  llama_context_params params = llama_context_default_params();
  params.n_ctx = static_cast<uint32_t>(cells);
  params.n_seq_max = sequences_;
  params.n_batch = capacity_;
  params.n_ubatch = capacity_;
  params.n_outputs_max = most_outputs_;
  params.n_threads = static_cast<int32_t>(config.threads);
  params.n_threads_batch = static_cast<int32_t>(config.batch_threads);
  params.kv_unified = !streams_;
  params.offload_kqv = params.op_offload = config.device == Config::Device::kCuda;
  params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
  params.type_k = params.type_v = config.cache_type == Config::CacheType::kF16 ? GGML_TYPE_F16 : GGML_TYPE_Q8_0;
  params.no_perf = true;
  params.abort_callback = [](void* flag) {
    return static_cast<std::atomic<bool>*>(flag)->load(std::memory_order_relaxed);
  };
  params.abort_callback_data = &interrupted_;
  if (tap != nullptr) {
    params.cb_eval = &PayloadTap::on_tensor;
    params.cb_eval_user_data = tap;
  }
  context_.reset(llama_init_from_model(model_.get(), params));
  if (context_ == nullptr)
    return {IFAB_RESOURCE_EXHAUSTED, "cannot allocate the cache of " + std::to_string(cells) + " tokens"};
  const uint32_t real = streams_ ? llama_n_ctx_seq(context_.get()) : llama_n_ctx(context_.get());
  const uint32_t wanted = streams_ ? each : config.pool_tokens;
  if (real != wanted || llama_n_batch(context_.get()) != capacity_ || llama_n_seq_max(context_.get()) != sequences_) {
    return {IFAB_FAILED_PRECONDITION, "the runtime made a cache of " + std::to_string(real) + " tokens where " +
                                          std::to_string(wanted) + " are configured"};
  }
  threads_.reset(make_threads(config.threads));
  if (config.batch_threads != config.threads) batch_threads_.reset(make_threads(config.batch_threads));
  if (threads_ == nullptr || (config.batch_threads != config.threads && batch_threads_ == nullptr)) {
    return {IFAB_RESOURCE_EXHAUSTED, "cannot start the threads of the runtime"};
  }
  llama_attach_threadpool(context_.get(), threads_.get(), batch_threads_ ? batch_threads_.get() : threads_.get());
  memory_ = llama_get_memory(context_.get());
  batch_ = llama_batch_init(static_cast<int32_t>(capacity_), 0, 1);
  decoded_.resize(capacity_);
  rows_left_.reserve(sequences_);
  return {};
}

Session::~Session() {
  context_.reset();
  if (batch_.token != nullptr) llama_batch_free(batch_);
}

std::string Session::weights_dtype() const {
  std::string name = llama_ftype_name(llama_model_ftype(model_.get()));
  name.resize(std::min(name.find(' '), name.size()));
  std::transform(name.begin(), name.end(), name.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return name;
}

const llama_vocab* Session::vocab() const {
  return llama_model_get_vocab(model_.get());
}

std::vector<std::string> Session::token_pieces() const {
  std::vector<std::string> pieces(vocab_size_);
  std::string buffer(256, '\0');
  for (uint32_t id = 0; id < vocab_size_; ++id) {
    const auto token = static_cast<llama_token>(id);
    if (llama_vocab_is_control(vocab(), token) || llama_vocab_is_eog(vocab(), token)) continue;
    int32_t size = llama_token_to_piece(vocab(), token, buffer.data(), static_cast<int32_t>(buffer.size()), 0, false);
    if (size < 0) {
      buffer.resize(static_cast<size_t>(-size));
      size = llama_token_to_piece(vocab(), token, buffer.data(), static_cast<int32_t>(buffer.size()), 0, false);
    }
    pieces[id].assign(buffer, 0, static_cast<size_t>(std::max(size, 0)));
  }
  return pieces;
}

void Session::check_sequence(int32_t sequence) const {
  if (sequence < 0 || static_cast<uint32_t>(sequence) >= sequences_) misuse("sequence id out of range");
}

void Session::clear_batch() {
  batch_.n_tokens = 0;
  outputs_ = 0;
}

uint32_t Session::add_row(int32_t sequence, int32_t token, uint32_t position, bool output) {
  check_sequence(sequence);
  if (batch_room() == 0) misuse("batch is full");
  if (token < 0 || static_cast<uint32_t>(token) >= vocab_size_) misuse("token out of range");
  if (output && ++outputs_ > most_outputs_) misuse("too many rows with output");
  const uint32_t row = rows();
  batch_.token[row] = token;
  batch_.pos[row] = static_cast<llama_pos>(position);
  batch_.n_seq_id[row] = 1;
  batch_.seq_id[row][0] = sequence;
  batch_.logits[row] = output ? 1 : 0;
  batch_.n_tokens = static_cast<int32_t>(row + 1);
  return row;
}

Session::Shape Session::shape() {
  rows_left_.clear();
  for (uint32_t row = 0; row < rows(); ++row) {
    const int32_t sequence = batch_.seq_id[row][0];
    if (rows_left_.empty() || rows_left_.back().first != sequence) rows_left_.emplace_back(sequence, 0);
    ++rows_left_.back().second;
  }
  Shape shape{static_cast<uint32_t>(rows_left_.size()), streams_ ? 0u : 1u, copies_};
  if (!streams_) return shape;
  const auto is_left = [](const auto& sequence) { return sequence.second > 0; };
  for (auto first = rows_left_.begin();; ++shape.reads) {
    first = std::find_if(first, rows_left_.end(), is_left);
    if (first == rows_left_.end()) return shape;
    uint32_t fewest = first->second;
    auto end = first + 1;
    for (; end != rows_left_.end() && end->second > 0 && end->first == (end - 1)->first + 1; ++end) {
      fewest = std::min(fewest, end->second);
    }
    for (auto each = first; each != end; ++each) each->second -= fewest;
  }
}

Session::Outcome Session::decode() {
  if (rows() == 0) misuse("empty batch");
  std::fill(decoded_.begin(), decoded_.end(), uint8_t{0});
  copies_ = 0;
  switch (llama_decode(context_.get(), batch_)) {
    case 0:
      llama_synchronize(context_.get());
      for (uint32_t row = 0; row < rows(); ++row) decoded_[row] = static_cast<uint8_t>(batch_.logits[row]);
      return Outcome::kDone;
    case 1:
      return Outcome::kNoRoom;
    case 2:
      return Outcome::kInterrupted;
    default:
      return Outcome::kFailed;
  }
}

std::span<const float> Session::logits(uint32_t row) const {
  if (row >= rows() || decoded_[row] == 0) misuse("row without logits");
  const float* values = llama_get_logits_ith(context_.get(), static_cast<int32_t>(row));
  if (values == nullptr) misuse("logits are missing");
  return {values, vocab_size_};
}

uint32_t Session::length(int32_t sequence) const {
  check_sequence(sequence);
  return static_cast<uint32_t>(llama_memory_seq_pos_max(memory_, sequence) + 1);
}

void Session::copy(int32_t from, int32_t to, uint32_t tokens) {
  check_sequence(from);
  check_sequence(to);
  if (from == to) misuse("copy of a sequence onto itself");
  if (tokens == 0 || tokens > length(from)) misuse("copy of more tokens than there are");
  const auto end = static_cast<llama_pos>(tokens);
  if (streams_) {
    // Whole streams only; what the copy has too much is taken off again.
    llama_memory_seq_cp(memory_, from, to, -1, -1);
    ++copies_;
    llama_memory_seq_rm(memory_, to, end, -1);
  } else {
    llama_memory_seq_rm(memory_, to, -1, -1);
    llama_memory_seq_cp(memory_, from, to, 0, end);
  }
}

void Session::trim(int32_t sequence, uint32_t tokens) {
  check_sequence(sequence);
  llama_memory_seq_rm(memory_, sequence, static_cast<llama_pos>(tokens), -1);
}

}  // namespace ifab::llama
