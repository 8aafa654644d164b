// SPDX-License-Identifier: Apache-2.0
//
// What an engine builder needs of libllama, as a program, so that no Python process links it.
//
//   ifab_llama_tool quantize IN.gguf OUT.gguf TYPE [THREADS]
//       Writes the model again with weights of TYPE (such as q8_0, q4_k, f16; a wrong one lists all), from weights of
//       any type. Embedding and output weights take TYPE too. THREADS: 2 where it is left out.
//   ifab_llama_tool tokenize MODEL.gguf
//       Reads texts from standard input and writes their token ids to standard output, in order, until the input ends.
//       A text is its size in bytes as a little-endian uint32, then that many bytes of UTF-8 (at most 16 MiB). An
//       answer is the number of ids as a little-endian uint32, then the ids as little-endian int32. The text of a
//       special token becomes that token; no begin or end token is added.
//   ifab_llama_tool describe MODEL.gguf
//       Writes one JSON object: architecture, layers, hidden_size, vocab_size, trained_context_tokens, weights_dtype,
//       weights_bytes, parameters, end_token_ids, begin_token_id (-1: none), runtime {name, version}.
//
// Exit status: 0; 1 with one line on standard error where the work could not be done; 2 for a wrong command line.

#include <algorithm>
#include <array>
#include <cctype>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "llama.h"

namespace {

struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The library says why something failed through its log only; the first such line goes into our message.
std::string first_complaint;

void keep_complaint(ggml_log_level level, const char* text, void*) {
  if (level != GGML_LOG_LEVEL_ERROR || !first_complaint.empty()) return;
  first_complaint = text;
  while (!first_complaint.empty() && std::isspace(static_cast<unsigned char>(first_complaint.back())) != 0) {
    first_complaint.pop_back();
  }
}

[[noreturn]] void fail(const std::string& what) {
  throw Failure(first_complaint.empty() ? what : what + " (" + first_complaint + ")");
}

using Model = std::unique_ptr<llama_model, decltype(&llama_model_free)>;

Model load(const char* path, bool vocabulary_only) {
  llama_model_params params = llama_model_default_params();
  params.vocab_only = vocabulary_only;
  Model model(llama_model_load_from_file(path, params), &llama_model_free);
  if (model == nullptr) fail(std::string("cannot load ") + path);
  return model;
}

struct WeightFormat {
  std::string_view name;
  llama_ftype file_type;
  ggml_type tensor_type;
};

// Every type of three bits and more that libllama can write without an importance matrix. A tensor whose rows do not
// fit the blocks of its type gets a type that it fits.
constexpr std::array kFormats{WeightFormat{"q8_0", LLAMA_FTYPE_MOSTLY_Q8_0, GGML_TYPE_Q8_0},
                              WeightFormat{"q6_k", LLAMA_FTYPE_MOSTLY_Q6_K, GGML_TYPE_Q6_K},
                              WeightFormat{"q5_0", LLAMA_FTYPE_MOSTLY_Q5_0, GGML_TYPE_Q5_0},
                              WeightFormat{"q5_1", LLAMA_FTYPE_MOSTLY_Q5_1, GGML_TYPE_Q5_1},
                              WeightFormat{"q5_k", LLAMA_FTYPE_MOSTLY_Q5_K_S, GGML_TYPE_Q5_K},
                              WeightFormat{"q4_0", LLAMA_FTYPE_MOSTLY_Q4_0, GGML_TYPE_Q4_0},
                              WeightFormat{"q4_1", LLAMA_FTYPE_MOSTLY_Q4_1, GGML_TYPE_Q4_1},
                              WeightFormat{"q4_k", LLAMA_FTYPE_MOSTLY_Q4_K_S, GGML_TYPE_Q4_K},
                              WeightFormat{"iq4_nl", LLAMA_FTYPE_MOSTLY_IQ4_NL, GGML_TYPE_IQ4_NL},
                              WeightFormat{"iq4_xs", LLAMA_FTYPE_MOSTLY_IQ4_XS, GGML_TYPE_IQ4_XS},
                              WeightFormat{"mxfp4", LLAMA_FTYPE_MOSTLY_MXFP4_MOE, GGML_TYPE_MXFP4},
                              WeightFormat{"q3_k", LLAMA_FTYPE_MOSTLY_Q3_K_S, GGML_TYPE_Q3_K},
                              WeightFormat{"iq3_s", LLAMA_FTYPE_MOSTLY_IQ3_S, GGML_TYPE_IQ3_S},
                              WeightFormat{"f16", LLAMA_FTYPE_MOSTLY_F16, GGML_TYPE_F16},
                              WeightFormat{"bf16", LLAMA_FTYPE_MOSTLY_BF16, GGML_TYPE_BF16},
                              WeightFormat{"f32", LLAMA_FTYPE_ALL_F32, GGML_TYPE_F32}};

std::string format_names() {
  std::string names;
  for (const WeightFormat& format : kFormats) names += (names.empty() ? "" : ", ") + std::string(format.name);
  return names;
}

void quantize(const char* in, const char* out, std::string_view type, int threads) {
  const auto* format = std::find_if(kFormats.begin(), kFormats.end(), [&](const auto& f) { return f.name == type; });
  if (format == kFormats.end()) fail("unknown weight type " + std::string(type) + "; one of " + format_names());
  llama_model_quantize_params params = llama_model_quantize_default_params();
  params.nthread = threads;
  params.ftype = format->file_type;
  // A type that is asked for by tensor is not replaced where the rows do not fit its blocks; the file's type is.
  if (constexpr int64_t kSmallBlock = 32; ggml_blck_size(format->tensor_type) <= kSmallBlock) {
    params.output_tensor_type = format->tensor_type;
    params.token_embedding_type = format->tensor_type;
  }
  params.allow_requantize = true;
  params.pure = true;
  if (llama_model_quantize(in, out, &params) != 0) fail(std::string("cannot write ") + out + " from " + in);
}

uint32_t decode_size(const unsigned char* bytes) {
  return uint32_t{bytes[0]} | uint32_t{bytes[1]} << 8 | uint32_t{bytes[2]} << 16 | uint32_t{bytes[3]} << 24;
}

void tokenize(const char* path) {
  constexpr uint32_t kLongest = 16u << 20;
  const Model model = load(path, true);
  const llama_vocab* vocab = llama_model_get_vocab(model.get());
  std::string text;
  std::vector<llama_token> ids;
  unsigned char prefix[4];
  for (size_t index = 0;; ++index) {
    const size_t got = std::fread(prefix, 1, sizeof prefix, stdin);
    if (got == 0) break;
    const uint32_t size = decode_size(prefix);
    if (got != sizeof prefix || size > kLongest)
      fail("text " + std::to_string(index) + " has no size, or one over 16 MiB");
    text.resize(size);
    if (std::fread(text.data(), 1, size, stdin) != size) fail("text " + std::to_string(index) + " ends early");
    ids.resize(size + 1);
    const int32_t count = llama_tokenize(vocab, text.data(), static_cast<int32_t>(size), ids.data(),
                                         static_cast<int32_t>(ids.size()), false, true);
    if (count < 0) fail("text " + std::to_string(index) + " gives more tokens than it has bytes");
    const auto words = static_cast<uint32_t>(count);
    if (std::fwrite(&words, sizeof words, 1, stdout) != 1 ||
        std::fwrite(ids.data(), sizeof(llama_token), words, stdout) != words) {
      fail("cannot write to standard output");
    }
  }
  if (std::fflush(stdout) != 0) fail("cannot write to standard output");
}

std::string meta(const llama_model* model, const char* key) {
  std::array<char, 256> buffer{};
  return llama_model_meta_val_str(model, key, buffer.data(), buffer.size()) < 0 ? "unknown" : buffer.data();
}

// Only names and numbers of the library reach the document; a quote in a name would still not break it.
std::string json_text(std::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    if (static_cast<unsigned char>(c) < 0x20 || static_cast<unsigned char>(c) > 0x7e) continue;
    if (c == '"' || c == '\\') out += '\\';
    out += c;
  }
  return out + '"';
}

void describe(const char* path) {
  const Model model = load(path, false);
  const llama_vocab* vocab = llama_model_get_vocab(model.get());
  std::string dtype = llama_ftype_name(llama_model_ftype(model.get()));
  std::transform(dtype.begin(), dtype.end(), dtype.begin(), [](unsigned char c) { return std::tolower(c); });
  std::string ends;
  for (llama_token id = 0; id < llama_vocab_n_tokens(vocab); ++id) {
    if (llama_vocab_is_eog(vocab, id)) ends += (ends.empty() ? "" : ", ") + std::to_string(id);
  }
  std::printf(
      "{\"architecture\": %s, \"layers\": %d, \"hidden_size\": %d, \"vocab_size\": %d, \"trained_context_tokens\": %d, "
      "\"weights_dtype\": %s, \"weights_bytes\": %llu, \"parameters\": %llu, \"end_token_ids\": [%s], "
      "\"begin_token_id\": %d, \"runtime\": {\"name\": \"llama.cpp\", \"version\": %s}}\n",
      json_text(meta(model.get(), "general.architecture")).c_str(), llama_model_n_layer(model.get()),
      llama_model_n_embd(model.get()), llama_vocab_n_tokens(vocab), llama_model_n_ctx_train(model.get()),
      json_text(dtype).c_str(), static_cast<unsigned long long>(llama_model_size(model.get())),
      static_cast<unsigned long long>(llama_model_n_params(model.get())), ends.c_str(), llama_vocab_bos(vocab),
      json_text(IFAB_LIBLLAMA_VERSION).c_str());
}

int usage() {
  std::fputs(
      "usage: ifab_llama_tool quantize IN.gguf OUT.gguf TYPE [THREADS] | tokenize MODEL.gguf | describe MODEL.gguf\n",
      stderr);
  return 2;
}

int run(const std::vector<std::string>& words) {
  const auto is = [&](std::string_view verb, size_t least, size_t most) {
    return !words.empty() && words[0] == verb && words.size() > least && words.size() <= most + 1;
  };
  if (is("quantize", 3, 4)) {
    const int threads = words.size() == 5 ? std::atoi(words[4].c_str()) : 2;
    if (threads < 1 || threads > 256) return usage();
    quantize(words[1].c_str(), words[2].c_str(), words[3], threads);
  } else if (is("tokenize", 1, 1)) {
    tokenize(words[1].c_str());
  } else if (is("describe", 1, 1)) {
    describe(words[1].c_str());
  } else {
    return usage();
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  llama_log_set(keep_complaint, nullptr);
  try {
    return run(std::vector<std::string>(argv + 1, argv + argc));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "ifab_llama_tool: %s\n", error.what());
    return 1;
  }
}
