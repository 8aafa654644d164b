// SPDX-License-Identifier: Apache-2.0
#include "vocabulary.h"

#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <system_error>
#include <utility>

namespace ifab::executor {
namespace {

using Json = nlohmann::json;

Status refused(const std::string& what) {
  return {IFAB_FAILED_PRECONDITION, "tokenizer.json: " + what};
}

Status put(Vocabulary& vocabulary, const Json& id, const Json& token, const char* field) {
  if (!id.is_number_integer() || !token.is_string()) {
    return refused(std::string(field) + ": neither tokens nor ids, expected both");
  }
  const int64_t value = id.get<int64_t>();
  if (value < 0 || value >= static_cast<int64_t>(vocabulary.tokens.size())) {
    return refused(std::string(field) + ": id " + std::to_string(value) + ", expected 0 to " +
                   std::to_string(vocabulary.tokens.size() - 1));
  }
  vocabulary.tokens[static_cast<size_t>(value)] = token.get<std::string>();
  return {};
}

Status put_model(Vocabulary& vocabulary, const Json& vocab) {
  if (vocab.is_object()) {
    for (const auto& [token, id] : vocab.items()) {
      if (Status status = put(vocabulary, id, Json(token), "model.vocab"); !status.ok()) return status;
    }
    return {};
  }
  if (!vocab.is_array()) return refused("model.vocab: absent, expected a map or a list of tokens");
  int64_t id = 0;
  for (const Json& entry : vocab) {
    if (!entry.is_array() || entry.empty()) return refused("model.vocab: expected pairs of token and score");
    if (Status status = put(vocabulary, Json(id++), entry[0], "model.vocab"); !status.ok()) return status;
  }
  return {};
}

}  // namespace

Status read_vocabulary(const std::string& path, uint32_t vocab_size, Vocabulary& out) {
  std::error_code error;
  const uint64_t size = std::filesystem::file_size(path, error);
  if (error) return refused(error.message());
  if (size > kMaxTokenizerBytes) {
    return refused(std::to_string(size) + " bytes, expected at most " + std::to_string(kMaxTokenizerBytes));
  }
  std::ifstream file(path, std::ios::binary);
  Vocabulary vocabulary;
  vocabulary.tokenizer.assign(std::istreambuf_iterator<char>(file), {});
  if (!file.good() && !file.eof()) return refused("it cannot be read");
  const Json document = Json::parse(vocabulary.tokenizer, nullptr, false);
  if (!document.is_object()) return refused("not a JSON object");
  vocabulary.tokens.resize(vocab_size);
  const Json model = document.value("model", Json::object());
  if (Status status = put_model(vocabulary, model.is_object() ? model.value("vocab", Json()) : Json()); !status.ok()) {
    return status;
  }
  for (const Json& added : document.value("added_tokens", Json::array())) {
    if (!added.is_object()) return refused("added_tokens: expected objects");
    if (Status status = put(vocabulary, added.value("id", Json()), added.value("content", Json()), "added_tokens");
        !status.ok()) {
      return status;
    }
  }
  out = std::move(vocabulary);
  return {};
}

}  // namespace ifab::executor
