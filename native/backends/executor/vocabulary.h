// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "status.h"

namespace ifab::executor {

// A tokenizer as a grammar runtime wants it.
struct Vocabulary {
  std::string tokenizer;            // the text of tokenizer.json
  std::vector<std::string> tokens;  // as written there, by id; empty texts for ids that stand for nothing
};

// Largest tokenizer.json that is read. The largest in use have a quarter of a million tokens and 35 MB.
inline constexpr uint64_t kMaxTokenizerBytes = uint64_t{128} << 20;

// Reads a tokenizer.json: the vocabulary of its model, a map from tokens to ids or a list of (token, score), and its
// added tokens. IFAB_FAILED_PRECONDITION: it cannot be read, is no such document, or has an id that is not below
// `vocab_size`; the message names the field.
Status read_vocabulary(const std::string& path, uint32_t vocab_size, Vocabulary& out);

}  // namespace ifab::executor
