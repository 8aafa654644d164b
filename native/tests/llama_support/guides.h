// SPDX-License-Identifier: Apache-2.0
//
// What tests ask of a guide: which texts it allows, and how it is refused.
#pragma once

#include <gtest/gtest.h>

#include <initializer_list>
#include <memory>
#include <string>
#include <string_view>

#include "guide/automaton.h"
#include "guide/gbnf.h"
#include "guide/guide.h"
#include "guide/json_schema.h"
#include "guide/regex.h"

namespace ifab::guide {

inline std::shared_ptr<const Grammar> read(int32_t kind, std::string_view text) {
  if (kind == IFAB_GUIDE_JSON_SCHEMA) return read_json_schema(text);
  return kind == IFAB_GUIDE_REGEX ? read_regex(text) : read_gbnf(text);
}

inline bool accepts(Automaton& automaton, std::string_view text) {
  Automaton::State state = automaton.start();
  for (const char c : text) {
    state = automaton.next(state, static_cast<uint8_t>(c));
    if (state == Automaton::kDead || state == Automaton::kTooLarge) return false;
  }
  return automaton.accepts(state);
}

inline void expect_texts(int32_t kind, std::string_view guide, std::initializer_list<std::string_view> good,
                         std::initializer_list<std::string_view> bad) {
  SCOPED_TRACE(std::string(guide));
  try {
    Automaton automaton(read(kind, guide));
    for (const std::string_view text : good) EXPECT_TRUE(accepts(automaton, text)) << text;
    for (const std::string_view text : bad) EXPECT_FALSE(accepts(automaton, text)) << text;
  } catch (const GuideError& error) {
    ADD_FAILURE() << error.what();
  }
}

inline void expect_refused(int32_t kind, std::string_view guide, ifab_status_t code, std::string_view part) {
  SCOPED_TRACE(std::string(guide.substr(0, 200)));
  Compiler compiler;
  std::shared_ptr<const CompiledGuide> compiled;
  const Status status = compiler.compile(kind, guide, compiled);
  EXPECT_EQ(status.code(), code) << status.message();
  EXPECT_NE(status.message().find(part), std::string::npos) << status.message();
}

inline constexpr auto kSchema = IFAB_GUIDE_JSON_SCHEMA;
inline constexpr auto kRegex = IFAB_GUIDE_REGEX;
inline constexpr auto kGrammar = IFAB_GUIDE_GRAMMAR;

}  // namespace ifab::guide
