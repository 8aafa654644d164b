// SPDX-License-Identifier: Apache-2.0
#include "tiny_engine.h"

#include <array>
#include <cmath>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include "ggml.h"
#include "gguf.h"
#include "sha256.h"

namespace ifab::test {
namespace {

using Json = nlohmann::ordered_json;

constexpr uint32_t kFeedForward = 256;
constexpr uint32_t kHeads = 2;
constexpr uint32_t kHeadValues = kTinyHidden / kHeads;
constexpr const char* kNotApplicable = "not_applicable";

// Tokens of more than a byte, so that text can be read in several ways and characters split between tokens.
constexpr std::array<std::pair<const char*, const char*>, 30> kMerges{
    {{"t", "h"},           {"h", "e"},       {"i", "n"},  {"e", "r"},   {"a", "n"},       {"1", "2"},
     {"0", "0"},           {"\"", ":"},      {"{", "\""}, {"\"", "}"},  {"\"", ","},      {"[", "\""},
     {"\"", "]"},          {"t", "r"},       {"u", "e"},  {"tr", "ue"}, {"f", "a"},       {"l", "s"},
     {"fa", "ls"},         {"n", "u"},       {"l", "l"},  {"nu", "ll"}, {"\xC3", "\xA4"}, {"\xE2", "\x82"},
     {"\xE2\x82", "\xAC"}, {"\xF0", "\x9F"}, {"2", "0"},  {"-", "1"},   {".", "5"},       {"a", "b"}}};

// The form that byte-level vocabularies are stored in: each byte as a printable character.
std::string stored(const std::string& bytes) {
  std::string out;
  for (const char c : bytes) {
    const auto byte = static_cast<unsigned char>(c);
    uint32_t point = byte;
    const bool printable = (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
    if (!printable) point = byte < 33 ? 256 + byte : byte < 161 ? 256 + 33 + (byte - 127u) : 256 + 33 + 34;
    if (point < 0x80) {
      out += static_cast<char>(point);
    } else {
      out += static_cast<char>(0xC0 | (point >> 6));
      out += static_cast<char>(0x80 | (point & 0x3F));
    }
  }
  return out;
}

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9E3779B97F4A7C15u + 1) {}
  float normal() {
    float sum = 0;
    for (int i = 0; i < 12; ++i) sum += uniform();
    return sum - 6.0f;
  }

 private:
  float uniform() {
    state_ ^= state_ << 13;
    state_ ^= state_ >> 7;
    state_ ^= state_ << 17;
    return static_cast<float>(state_ >> 40) / 16777216.0f;
  }
  uint64_t state_;
};

class ModelWriter {
 public:
  explicit ModelWriter(const TinyEngine& engine) : engine_(engine), random_(engine.seed) {
    const ggml_init_params params{size_t{8} << 20, nullptr, false};
    tensors_.reset(ggml_init(params));
    file_.reset(gguf_init_empty());
  }

  void write(const std::filesystem::path& path) {
    hyperparameters();
    tokenizer();
    weights();
    if (!gguf_write_to_file(file_.get(), path.c_str(), false))
      throw std::runtime_error("cannot write " + path.string());
  }

 private:
  void hyperparameters() {
    gguf_context* file = file_.get();
    gguf_set_val_str(file, "general.architecture", "llama");
    gguf_set_val_str(file, "general.name", "tiny");
    gguf_set_val_u32(file, "general.file_type", 7);
    gguf_set_val_u32(file, "llama.vocab_size", tiny_vocab_size());
    gguf_set_val_u32(file, "llama.context_length", 8192);
    gguf_set_val_u32(file, "llama.embedding_length", kTinyHidden);
    gguf_set_val_u32(file, "llama.block_count", kTinyLayers);
    gguf_set_val_u32(file, "llama.feed_forward_length", kFeedForward);
    gguf_set_val_u32(file, "llama.attention.head_count", kHeads);
    gguf_set_val_u32(file, "llama.attention.head_count_kv", 1);
    gguf_set_val_u32(file, "llama.rope.dimension_count", kHeadValues);
    gguf_set_val_f32(file, "llama.attention.layer_norm_rms_epsilon", 1e-5f);
  }

  void tokenizer() {
    std::vector<std::string> tokens{"<|endoftext|>", "<|im_start|>", "<|im_end|>"};
    std::vector<int32_t> types(3, 3);
    for (const std::string& piece : tiny_pieces()) {
      if (!piece.empty()) tokens.push_back(stored(piece));
    }
    types.resize(tokens.size(), 1);
    std::vector<std::string> merges;
    for (const auto& [left, right] : kMerges) merges.push_back(stored(left) + " " + stored(right));
    gguf_context* file = file_.get();
    gguf_set_val_str(file, "tokenizer.ggml.model", "gpt2");
    gguf_set_val_str(file, "tokenizer.ggml.pre", "smollm");
    set_texts("tokenizer.ggml.tokens", tokens);
    set_texts("tokenizer.ggml.merges", merges);
    gguf_set_arr_data(file, "tokenizer.ggml.token_type", GGUF_TYPE_INT32, types.data(), types.size());
    gguf_set_val_u32(file, "tokenizer.ggml.bos_token_id", 1);
    gguf_set_val_u32(file, "tokenizer.ggml.eos_token_id", static_cast<uint32_t>(kTinyEnd));
  }

  void set_texts(const char* key, const std::vector<std::string>& texts) {
    std::vector<const char*> pointers;
    for (const std::string& text : texts) pointers.push_back(text.c_str());
    gguf_set_arr_str(file_.get(), key, pointers.data(), pointers.size());
  }

  void weights() {
    const auto hidden = int64_t{kTinyHidden};
    const auto vocab = static_cast<int64_t>(tiny_vocab_size());
    ggml_tensor* embeddings = matrix("token_embd.weight", hidden, vocab, 1.0f);
    if (engine_.broken_token >= 0) {
      // The first two bytes of a block are its scale, in half precision: this one is infinite.
      auto* row = static_cast<char*>(embeddings->data) + static_cast<size_t>(engine_.broken_token) * embeddings->nb[1];
      row[0] = 0x00;
      row[1] = 0x7C;
    }
    matrix("output.weight", hidden, vocab, 0.25f);
    norm("output_norm.weight");
    for (uint32_t layer = 0; layer < kTinyLayers; ++layer) {
      const std::string block = "blk." + std::to_string(layer) + ".";
      const float scale = 1.5f / std::sqrt(static_cast<float>(kTinyHidden));
      norm(block + "attn_norm.weight");
      norm(block + "ffn_norm.weight");
      matrix(block + "attn_q.weight", hidden, hidden, scale);
      matrix(block + "attn_k.weight", hidden, kHeadValues, scale);
      matrix(block + "attn_v.weight", hidden, kHeadValues, scale);
      matrix(block + "attn_output.weight", hidden, hidden, scale);
      matrix(block + "ffn_gate.weight", hidden, kFeedForward, scale);
      matrix(block + "ffn_up.weight", hidden, kFeedForward, scale);
      matrix(block + "ffn_down.weight", kFeedForward, hidden, scale);
    }
  }

  ggml_tensor* matrix(const std::string& name, int64_t columns, int64_t rows, float scale) {
    ggml_tensor* tensor = ggml_new_tensor_2d(tensors_.get(), GGML_TYPE_Q8_0, columns, rows);
    std::vector<float> values(static_cast<size_t>(columns * rows));
    for (float& value : values) value = random_.normal() * scale;
    ggml_quantize_chunk(GGML_TYPE_Q8_0, values.data(), tensor->data, 0, rows, columns, nullptr);
    add(tensor, name);
    return tensor;
  }

  void norm(const std::string& name) {
    ggml_tensor* tensor = ggml_new_tensor_1d(tensors_.get(), GGML_TYPE_F32, kTinyHidden);
    auto* values = static_cast<float*>(tensor->data);
    for (uint32_t i = 0; i < kTinyHidden; ++i) values[i] = 1.0f;
    add(tensor, name);
  }

  void add(ggml_tensor* tensor, const std::string& name) {
    ggml_set_name(tensor, name.c_str());
    gguf_add_tensor(file_.get(), tensor);
  }

  struct Free {
    void operator()(ggml_context* context) const { ggml_free(context); }
    void operator()(gguf_context* file) const { gguf_free(file); }
  };

  const TinyEngine& engine_;
  Random random_;
  std::unique_ptr<ggml_context, Free> tensors_;
  std::unique_ptr<gguf_context, Free> file_;
};

void write_text(const std::filesystem::path& path, const std::string& text) {
  std::ofstream out(path, std::ios::binary);
  out << text;
  if (!out.flush()) throw std::runtime_error("cannot write " + path.string());
}

std::string hexadecimal(const std::string& bytes) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string out;
  for (const char c : bytes) {
    out += kDigits[static_cast<unsigned char>(c) >> 4];
    out += kDigits[static_cast<unsigned char>(c) & 15];
  }
  return out;
}

std::string read_text(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}

Json configuration(const TinyEngine& engine) {
  Json payload = kNotApplicable;
  if (!engine.payload_layers.empty()) payload = {{"layers", engine.payload_layers}, {"dtype", engine.payload_dtype}};
  return {{"llama_version", 1},
          {"gguf", "model.gguf"},
          {"device", "cpu"},
          {"kv_layout", engine.layout},
          {"slots", engine.slots},
          {"resident_heads", engine.resident_heads},
          {"sequence_tokens", engine.sequence_tokens},
          {"pool_tokens", engine.pool_tokens > 0 ? Json(engine.pool_tokens) : Json(kNotApplicable)},
          {"step_token_budget", engine.step_token_budget},
          {"threads", engine.threads},
          {"batch_threads", engine.threads},
          {"kv_type", "f16"},
          {"reproducible", engine.reproducible},
          {"payload", std::move(payload)}};
}

Json contract(const TinyEngine& engine, const Json& files) {
  const bool generates = engine.max_output_tokens > 0;
  Json payload = kNotApplicable;
  if (!engine.payload_layers.empty()) {
    Json shape = Json::array();
    if (engine.payload_layers.size() > 1) shape.push_back(engine.payload_layers.size());
    shape.push_back(kTinyHidden);
    payload = {{"shape", std::move(shape)}, {"dtype", engine.payload_dtype}, {"layers", engine.payload_layers}};
  }
  return {{"contract_version", 1},
          {"engine_id", "tiny-llama-test"},
          {"files", files},
          {"model",
           {{"architecture", "llama"},
            {"layers", kTinyLayers},
            {"hidden_size", kTinyHidden},
            {"vocab_size", tiny_vocab_size()},
            {"weights_dtype", "q8_0"},
            {"activations_dtype", "float32"},
            {"kv_cache_dtype", "float16"}}},
          {"tokenizer", {{"file", "tokenizer.json"}, {"end_token_ids", generates ? Json{kTinyEnd} : Json::array()}}},
          {"card",
           {{"family", "cpu"},
            {"compute_capability", kNotApplicable},
            {"memory_bytes", 100'000'000},
            {"count", 1},
            {"tensor_parallel", 1},
            {"pipeline_parallel", 1}}},
          {"limits",
           {{"max_input_tokens", engine.max_input_tokens},
            {"max_sequence_tokens", engine.sequence_tokens},
            {"max_output_tokens", engine.max_output_tokens},
            {"slots", engine.slots},
            {"step_token_budget", engine.step_token_budget},
            {"built_step_token_budget", engine.step_token_budget},
            {"kv_block_tokens", 64},
            {"kv_cache_memory_fraction", kNotApplicable},
            {"host_cache_bytes", 0},
            {"beams", 1},
            {"longest_step_ms", 60'000}}},
          {"capabilities",
           {{"guided_decoding", generates ? Json{"json_schema", "regex", "grammar"} : Json::array()},
            {"samples_max", generates ? engine.slots : 1},
            {"scoring", true},
            {"reproducible", engine.reproducible},
            {"payload", std::move(payload)}}},
          {"runtime", {{"name", "llama.cpp"}, {"version", IFAB_LIBLLAMA_VERSION}}},
          {"build",
           {{"tool", "tiny_engine"},
            {"tool_version", "1"},
            {"flags", Json::array()},
            {"calibration", kNotApplicable},
            {"date", "2026-11-29"}}}};
}

}  // namespace

TinyEngine TinyEngine::mining(std::vector<int32_t> layers) {
  TinyEngine engine;
  engine.resident_heads = 0;
  engine.sequence_tokens = 256;
  engine.max_input_tokens = 128;
  engine.max_output_tokens = 0;
  engine.payload_layers = std::move(layers);
  return engine;
}

TinyEngine TinyEngine::unified(uint32_t pool_tokens) {
  TinyEngine engine;
  engine.layout = "unified";
  engine.pool_tokens = pool_tokens;
  engine.reproducible = false;
  return engine;
}

std::vector<std::string> tiny_pieces() {
  std::vector<std::string> pieces(static_cast<size_t>(kTinyFirstByte));
  for (int byte = 0; byte < 256; ++byte) pieces.emplace_back(1, static_cast<char>(byte));
  for (const auto& [left, right] : kMerges) pieces.push_back(std::string(left) + right);
  return pieces;
}

uint32_t tiny_vocab_size() {
  return static_cast<uint32_t>(kTinyFirstByte) + 256 + static_cast<uint32_t>(kMerges.size());
}

void write_tiny_directory(const std::filesystem::path& directory, const TinyEngine& engine) {
  std::filesystem::create_directories(directory);
  ModelWriter(engine).write(directory / "model.gguf");
  write_text(directory / "llama.json", configuration(engine).dump(1));
  // No document that a tokenizer would read: the bytes of each token, for tests that read what was generated.
  Json pieces = Json::array();
  for (const std::string& piece : tiny_pieces()) pieces.push_back(hexadecimal(piece));
  write_text(directory / "tokenizer.json", Json{{"pieces", std::move(pieces)}}.dump());
  Json files = Json::array();
  for (const char* name : {"llama.json", "model.gguf", "tokenizer.json"}) {
    const std::string bytes = read_text(directory / name);
    files.push_back({{"path", name}, {"size_bytes", bytes.size()}, {"sha256", sha256_hex(bytes)}});
  }
  write_text(directory / "contract.json", contract(engine, files).dump(1));
}

}  // namespace ifab::test
