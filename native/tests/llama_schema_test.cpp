// SPDX-License-Identifier: Apache-2.0
//
// JSON schemas as guides: each keyword, what is refused by name, and the bound on reading them.
#include <cmath>
#include <ctime>
#include <string>
#include <utility>

#include "llama_support/guides.h"

namespace ifab::guide {
namespace {

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
  const std::clock_t start = std::clock();  // of this process: the machine may have much else to do
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
  EXPECT_LT(std::clock() - start, 10 * CLOCKS_PER_SEC);
}

}  // namespace
}  // namespace ifab::guide
