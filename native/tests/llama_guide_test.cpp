// SPDX-License-Identifier: Apache-2.0
//
// Guides: which texts they allow, what they refuse and how they say so, and what keeps them small. Schemas are in
// llama_schema_test.cpp.
#include <gtest/gtest.h>

#include <array>
#include <ctime>
#include <random>

#include "llama_support/driver.h"
#include "llama_support/guides.h"

namespace ifab::guide {
namespace {

TEST(Regex, AllowsWhatMatchesAsAWhole) {
  expect_texts(kRegex, "abc", {"abc"}, {"", "ab", "abcd", "xabc"});
  expect_texts(kRegex, "a|bc|", {"a", "bc", ""}, {"b", "abc"});
  expect_texts(kRegex, "(ab)*c+", {"c", "ababcc"}, {"ab", "abac"});
  expect_texts(kRegex, "[a-c]{2,3}", {"ab", "cab"}, {"a", "abca", "ad"});
  expect_texts(kRegex, "x{3}y{2,}z?", {"xxxyy", "xxxyyyyz"}, {"xxyy", "xxxy", "xxxyyzz"});
  expect_texts(kRegex, "[^0-9\\n]+", {"abc", "\xC3\xA4\xE2\x82\xAC\xF0\x9F\x98\x80"}, {"a1", "a\n", "", "\xC3"});
  expect_texts(kRegex, "\\d{4}-\\d\\d", {"2026-11"}, {"2026-1", "26-11"});
  expect_texts(kRegex, "^a.c$",
               {"abc",
                "a\xE2\x82\xAC"
                "c"},
               {"a\nc", "ac"});
  expect_texts(kRegex, "(?:a|(?P<n>b))+?", {"a", "abba"}, {"", "c"});
  expect_texts(kRegex, "[\\]a-]+", {"]", "a-]"}, {"b"});
  expect_texts(kRegex, "\\x41\\u20ac\\.\\[", {"A\xE2\x82\xAC.["},
               {"A\xE2\x82\xAC"
                "a["});
  expect_texts(kRegex, "[\\w-]+\\s\\S", {"a_1-b c"}, {"a", "a  "});
  expect_texts(kRegex, "(a?){3}(b*)*", {"", "aa", "aaabbb"}, {"aaaa", "ba"});
  expect_texts(kRegex, "[\xC3\xA4-\xC3\xB6]", {"\xC3\xA5"}, {"a", "\xC3\xB7"});
}

TEST(Regex, RefusesByNameWhatItDoesNotEnforce) {
  for (const char* text : {"(?=a)b", "(?!a)b", "(?<=a)b", "(?i)a", "a\\b", "(a)\\1", "\\p{L}", "a++", "a^b", "a$b",
                           "(^a)", "[[:alpha:]]", "[]a]", "[^]a]"}) {
    expect_refused(kRegex, text, IFAB_UNIMPLEMENTED, "not supported");
  }
  for (const char* text : {"(a", "a)", "[a", "a{2,1}", "*a", "a**", "\\x4", "[z-a]", "a{", "(?<n", "\\ud800"}) {
    expect_refused(kRegex, text, IFAB_INVALID_ARGUMENT, "guide: ");
  }
  expect_refused(kRegex, "a{99999}", IFAB_INVALID_ARGUMENT, "10000");
}

TEST(Gbnf, AllowsWhatTheGrammarDerives) {
  expect_texts(kGrammar, "root ::= \"a\" b* # tail\nb ::= [x-z] | \"\\n\"", {"a", "axyz\n"}, {"", "ab"});
  expect_texts(kGrammar, "root ::= s\ns ::= \"(\" s \")\" s | \"\"", {"", "()", "(())()"}, {"(", "())"});
  expect_texts(kGrammar, "root ::= (\"yes\" |\n  \"no\") [.!]?", {"yes", "no!"}, {"yesno", "maybe"});
  expect_texts(kGrammar, "root ::= [^\"\\\\] .{2} \"\\x41\\u00e4\"",
               {"x\xE2\x82\xAC"
                "bA\xC3\xA4"},
               {"\"bbA\xC3\xA4"});
  expect_texts(kGrammar, "root ::= a{2,3}\na ::= \"b\"", {"bb", "bbb"}, {"b", "bbbb"});
  expect_texts(kGrammar, "root ::= ((\"a\"*)*)*", {"", "aaa"}, {"b"});
  expect_texts(kGrammar, "expr ::= term (\"+\" term)*\nterm ::= [0-9]+ | \"(\" expr \")\"\nroot ::= expr", {"1+(2+34)"},
               {"1+", "()"});
}

TEST(Gbnf, RefusesWhatIsNoGrammarWithThePlace) {
  expect_refused(kGrammar, "root ::= foo", IFAB_INVALID_ARGUMENT, "foo");
  expect_refused(kGrammar, "start ::= \"a\"", IFAB_INVALID_ARGUMENT, "root");
  expect_refused(kGrammar, "root ::= \"a\"\nroot ::= \"b\"", IFAB_INVALID_ARGUMENT, "line 2");
  expect_refused(kGrammar, "root = \"a\"", IFAB_INVALID_ARGUMENT, "column 6");
  expect_refused(kGrammar, "root ::= \"a", IFAB_INVALID_ARGUMENT, "ends");
  expect_refused(kGrammar, "root ::= <[7]>", IFAB_UNIMPLEMENTED, "token");
  expect_refused(kGrammar, "root ::= root \"a\" | \"b\"", IFAB_INVALID_ARGUMENT, "left recursion");
  expect_refused(kGrammar, "root ::= e? root \"a\" | \"b\"\ne ::= \"x\"", IFAB_INVALID_ARGUMENT, "left recursion");
  expect_refused(kGrammar, "root ::= a\na ::= b \"x\"\nb ::= c\nc ::= a \"y\" | \"z\"", IFAB_INVALID_ARGUMENT,
                 "left recursion");
  expect_refused(kGrammar, "root ::= \"a\" root", IFAB_INVALID_ARGUMENT, "end");
  expect_refused(kGrammar, "", IFAB_INVALID_ARGUMENT, "root");
}

TEST(Regex, ClassesAreThoseOfEcma262) {
  for (const char* space : {" ", "\t", "\v", "\xC2\xA0", "\xE1\x9A\x80", "\xE2\x80\x83", "\xE2\x80\xA8", "\xE2\x80\xA9",
                            "\xE2\x80\xAF", "\xE2\x81\x9F", "\xE3\x80\x80", "\xEF\xBB\xBF"}) {
    const std::string quoted = "\"" + std::string(space) + "\"";
    expect_texts(kRegex, "\\s", {space}, {});
    expect_texts(kRegex, "\\S", {}, {space});
    expect_texts(kRegex, "[^\\s]", {}, {space});
    expect_texts(kSchema, R"({"type": "string", "pattern": "^\\S$"})", {}, {quoted});
  }
  // Neighbours of the spaces, letters and digits beyond ASCII.
  expect_texts(kRegex, "\\S{5}", {"\xE2\x80\x8B\xE2\x80\xA7\xE2\x80\xAA\xC2\x85x"}, {});
  expect_texts(kRegex, "\\D\\W", {"\xD9\xA3\xC3\xA4"}, {"1\xC3\xA4", "a_"});
  expect_texts(kRegex, ".", {"\xC2\x85"}, {"\n", "\r", "\xE2\x80\xA8", "\xE2\x80\xA9"});
}

// ---- Bounds

TEST(Guides, AreReadInBoundedTimeHoweverTheyAreMadeUp) {
  const std::clock_t start = std::clock();  // of this process: the machine may have much else to do
  std::string deep;
  for (int i = 0; i < 100'000; ++i) deep += '(';
  expect_refused(kRegex, deep, IFAB_INVALID_ARGUMENT, "deeply");
  expect_refused(kGrammar, "root ::= " + deep, IFAB_INVALID_ARGUMENT, "deeply");
  std::string wide;
  for (int i = 0; i < 12; ++i) wide += "a{9000}";
  expect_refused(kRegex, wide, IFAB_INVALID_ARGUMENT, "large");
  std::string chain = "root ::= r0\n";
  for (int i = 0; i < 10'000; ++i) chain += "r" + std::to_string(i) + " ::= r" + std::to_string(i + 1) + "\n";
  Compiler compiler;
  std::shared_ptr<const CompiledGuide> compiled;
  EXPECT_TRUE(compiler.compile(kGrammar, chain + "r10000 ::= \"a\"", compiled).ok());
  const std::string schema_deep(100'000, '[');
  expect_refused(kSchema, schema_deep, IFAB_INVALID_ARGUMENT, "guide");
  EXPECT_LT(std::clock() - start, 20 * CLOCKS_PER_SEC);
}

TEST(Guides, AnAmbiguousGrammarEndsInAnErrorAndNotInAllMemory) {
  // Every "a" doubles the ways to read what is there.
  Automaton automaton(read_gbnf("root ::= \"a\" root \"b\" | \"a\" root \"c\" | \"a\" root \"d\" \"e\" | \"x\""));
  Automaton::State state = automaton.start();
  int letters = 0;
  while (state != Automaton::kTooLarge && letters < 100'000) {
    state = automaton.next(state, 'a');
    ++letters;
  }
  EXPECT_EQ(state, Automaton::kTooLarge);
  EXPECT_LT(automaton.size(), Automaton::kMostStates);
}

TEST(Guides, TextsOfAGrammarAreFoundByWalkingIt) {
  // Whatever a walk along allowed bytes makes, another reading of the same grammar accepts.
  constexpr std::array<std::pair<int32_t, const char*>, 6> kGuides{
      {{kSchema,
        R"({"type": "object", "properties": {"a": {"type": "array", "items": {"type": "number", "minimum": -3, "maximum": 30}, "maxItems": 3}, "b": {"type": "string", "maxLength": 4}}, "required": ["a"]})"},
       {kSchema, R"({"enum": [1, "two", [3]]})"},
       {kRegex, "([a-f]{2,4}|\xE2\x82\xAC+){1,3}-\\d{1,3}"},
       {kRegex, "(a|b)?c{0,5}"},
       {kGrammar, "root ::= item (\",\" item){0,3}\nitem ::= [a-z] [0-9]?"},
       {kGrammar, "root ::= \"(\" root \")\" | \"x\""}}};
  std::mt19937_64 random(3);
  for (const auto& [kind, text] : kGuides) {
    Automaton walked(read(kind, text));
    Automaton checked(read(kind, text));
    for (int i = 0; i < 300; ++i) {
      std::string made;
      Automaton::State state = walked.start();
      while (made.size() < 300 && !(walked.accepts(state) && (walked.only_ends(state) || random() % 4 == 0))) {
        std::vector<std::pair<uint8_t, Automaton::State>> ways;
        for (int byte = 0; byte < 256; ++byte) {
          const Automaton::State to = walked.next(state, static_cast<uint8_t>(byte));
          if (to != Automaton::kDead) ways.emplace_back(static_cast<uint8_t>(byte), to);
        }
        ASSERT_FALSE(ways.empty()) << "a state that neither goes on nor ends: " << made;
        const auto& [byte, to] = ways[random() % ways.size()];
        made += static_cast<char>(byte);
        state = to;
      }
      if (made.size() < 300) {
        EXPECT_TRUE(accepts(checked, made)) << text << ": " << made;
      }
    }
  }
}

TEST(TokenBytes, MarksExactlyTheTokensThatCanFollow) {
  const std::vector<std::string> pieces = test::tiny_pieces();
  const TokenBytes tokens(pieces);
  Automaton automaton(
      read_json_schema(R"({"type": "object", "properties": {"true": {"type": "string"}, "n": {"type": "null"}}})"));
  for (const std::string_view before : {"", "{", "{\"", "{\"t", "{\"true\": \"a\xE2", "{\"true\": \"\\", "{}"}) {
    Automaton::State state = automaton.start();
    for (const char c : before) state = automaton.next(state, static_cast<uint8_t>(c));
    ASSERT_NE(state, Automaton::kDead) << before;
    std::vector<uint64_t> bits((pieces.size() + 63) / 64);
    ASSERT_TRUE(tokens.mark_allowed(automaton, state, bits));
    for (size_t id = 0; id < pieces.size(); ++id) {
      Automaton::State after = state;
      for (const char c : pieces[id]) {
        if (after != Automaton::kDead) after = automaton.next(after, static_cast<uint8_t>(c));
      }
      EXPECT_EQ((bits[id / 64] >> (id % 64) & 1) != 0, !pieces[id].empty() && after != Automaton::kDead)
          << before << "|" << pieces[id];
    }
  }
}

// ---- On an engine

class GuidedEngine : public ::testing::Test {
 protected:
  static Request guided(test::Driver& driver, int32_t kind, std::string text, uint64_t seed, float temperature) {
    Request request = test::plain_request(test::random_prompt(seed, 20, test::tiny_vocab_size()), 100);
    request.stop_ids = {test::kTinyEnd};
    request.guide_kind = kind;
    request.guide = std::move(text);
    request.sampling.temperature = temperature;
    request.sampling.seed = seed;
    const Status status = driver.backend().compile_guide(kind, request.guide, request.compiled_guide);
    EXPECT_TRUE(status.ok()) << status.message();
    return request;
  }
  static std::string text_of(const std::vector<int32_t>& tokens) {
    static const std::vector<std::string> pieces = test::tiny_pieces();
    std::string out;
    for (const int32_t token : tokens) out += pieces[static_cast<size_t>(token)];
    return out;
  }
};

TEST_F(GuidedEngine, GeneratesOnlyWhatTheGuideAllowsBesideUnguidedNeighbours) {
  test::Driver driver(test::TinyEngine{});
  constexpr auto kText =
      R"({"type": "array", "items": {"enum": ["true", "false", null, 12]}, "minItems": 1, "maxItems": 4})";
  Automaton checked(read_json_schema(kText));
  for (uint64_t i = 0; i < 60; ++i) {
    if (i % 3 == 2) {
      driver.ask(test::random_prompt(i, 30, test::tiny_vocab_size()), 20);
    } else {
      driver.ask(guided(driver, kSchema, kText, i, i % 2 == 0 ? 0.0f : 1.0f));
    }
  }
  ASSERT_TRUE(driver.run());
  for (uint64_t id = 0; id < 60; ++id) {
    ASSERT_FALSE(driver.told(id).failed) << driver.told(id).status.message();
    if (id % 3 == 2) continue;
    const auto& sample = driver.told(id).samples[0];
    EXPECT_EQ(sample.reason, IFAB_FINISH_STOP);
    EXPECT_TRUE(accepts(checked, text_of(sample.tokens))) << text_of(sample.tokens);
  }
}

TEST_F(GuidedEngine, IsTheSameInAnyCompany) {
  test::Driver driver(test::TinyEngine{});
  constexpr auto kText = "[a-z]{3,9}( [a-z]{3,9}){1,6}\\.";
  for (uint64_t i = 0; i < 12; ++i) driver.ask(guided(driver, kRegex, kText, i, 1.0f));
  ASSERT_TRUE(driver.run());
  for (uint64_t i = 0; i < 12; ++i) {
    const uint64_t alone = driver.ask(guided(driver, kRegex, kText, i, 1.0f));
    ASSERT_TRUE(driver.run());
    EXPECT_EQ(driver.told(alone).samples[0], driver.told(i).samples[0]);
  }
}

TEST_F(GuidedEngine, AStopTokenEndsWhereTheTextMayEndAndIsNotChosenElsewhere) {
  test::Driver driver(test::TinyEngine{});
  for (uint64_t seed = 0; seed < 30; ++seed) {
    Request request = guided(driver, kRegex, "(ab){2,}", seed, 2.0f);
    // "ab" is a token of its own as well: as a stop token it may end the text, and only after "abab".
    request.stop_ids = {test::kTinyEnd, static_cast<int32_t>(test::tiny_vocab_size()) - 1};
    driver.ask(std::move(request));
  }
  ASSERT_TRUE(driver.run());
  for (uint64_t id = 0; id < 30; ++id) {
    const auto& sample = driver.told(id).samples[0];
    const std::string text = text_of(sample.tokens);
    if (sample.reason == IFAB_FINISH_STOP) {
      EXPECT_TRUE(text.size() >= 4 && text.size() % 2 == 0) << text;
      EXPECT_GE(sample.stop_id, 0);
    }
  }
}

TEST_F(GuidedEngine, AGuideThatIsTooAmbiguousFailsItsRequestAndNoOther) {
  test::Driver driver(test::TinyEngine{});
  // Nothing but "a" may come for forty letters, and every one multiplies the ways to read them.
  const std::string text =
      "root ::= \"a\" root \"b\" | \"a\" root \"c\" | \"a\" root \"d\" \"e\" | \"" + std::string(40, 'a') + "\"";
  driver.ask(guided(driver, kGrammar, text, 1, 0.0f));
  driver.ask(test::random_prompt(5, 30, test::tiny_vocab_size()), 20);
  ASSERT_TRUE(driver.run());
  EXPECT_FALSE(driver.told(1).failed);
  ASSERT_TRUE(driver.told(0).failed);
  EXPECT_EQ(driver.told(0).status.code(), IFAB_RESOURCE_EXHAUSTED) << driver.told(0).status.message();
}

TEST_F(GuidedEngine, TextThatNoTokenCanWriteFailsItsRequestWithTheReason) {
  const std::vector<std::string> pieces = {"", "", "", "a", "b"};
  GuidanceCache cache(pieces);
  Compiler compiler;
  std::shared_ptr<const CompiledGuide> compiled;
  ASSERT_TRUE(compiler.compile(kRegex, "ax", compiled).ok());
  GuideRun run;
  run.start(cache.get(compiled), {});
  std::vector<float> logits(5, 1.0f);
  EXPECT_TRUE(run.allows(3));
  EXPECT_FALSE(run.allows(4));
  run.accept(3);
  run.mask(logits);
  for (const float logit : logits) EXPECT_LT(logit, 0.0f);
  EXPECT_EQ(run.dead_end().code(), IFAB_FAILED_PRECONDITION);
}

}  // namespace
}  // namespace ifab::guide
