// SPDX-License-Identifier: Apache-2.0
//
// Guides: which texts they allow, what they refuse and how they say so, and what keeps them small.
#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <random>

#include "guide/automaton.h"
#include "guide/gbnf.h"
#include "guide/guide.h"
#include "guide/json_schema.h"
#include "guide/regex.h"
#include "llama_support/driver.h"

namespace ifab::guide {
namespace {

std::shared_ptr<const Grammar> read(int32_t kind, std::string_view text) {
  if (kind == IFAB_GUIDE_JSON_SCHEMA) return read_json_schema(text);
  return kind == IFAB_GUIDE_REGEX ? read_regex(text) : read_gbnf(text);
}

bool accepts(Automaton& automaton, std::string_view text) {
  Automaton::State state = automaton.start();
  for (const char c : text) {
    state = automaton.next(state, static_cast<uint8_t>(c));
    if (state == Automaton::kDead || state == Automaton::kTooLarge) return false;
  }
  return automaton.accepts(state);
}

void expect_texts(int32_t kind, std::string_view guide, std::initializer_list<std::string_view> good,
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

void expect_refused(int32_t kind, std::string_view guide, ifab_status_t code, std::string_view part) {
  SCOPED_TRACE(std::string(guide.substr(0, 200)));
  Compiler compiler;
  std::shared_ptr<const CompiledGuide> compiled;
  const Status status = compiler.compile(kind, guide, compiled);
  EXPECT_EQ(status.code(), code) << status.message();
  EXPECT_NE(status.message().find(part), std::string::npos) << status.message();
}

constexpr auto kSchema = IFAB_GUIDE_JSON_SCHEMA;
constexpr auto kRegex = IFAB_GUIDE_REGEX;
constexpr auto kGrammar = IFAB_GUIDE_GRAMMAR;

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

TEST(JsonSchema, TakesACatalogueOfThousandsOfNames) {
  std::string schema = R"({"enum": [)";
  for (int number = 0; number < 5000; ++number) {
    schema += (number == 0 ? "\"part " : ", \"part ") + std::to_string(number * 7) + "\"";
  }
  Compiler compiler;
  std::shared_ptr<const CompiledGuide> compiled;
  const Status status = compiler.compile(kSchema, schema + "]}", compiled);
  ASSERT_TRUE(status.ok()) << status.message();
  Automaton automaton(read_json_schema(schema + "]}"));
  EXPECT_TRUE(accepts(automaton, "\"part 34993\""));
  EXPECT_TRUE(accepts(automaton, "\"part 0\""));
  EXPECT_FALSE(accepts(automaton, "\"part 34994\""));
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

TEST(JsonSchema, AllowsValuesOfEachType) {
  expect_texts(kSchema, R"({"type": "null"})", {"null"}, {"nul", "NULL"});
  expect_texts(kSchema, R"({"type": "boolean"})", {"true", "false"}, {"True", "0"});
  expect_texts(kSchema, R"({"type": "integer"})", {"0", "-1", "123456789"}, {"01", "-0", "1.0", "1e3", "+1"});
  expect_texts(kSchema, R"({"type": "number"})", {"0", "-0.5", "1e3", "12.25E-2"}, {".5", "1.", "01", "NaN"});
  expect_texts(kSchema, R"({"type": "string"})", {R"("")", R"("a\n\"")", "\"\xE2\x82\xAC\""},
               {"\"a\nb\"", "a", R"("a)"});
  expect_texts(kSchema, R"({"type": ["integer", "null"]})", {"7", "null"}, {"\"7\"", "7.5"});
  expect_texts(kSchema, "true", {"{\"a\": [1, {}, null]}", "[ ]", "\"x\""}, {"{a: 1}", "[1,]"});
  expect_texts(kSchema, R"({"enum": ["a", 1, null, {"k": [true]}]})", {"\"a\"", "1", "null", "{\"k\": [true]}"},
               {"a", "2"});
  expect_texts(kSchema, R"({"type": "string", "enum": ["a", 1]})", {"\"a\""}, {"1"});
  expect_texts(kSchema, R"({"enum": [1, 12, 123, 13, 12, -1]})", {"1", "12", "123", "13", "-1"}, {"", "-", "124", "2"});
  expect_texts(kSchema, R"({"const": "it's \"x\""})", {R"("it's \"x\"")"}, {"\"x\""});
}

TEST(JsonSchema, BoundsOfNumbersHold) {
  for (const auto& [low, high] : {std::pair{0, 120}, {-5, 5}, {7, 7}, {99, 1001}, {-300, -12}, {18, 64}}) {
    const std::string schema =
        R"({"type": "integer", "minimum": )" + std::to_string(low) + R"(, "maximum": )" + std::to_string(high) + "}";
    Automaton automaton(read_json_schema(schema));
    for (int value = -1500; value <= 1500; ++value) {
      EXPECT_EQ(accepts(automaton, std::to_string(value)), low <= value && value <= high) << schema << " " << value;
    }
  }
  expect_texts(kSchema, R"({"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 5})", {"4"}, {"3", "5"});
  expect_texts(kSchema, R"({"type": "integer", "minimum": 2.5})", {"3", "999"}, {"2", "-3"});
  expect_texts(kSchema, R"({"type": "number", "minimum": 0, "maximum": 1})", {"0", "1", "0.75"},
               {"1.5", "-0.1", "1e0"});
  expect_texts(kSchema, R"({"type": "number", "exclusiveMinimum": 0, "maximum": 10})", {"1", "9.99", "10"},
               {"0", "10.1", "0.0"});
  expect_texts(kSchema, R"({"type": "number", "minimum": -2, "maximum": 3})", {"-1.9", "-2", "2.5", "-0.5"},
               {"-2.5", "3.1"});
}

TEST(JsonSchema, StringsKeepTheirLengthPatternAndFormat) {
  expect_texts(kSchema, R"({"type": "string", "minLength": 2, "maxLength": 3})", {R"("ab")", R"("a\"\n")"},
               {R"("a")", R"("abcd")"});
  expect_texts(kSchema, R"({"type": "string", "pattern": "^[a-z]+\\d$"})", {R"("ab1")"}, {R"("ab")", R"("1")"});
  expect_texts(kSchema, R"({"type": "string", "pattern": "b+"})", {R"("abbc")"}, {R"("ac")"});
  expect_texts(kSchema, R"({"type": "string", "pattern": "^.\"$"})", {R"("a\"")"}, {R"("a"")"});
  expect_texts(kSchema, R"({"type": "string", "format": "date"})", {R"("2026-11-28")"},
               {R"("2026-13-01")", R"("26-1-1")"});
  expect_texts(kSchema, R"({"type": "string", "format": "ipv4"})", {R"("10.0.255.1")"}, {R"("10.0.256.1")"});
}

TEST(JsonSchema, ArraysKeepTheirItemsAndNumber) {
  expect_texts(kSchema, R"({"type": "array", "items": {"type": "integer"}})", {"[]", "[1]", "[1, 2,3]"},
               {"[1 2]", "[,]", "[\"a\"]"});
  expect_texts(kSchema, R"({"type": "array", "items": {"const": 1}, "minItems": 2, "maxItems": 3})",
               {"[1,1]", "[1,1,1]"}, {"[1]", "[1,1,1,1]"});
  expect_texts(kSchema, R"({"type": "array", "prefixItems": [{"const": 1}, {"const": 2}], "items": false})",
               {"[]", "[1]", "[1,2]"}, {"[2]", "[1,2,3]"});
  expect_texts(kSchema, R"({"type": "array", "prefixItems": [{"const": 1}], "items": {"const": 2}, "minItems": 2})",
               {"[1,2]", "[1,2,2]"}, {"[1]", "[]", "[2,2]"});
}

TEST(JsonSchema, ObjectsHaveTheirMembersInOrder) {
  constexpr auto kObject =
      R"({"type": "object", "properties": {"a": {"const": 1}, "b": {"const": 2}, "c": {"const": 3}}, "required": ["b"]})";
  expect_texts(kSchema, kObject, {R"({"b": 2})", R"({"a":1,"b":2,"c":3})", R"({ "a": 1, "b": 2 })", "{\n  \"b\": 2\n}"},
               {"{}", R"({"a": 1})", R"({"b": 2, "a": 1})", R"({"b": 2,})", R"({"b": 3})"});
  expect_texts(kSchema, R"({"type": "object", "properties": {"a": {}}})", {"{}", R"({"a": [null]})"}, {R"({"b": 1})"});
  expect_texts(kSchema, R"({"type": "object", "additionalProperties": {"type": "integer"}})",
               {"{}", R"({"x": 1, "y": 2})"}, {R"({"x": "1"})"});
  expect_texts(kSchema, R"({"type": "object", "additionalProperties": false})", {"{}", "{ }"}, {R"({"x": 1})"});
  expect_texts(kSchema, R"({"required": ["x"]})", {R"({"x": null})"}, {"{}"});
}

TEST(JsonSchema, SchemasReferToEachOther) {
  constexpr auto kTree = R"({"$ref": "#/$defs/node", "$defs": {"node": {"type": "object", "required": ["v", "next"],
      "properties": {"v": {"type": "integer"}, "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}}}}})";
  expect_texts(kSchema, kTree, {R"({"v": 1, "next": {"v": 2, "next": null}})"},
               {R"({"v": 1})", R"({"v": 1, "next": 2})"});
  expect_texts(kSchema, R"({"anyOf": [{"type": "integer"}, {"const": "x"}]})", {"3", "\"x\""}, {"\"y\""});
  expect_texts(kSchema, R"({"oneOf": [{"type": "integer"}, {"type": "string"}]})", {"3", "\"y\""}, {"null"});
  expect_texts(kSchema, R"({"allOf": [{"$ref": "#/definitions/a~1b"}], "definitions": {"a/b": {"const": 5}}})", {"5"},
               {"6"});
}

TEST(JsonSchema, RefusesByNameWhatItDoesNotEnforce) {
  for (const char* keyword : {"not", "if", "then", "patternProperties", "propertyNames", "contains", "minProperties",
                              "maxProperties", "dependentRequired", "dependentSchemas", "unevaluatedProperties",
                              "multipleOf", "contentEncoding", "$dynamicRef", "minimun"}) {
    const std::string schema = R"({"type": "object", "properties": {"a": {")" + std::string(keyword) + R"(": 1}}})";
    expect_refused(kSchema, schema, IFAB_UNIMPLEMENTED, keyword);
  }
  expect_refused(kSchema, R"({"type": "array", "uniqueItems": true})", IFAB_UNIMPLEMENTED, "uniqueItems");
  expect_refused(kSchema, R"({"$ref": "https://example.org/x"})", IFAB_UNIMPLEMENTED, "$ref");
  expect_refused(kSchema, R"({"$ref": "#/$defs/a", "type": "object", "$defs": {"a": {}}})", IFAB_UNIMPLEMENTED, "type");
  expect_refused(kSchema, R"({"allOf": [{}, {}]})", IFAB_UNIMPLEMENTED, "allOf");
  expect_refused(kSchema, R"({"oneOf": [{"type": "integer"}, {"type": "number"}]})", IFAB_UNIMPLEMENTED, "oneOf");
  expect_refused(kSchema, R"({"type": "string", "format": "email"})", IFAB_UNIMPLEMENTED, "email");
  expect_refused(kSchema, R"({"type": "string", "pattern": "a", "maxLength": 3})", IFAB_UNIMPLEMENTED, "pattern");
  expect_refused(kSchema, R"x({"type": "string", "pattern": "(?=a)"})x", IFAB_UNIMPLEMENTED, "pattern: line 1");
  expect_refused(kSchema, R"({"type": "number", "minimum": 0.2, "maximum": 0.8})", IFAB_UNIMPLEMENTED, "bounds");
}

TEST(JsonSchema, RefusesWhatIsNoSchema) {
  expect_refused(kSchema, "{", IFAB_INVALID_ARGUMENT, "schema");
  expect_refused(kSchema, "[]", IFAB_INVALID_ARGUMENT, "schema");
  expect_refused(kSchema, R"({"a": 1, "a": 2})", IFAB_INVALID_ARGUMENT, "a");
  expect_refused(kSchema, R"({"type": "strin"})", IFAB_INVALID_ARGUMENT, "type");
  expect_refused(kSchema, "false", IFAB_INVALID_ARGUMENT, "false");
  expect_refused(kSchema, R"({"$ref": "#/$defs/a"})", IFAB_INVALID_ARGUMENT, "$ref");
  expect_refused(kSchema, R"({"$ref": "#"})", IFAB_INVALID_ARGUMENT, "itself");
  expect_refused(kSchema, R"({"type": "integer", "minimum": 5, "maximum": 4})", IFAB_INVALID_ARGUMENT, "bounds");
  expect_refused(kSchema, R"({"type": "array", "minItems": 3, "maxItems": 2})", IFAB_INVALID_ARGUMENT, "minItems");
  expect_refused(kSchema, R"({"type": "string", "minLength": -1})", IFAB_INVALID_ARGUMENT, "minLength");
  expect_refused(kSchema, R"({"type": "object", "required": ["a"], "properties": {"a": {"$ref": "#"}}})",
                 IFAB_INVALID_ARGUMENT, "end");
  std::string chain = R"({"$ref": "#/$defs/0", "$defs": {)";
  for (int i = 0; i < 5000; ++i) {
    chain += "\"" + std::to_string(i) + R"(": {"anyOf": [{"$ref": "#/$defs/)" + std::to_string(i + 1) + "\"}]},";
  }
  chain += R"("5000": {}}})";
  expect_refused(kSchema, chain, IFAB_INVALID_ARGUMENT, "deeply");
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

TEST(JsonSchema, MembersThatAreOnlyRequiredAreAdditional) {
  expect_refused(
      kSchema,
      R"({"type": "object", "properties": {"b": {"type": "integer"}}, "required": ["a", "b"], "additionalProperties": false})",
      IFAB_INVALID_ARGUMENT, "required[0]: \"a\" is not in properties");
  expect_texts(kSchema, R"({"type": "object", "required": ["a"], "additionalProperties": {"type": "integer"}})",
               {R"({"a": 1})"}, {"{}", R"({"a": "x"})", R"({"a": null})"});
  expect_texts(kSchema,
               R"({"properties": {"b": {"const": 2}}, "required": ["a"], "additionalProperties": {"const": 1}})",
               {R"({"b": 2, "a": 1})", R"({"a": 1})"}, {R"({"b": 2, "a": 2})", R"({"b": 2})"});
  expect_texts(kSchema, R"({"properties": {"b": {"const": 2}}, "required": ["b"], "additionalProperties": false})",
               {R"({"b": 2})"}, {"{}"});
  for (const char* unused : {R"({"properties": {"a": {}}, "additionalProperties": {"not": {}}})",
                             R"({"required": ["a"], "additionalProperties": {"items": {"not": {}}}})",
                             R"({"prefixItems": [true], "maxItems": 1, "items": {"not": {}}})"}) {
    expect_refused(kSchema, unused, IFAB_UNIMPLEMENTED, "not: the keyword is not supported");
  }
}

TEST(JsonSchema, EqualConstantsAreNotToldApartHoweverTheyAreWritten) {
  for (const char* branches :
       {R"({"const": 1}, {"const": 1.0})", R"({"const": 100}, {"enum": [2, 1e2]})", R"({"const": 0}, {"const": -0.0})",
        R"({"const": {"a": 1, "b": [2]}}, {"const": {"b": [2.0], "a": 10e-1}})",
        R"({"const": "\u0061"}, {"const": "a"})", R"({"type": "integer"}, {"const": 3.0})",
        R"({"type": "object", "properties": {"k": {"const": 1}}, "required": ["k"]},
           {"type": "object", "properties": {"k": {"const": 1.0}}, "required": ["k"]})"}) {
    expect_refused(kSchema, "{\"oneOf\": [" + std::string(branches) + "]}", IFAB_UNIMPLEMENTED,
                   "oneOf[1]: a schema that cannot be told apart from oneOf[0]");
  }
  expect_texts(kSchema, R"({"oneOf": [{"const": 1}, {"const": 10}, {"const": "1"}, {"type": "null"}]})",
               {"1", "10", "\"1\"", "null"}, {"2"});
  expect_texts(kSchema, R"({"oneOf": [{"type": "integer"}, {"const": 1.5}, {"type": "string", "enum": ["a", 1]}]})",
               {"4", "1.5", "\"a\""}, {"2.5"});
  // No member is common to the three; each pair differs in one.
  expect_texts(kSchema, R"({"oneOf": [
      {"type": "object", "properties": {"a": {"const": 1}, "b": {"const": 1}}, "required": ["a", "b"]},
      {"type": "object", "properties": {"a": {"const": 2}, "c": {"const": 1}}, "required": ["a", "c"]},
      {"type": "object", "properties": {"b": {"const": 2}, "c": {"const": 2}}, "required": ["b", "c"]}]})",
               {R"({"a": 1, "b": 1})", R"({"a": 2, "c": 1})", R"({"b": 2, "c": 2})"}, {R"({"a": 1, "c": 1})"});
}

TEST(JsonSchema, BoundsAreExactOrRefused) {
  expect_texts(kSchema, R"({"type": "integer", "minimum": 9007199254740993, "maximum": 9007199254740995})",
               {"9007199254740993", "9007199254740995"}, {"9007199254740992", "9007199254740996"});
  expect_texts(kSchema, R"({"type": "integer", "exclusiveMinimum": -99999999999999999, "maximum": -99999999999999998})",
               {"-99999999999999998"}, {"-99999999999999999", "-99999999999999997"});
  expect_texts(kSchema, R"({"type": "integer", "minimum": 999999999999999999, "maximum": 99999999999999999999999})",
               {"999999999999999999"}, {"999999999999999998"});
  expect_texts(kSchema, R"({"type": "integer", "maximum": 1e17})", {"100000000000000000"}, {"100000000000000001"});
  expect_texts(kSchema, R"({"type": "integer", "minimum": 0.1e1, "exclusiveMaximum": 25e-1})", {"1", "2"}, {"0", "3"});
  expect_texts(kSchema, R"({"type": "integer", "exclusiveMaximum": 17.00000000000000001})", {"16"}, {"17"});
  expect_texts(kSchema, R"({"type": "number", "minimum": -1e300, "maximum": 9007199254740992})",
               {"9007199254740992", "-0.5"}, {"9007199254740993"});
  expect_refused(kSchema, R"({"type": "integer", "minimum": 99999999999999999999})", IFAB_INVALID_ARGUMENT,
                 "18 digits");
  expect_refused(kSchema, R"({"type": "integer", "maximum": 9007199254740993.0})", IFAB_UNIMPLEMENTED,
                 "maximum: 9007199254740993.0 is not exact");
  for (const char* bound : {"9007199254740993", "1000000000000000000", "1e16"}) {
    expect_refused(kSchema, R"({"type": "number", "exclusiveMaximum": )" + std::string(bound) + "}", IFAB_UNIMPLEMENTED,
                   "exclusiveMaximum: " + std::string(bound) + " is not exact");
  }
}

TEST(JsonSchema, NoNumberIsReadAsTheBoundThatItLiesBelow) {
  for (const auto& [low, high] :
       {std::pair<int64_t, int64_t>{16, 17}, {0, 1}, {8191, 8192}, {99999999999998, 99999999999999}}) {
    for (const int64_t sign : {1, -1}) {
      const std::string closed = std::to_string(sign * low);
      const std::string open = std::to_string(sign * high);
      Automaton automaton(read_json_schema(
          sign > 0 ? R"({"type": "number", "minimum": )" + closed + R"(, "exclusiveMaximum": )" + open + "}"
                   : R"({"type": "number", "exclusiveMinimum": )" + open + R"(, "maximum": )" + closed + "}"));
      std::string text = (sign < 0 ? "-" : "") + std::to_string(low) + ".";
      int accepted = 0;
      for (int digits = 1; digits <= 20; ++digits) {
        text += '9';
        if (!accepts(automaton, text)) continue;
        ++accepted;
        EXPECT_LT(std::abs(std::stod(text)), static_cast<double>(high)) << text;
      }
      EXPECT_GT(accepted, 0) << open;
      EXPECT_FALSE(accepts(automaton, open));
    }
  }
}

TEST(JsonSchema, RefusesKeywordsOfTheWrongKind) {
  const auto refused = [](std::string_view schema, std::string_view part) {
    expect_refused(kSchema, schema, IFAB_INVALID_ARGUMENT, part);
  };
  refused(R"({"properties": {"a": {"required": "b"}}})",
          "properties.a.required: expected a list of names, found \"b\"");
  refused(R"({"required": ["a", 3]})", "required[1]: expected a name, found 3");
  refused(R"({"properties": []})", "properties: expected an object of schemas, found list of 0 items");
  refused(R"({"prefixItems": 3})", "prefixItems: expected a list, found 3");
  refused(R"({"type": "null", "$defs": 7})", "expected an object of schemas, found 7");
  refused(R"({"type": "string", "minimum": "3"})", "minimum: expected a number, found \"3\"");
  refused(R"({"type": "null", "items": [{}]})", "items: expected a schema, found list of 1 item");
  refused(R"({"type": "null", "additionalProperties": null})", "additionalProperties: expected a schema, found null");
  refused(R"({"oneOf": {"type": "null"}})", "oneOf: expected a list, found object");
  refused(R"({"enum": 1})", "enum: expected a list, found 1");
  refused(R"({"type": 5})", "type: expected a type or a list of types, found 5");
  refused(R"({"type": "string", "format": 5})", "format: expected a text, found 5");
}

TEST(JsonSchema, IsOneDocumentOfOneDialect) {
  expect_texts(kSchema, R"({"$id": "https://example.org/a", "$schema": "https://json-schema.org/draft/2020-12/schema",
                            "type": "object", "properties": {"$id": {"const": 1}}, "required": ["$id"]})",
               {R"({"$id": 1})"}, {"{}"});
  expect_refused(kSchema, R"({"properties": {"a": {"$id": "b", "type": "null"}}})", IFAB_UNIMPLEMENTED,
                 "properties.a[\"$id\"]: the keyword is supported at the root only");
  expect_refused(kSchema, R"({"$ref": "#/$defs/a/items", "$defs": {"a": {"$id": "b", "items": {}}}})",
                 IFAB_UNIMPLEMENTED, "$id");
  expect_refused(kSchema, R"({"$schema": "http://json-schema.org/draft-07/schema#", "type": "null"})",
                 IFAB_UNIMPLEMENTED, "draft-07");
}

TEST(JsonSchema, WholeNumbersAreIntegersHoweverTheyAreWritten) {
  expect_texts(kSchema, R"({"type": "integer", "enum": [1e2, 2.50, 3.0, 40e-1]})", {"1e2", "3.0", "40e-1"}, {"2.50"});
  expect_refused(kSchema, R"({"type": "integer", "enum": [1.5, 1e-2]})", IFAB_INVALID_ARGUMENT, "no value of the type");
}

TEST(JsonSchema, SchemasAreToldApartInBoundedTime) {
  const auto start = std::chrono::steady_clock::now();
  std::string branches;
  for (int i = 0; i < 8000; ++i) {
    branches += (i == 0 ? R"({"enum": [)" : i % 200 == 0 ? R"(]}, {"enum": [)" : ", ") + std::to_string(i);
  }
  expect_texts(kSchema, "{\"oneOf\": [" + branches + "]}]}", {"0", "7999"}, {"8000"});
  expect_refused(kSchema, "{\"oneOf\": [" + branches + ", 7.0]}]}", IFAB_UNIMPLEMENTED,
                 "oneOf[39]: a schema that cannot be told apart from oneOf[0]");
  // Sixty schemas of the same two thousand constants, written once.
  std::string union_of(R"({"type": "object", "required": ["k"], "properties": {"k": {"$ref": "#/$defs/k"}}})");
  for (int i = 1; i < 60; ++i)
    union_of += R"(, {"type": "object", "required": ["k"], "properties": {"k": {"$ref": "#/$defs/k"}}})";
  std::string values = "0";
  for (int i = 1; i < 2000; ++i) values += "," + std::to_string(i);
  expect_refused(kSchema,
                 "{\"$defs\": {\"k\": {\"enum\": [" + values + "]}}, \"anyOf\": [{\"oneOf\": [" + union_of + "]}]}",
                 IFAB_INVALID_ARGUMENT, "oneOf: 7203660 steps");
  std::string pattern;
  while (pattern.size() < 1'000'000) pattern += "a{9999}";
  expect_refused(kRegex, pattern, IFAB_INVALID_ARGUMENT, "large");
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10));
}

// ---- Bounds

TEST(Guides, AreReadInBoundedTimeHoweverTheyAreMadeUp) {
  const auto start = std::chrono::steady_clock::now();
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
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20));
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
