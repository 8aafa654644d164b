// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>
#include <string_view>

#include "grammar.h"

namespace ifab::guide {

// How one character of an expression is written in the text that it constrains.
using WriteCharacters = std::function<Element(GrammarBuilder&, const CharacterSet&)>;

// Reads a regular expression: characters, classes, escapes, groups, alternatives and repetitions. What does not change
// which texts match (named and non-capturing groups, lazy repetitions) is read over; look-around, back references, word
// boundaries and flags are not supported.
//
// The dialect is ECMA-262's, in schemas and in guides, by code points: `.` matches everything but \n, \r, U+2028 and
// U+2029; \d and \w are ASCII; \s is every space of Unicode, U+FEFF and the line ends, and \D, \W, \S are what these
// are not; $ is the end of the text alone. Beside it a group may be named (?P<name>...).
//
// `whole`: the expression matches the whole text, and ^ and $ may stand at its ends. Otherwise, as in a JSON schema, it
// matches somewhere in the text unless they do. Throws GuideError.
Element read_regex(GrammarBuilder& builder, std::string_view text, bool whole, const WriteCharacters& write);

// The grammar of texts that match a regular expression as a whole.
std::shared_ptr<const Grammar> read_regex(std::string_view text);

}  // namespace ifab::guide
