// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string_view>

#include "grammar.h"

namespace ifab::guide {

// Reads a grammar in GBNF, llama.cpp's form of BNF: rules `name ::= ...` of literals in quotes, character classes,
// `.`, references, groups and repetitions, `#` comments; the text begins with the rule `root`. References to tokens
// (`<...>`) are not supported. Throws GuideError.
std::shared_ptr<const Grammar> read_gbnf(std::string_view text);

}  // namespace ifab::guide
