// SPDX-License-Identifier: Apache-2.0
// Documents, contracts and engine directories: what is read, what is refused, and in which words. That both readers of
// contracts find the same on broken documents is shown elsewhere, on many more of them (tests/contract).
#include "contract.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>

#include "directory.h"
#include "schema.h"
#include "sha256.h"

namespace ifab::test {
namespace {

namespace fs = std::filesystem;

constexpr const char* kGood = R"({
  "contract_version": 1, "engine_id": "tiny",
  "files": [{"path": "engine.json", "size_bytes": 2, "sha256":
             "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"},
            {"path": "data/tokenizer.json", "size_bytes": 2, "sha256":
             "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"}],
  "model": {"architecture": "llama", "layers": 4, "hidden_size": 16, "vocab_size": 300, "weights_dtype": "q8_0",
            "activations_dtype": "float32", "kv_cache_dtype": "float16"},
  "tokenizer": {"file": "data/tokenizer.json", "end_token_ids": [299, 2]},
  "card": {"family": "nvidia-h200", "compute_capability": "9.0", "memory_bytes": 9000000000, "count": 6,
           "tensor_parallel": 3, "pipeline_parallel": 2},
  "limits": {"max_input_tokens": 96, "max_sequence_tokens": 128, "max_output_tokens": 32, "slots": 8,
             "step_token_budget": 64, "built_step_token_budget": 65, "kv_block_tokens": 16,
             "kv_cache_memory_fraction": 0.5, "host_cache_bytes": 1099511627776, "beams": 1, "longest_step_ms": 1000},
  "capabilities": {"guided_decoding": ["grammar", "json_schema"], "samples_max": 4, "scoring": true,
                   "reproducible": false, "payload": {"shape": [2, 16], "dtype": "bfloat16", "layers": [3, -1]}},
  "runtime": {"name": "r", "version": "1"},
  "build": {"tool": "t", "tool_version": "2", "flags": ["a=b"], "calibration": "not_applicable", "date": "2026-11-29"}
})";

std::string replaced(std::string text, const std::string& from, const std::string& to) {
  const size_t at = text.find(from);
  if (at == std::string::npos) throw std::invalid_argument("no " + from);
  return text.replace(at, from.size(), to);
}

std::string findings_of(const std::string& contract) {
  std::vector<Finding> findings;
  const bool read = read_contract(contract, findings).has_value();
  EXPECT_EQ(read, findings.empty());
  return describe(findings);
}

std::string unreadable(std::string_view text) {
  std::vector<Finding> findings;
  EXPECT_FALSE(read_document(text, findings));
  EXPECT_EQ(findings.size(), 1u);
  return describe(findings);
}

TEST(Document, ReadsEveryKindOfValue) {
  std::vector<Finding> findings;
  const auto document =
      read_document(R"( {"a": [null, true, -7, 1.5, "x\u00e9"], "big": 18446744073709551615, "o": {}} )", findings);
  ASSERT_TRUE(document);
  EXPECT_TRUE(findings.empty());
  const auto& items = document->at("a").items();
  EXPECT_TRUE(items[0].is(Value::Kind::kNull));
  EXPECT_TRUE(items[1].boolean());
  EXPECT_EQ(items[2].integer(), -7);
  EXPECT_EQ(items[2].real(), -7.0);
  EXPECT_EQ(items[3].real(), 1.5);
  EXPECT_EQ(items[4].text(), "x\xc3\xa9");
  EXPECT_TRUE(document->at("big").is(Value::Kind::kHugeInteger));
  EXPECT_EQ(document->at("big").text(), "18446744073709551615");
  EXPECT_EQ(document->find("absent"), nullptr);
  EXPECT_THROW((void)document->at("absent"), std::logic_error);
}

TEST(Document, WhatIsNoStrictJsonIsOneFinding) {
  EXPECT_EQ(unreadable(""), "no JSON at byte 1, expected one JSON document in UTF-8");
  EXPECT_EQ(unreadable("{} {}"), "no JSON at byte 4, expected one JSON document in UTF-8");
  EXPECT_EQ(unreadable("\xEF\xBB\xBF{}"), "a byte order mark, expected one JSON document in UTF-8");
  EXPECT_EQ(unreadable("[1e999]"), "a number too large, expected numbers within a double");
  for (const char* text :
       {"[NaN]", "[Infinity]", "[01]", "[1.]", "{'a':1}", "[1,]", "\"\\ud800\"", "\"\xff\"", "// x\n{}"}) {
    EXPECT_NE(unreadable(text), "") << text;
  }
  using namespace std::string_view_literals;
  EXPECT_NE(unreadable("{}\0"sv), "");
  EXPECT_NE(unreadable("{}\0garbage"sv), "");
}

TEST(Document, DepthAndSizeAreBounded) {
  const auto nested = [](size_t depth) { return std::string(depth, '[') + std::string(depth, ']'); };
  std::vector<Finding> findings;
  EXPECT_TRUE(read_document(nested(kMaxDocumentDepth), findings));
  EXPECT_EQ(unreadable(nested(kMaxDocumentDepth + 1)), "nesting deeper than 64, expected nesting of at most 64");
  EXPECT_EQ(unreadable(std::string(1'000'000, '[')), "nesting deeper than 64, expected nesting of at most 64");
  EXPECT_TRUE(read_document("1" + std::string(kMaxDocumentBytes - 1, ' '), findings));
  EXPECT_EQ(unreadable("1" + std::string(kMaxDocumentBytes, ' ')), "1048577 bytes, expected at most 1048576 bytes");
}

TEST(Document, AKeyGivenTwiceIsNamedAndTheFirstCounts) {
  std::vector<Finding> findings;
  const auto document = read_document(R"({"a": {"b": 1, "b": 2}, "a": [{"c d": 1, "c d": 2}]})", findings);
  ASSERT_TRUE(document);
  EXPECT_EQ(describe(findings),
            "a.b: given twice, expected given once\n"
            "a: given twice, expected given once\n"
            "a[0][\"c d\"]: given twice, expected given once");
  EXPECT_EQ(document->at("a").at("b").integer(), 1);
}

TEST(Document, ManyKeysTakeNoLongTime) {
  std::string text = "{";
  for (int i = 0; i < 80'000; ++i) text += (i == 0 ? "\"" : ",\"") + std::to_string(i) + "\":0";
  std::vector<Finding> findings;
  EXPECT_TRUE(read_document(text + "}", findings));
  EXPECT_TRUE(findings.empty());
}

TEST(Document, FindingsAreBounded) {
  std::vector<Finding> findings;
  for (int i = 0; i < 1000; ++i) add_finding(findings, {std::to_string(i), "x", "y"});
  ASSERT_EQ(findings.size(), kMaxFindings + 1);
  EXPECT_EQ(findings.back().found, "more findings than 200");
}

TEST(Schema, EverySchemaThatIsBuiltInCompiles) {
  for (const char* name : {"contract", "llama", "simulated"}) EXPECT_NO_THROW((void)Schema::named(name)) << name;
  EXPECT_THROW((void)Schema::named("nothing"), std::logic_error);
}

TEST(Schema, WhatIsNotInterpretedIsRefused) {
  const auto parse = [](const std::string& property) {
    return Schema::parse(
        "planted", R"({"type": "object", "additionalProperties": false, "required": ["a"], "properties": {"a": )" +
                       property + "}}");
  };
  EXPECT_NO_THROW(parse(R"({"type": "boolean"})"));
  for (const char* property :
       {R"({"type": "integer", "minimum": 1})", R"({"type": "boolean", "default": true})", R"({"type": "text"})", "1",
        R"({"type": "string", "pattern": "^a$"})", R"({"$ref": "#/$defs/none"})", R"({"anyOf": [{"type": "boolean"}]})",
        R"({"type": "object", "additionalProperties": true, "required": [], "properties": {}})"}) {
    EXPECT_THROW(parse(property), std::logic_error) << property;
  }
  EXPECT_THROW(Schema::parse("planted", "{"), std::logic_error);
}

TEST(Contract, ValuesComeOutWhereTheyBelong) {
  std::vector<Finding> findings;
  const auto contract = read_contract(kGood, findings);
  ASSERT_TRUE(contract) << describe(findings);
  EXPECT_EQ(contract->engine_id, "tiny");
  ASSERT_EQ(contract->files.size(), 2u);
  EXPECT_EQ(contract->files[1].path, "data/tokenizer.json");
  EXPECT_EQ(contract->model.vocab_size, 300u);
  EXPECT_EQ(contract->model.kv_cache_dtype, "float16");
  EXPECT_EQ(contract->tokenizer.end_token_ids, (std::vector<int32_t>{299, 2}));
  EXPECT_EQ(contract->card.compute_capability, "9.0");
  EXPECT_EQ(contract->card.memory_bytes, 9'000'000'000u);
  EXPECT_EQ(contract->limits.step_token_budget, 64u);
  EXPECT_EQ(contract->limits.built_step_token_budget, 65u);
  EXPECT_EQ(contract->limits.kv_block_tokens, 16u);
  EXPECT_EQ(contract->limits.kv_cache_memory_fraction, 0.5);
  EXPECT_EQ(contract->limits.host_cache_bytes, uint64_t{1} << 40);
  EXPECT_EQ(contract->capabilities.guide_kinds, (std::vector<int32_t>{IFAB_GUIDE_GRAMMAR, IFAB_GUIDE_JSON_SCHEMA}));
  ASSERT_TRUE(contract->capabilities.payload);
  EXPECT_EQ(contract->capabilities.payload->dtype, IFAB_DTYPE_BFLOAT16);
  EXPECT_EQ(contract->capabilities.payload->layers, (std::vector<int32_t>{3, -1}));
  EXPECT_EQ(contract->capabilities.payload->size_bytes(), 2u * 16u * 2u);
  EXPECT_FALSE(contract->build.calibration);
}

TEST(Contract, WhatDoesNotApplyIsEmpty) {
  std::string text =
      replaced(kGood, R"("kv_cache_memory_fraction": 0.5)", R"("kv_cache_memory_fraction": "not_applicable")");
  text = replaced(text, R"({"shape": [2, 16], "dtype": "bfloat16", "layers": [3, -1]})", R"("not_applicable")");
  std::vector<Finding> findings;
  const auto contract = read_contract(text, findings);
  ASSERT_TRUE(contract) << describe(findings);
  EXPECT_FALSE(contract->limits.kv_cache_memory_fraction);
  EXPECT_FALSE(contract->capabilities.payload);
}

TEST(Contract, AllFindingsComeAtOnceWithPathFoundAndExpected) {
  std::string text = replaced(kGood, R"("step_token_budget": 64, )", "");
  text = replaced(text, R"("slots": 8)", R"("slots": "8")");
  text = replaced(text, R"("count": 6)", R"("count": 7)");
  text = replaced(text, R"("name": "r")", R"("name": "r", "nickname": null)");
  EXPECT_EQ(findings_of(text),
            "limits.slots: \"8\", expected integer from 1 to 65536\n"
            "limits.step_token_budget: absent, expected integer from 1 to 16777216\n"
            "runtime.nickname: null, expected no field of this name\n"
            "card.count: 7, expected card.tensor_parallel times card.pipeline_parallel, 6");
}

TEST(Contract, NothingHasADefault) {
  std::vector<Finding> findings;
  EXPECT_FALSE(read_contract("{}", findings));
  EXPECT_EQ(findings.size(), 41u);
  for (const Finding& finding : findings) EXPECT_EQ(finding.found, "absent") << finding.path;
}

TEST(Sha256, KnownDigestsAtEveryPadding) {
  const auto digest = [](size_t size) {
    std::string bytes;
    for (size_t i = 0; i < size; ++i) bytes += static_cast<char>(i % 251);
    return sha256_hex(bytes);
  };
  EXPECT_EQ(sha256_hex("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(digest(0), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(digest(55), "463eb28e72f82e0a96c0a4cc53690c571281131f672aa229e0d45ae59b598b59");
  EXPECT_EQ(digest(56), "da2ae4d6b36748f2a318f23e7ab1dfdf45acdc9d049bd80e59de82a60895f562");
  EXPECT_EQ(digest(63), "29af2686fd53374a36b0846694cc342177e428d1647515f078784d69cdb9e488");
  EXPECT_EQ(digest(64), "fdeab9acf3710362bd2658cdc9a29e8f9c757fcf9811603a8c447cd1d9151108");
  EXPECT_EQ(digest(65), "4bfd2c8b6f1eec7a2afeb48b934ee4b2694182027e6d0fc075074f2fabb31781");
  EXPECT_EQ(digest(119), "da18797ed7c3a777f0847f429724a2d8cd5138e6ed2895c3fa1a6d39d18f7ec6");
  EXPECT_EQ(digest(120), "f52b23db1fbb6ded89ef42a23ce0c8922c45f25c50b568a93bf1c075420bbb7c");
  EXPECT_EQ(digest(1000), "4e4c294b331f7a2099a379bec34b9f9fc03dc46ab465d998f4d683da53487e6d");
}

class DirectoryTest : public testing::Test {
 protected:
  DirectoryTest() {
    std::string pattern = testing::TempDir() + "ifab-directory-XXXXXX";
    root_ = mkdtemp(pattern.data());
    fs::create_directories(root_ / "engine" / "data");
    write("engine.json", "{}");
    write("data/tokenizer.json", "{}");
    write("contract.json", kGood);
  }
  ~DirectoryTest() override { fs::remove_all(root_); }

  void write(const std::string& name, const std::string& text) { std::ofstream(engine() / name) << text; }
  fs::path engine() const { return root_ / "engine"; }
  std::string findings() const {
    std::unique_ptr<const EngineDirectory> directory;
    const Status status = EngineDirectory::open(engine(), directory);
    return status.ok() ? describe(directory->findings()) : status.message();
  }

  fs::path root_;
};

TEST_F(DirectoryTest, OneThatAgreesIsOpenedWithItsContract) {
  std::unique_ptr<const EngineDirectory> directory;
  ASSERT_TRUE(EngineDirectory::open(engine(), directory).ok());
  EXPECT_EQ(describe(directory->findings()), "");
  ASSERT_NE(directory->contract(), nullptr);
  EXPECT_EQ(directory->contract()->engine_id, "tiny");
  EXPECT_EQ(directory->contract_text(), kGood);
  EXPECT_EQ(directory->contract_sha256(), sha256_hex(kGood));
  EXPECT_TRUE(directory->has("data/tokenizer.json"));
  EXPECT_FALSE(directory->has("data"));
  EXPECT_FALSE(directory->has("../engine/engine.json"));
  EXPECT_EQ(directory->files().at("engine.json"), 2u);
  std::string text;
  ASSERT_TRUE(directory->read_text("engine.json", text).ok());
  EXPECT_EQ(text, "{}");
  EXPECT_EQ(directory->read_text("data", text).code(), IFAB_NOT_FOUND);
}

TEST_F(DirectoryTest, WhatIsNotThereIsNotFound) {
  std::unique_ptr<const EngineDirectory> directory;
  EXPECT_EQ(EngineDirectory::open(root_ / "none", directory).code(), IFAB_NOT_FOUND);
  EXPECT_EQ(EngineDirectory::open(root_, directory).code(), IFAB_NOT_FOUND);
  EXPECT_EQ(EngineDirectory::open(engine() / "engine.json", directory).code(), IFAB_NOT_FOUND);
  EXPECT_EQ(directory, nullptr);
}

TEST_F(DirectoryTest, FilesThatDisagreeWithTheContractAreFindings) {
  fs::remove(engine() / "data" / "tokenizer.json");
  write("engine.json", "{  }");
  write("stray", "");
  EXPECT_EQ(findings(),
            "files[0].size_bytes: 2, expected 4, the size of the file\n"
            "files[1].path: \"data/tokenizer.json\", missing, expected file in the engine directory\n"
            "files: \"stray\" beside the listed files, expected entry for every file of the engine directory");
}

TEST_F(DirectoryTest, LinksOutOfTheDirectoryAreNotFollowed) {
  std::ofstream(root_ / "outside") << "{}";
  fs::remove(engine() / "engine.json");
  fs::create_symlink("../outside", engine() / "engine.json");
  EXPECT_EQ(findings(),
            "files[0].path: \"engine.json\", a link out of the directory, expected file in the engine directory");
  fs::remove(engine() / "contract.json");
  fs::create_symlink("../outside", engine() / "contract.json");
  EXPECT_NE(findings().find("no contract.json"), std::string::npos);
}

TEST_F(DirectoryTest, AHugeContractIsReadNoFurtherThanNeeded) {
  write("contract.json", std::string(size_t{3} << 20, ' '));
  EXPECT_EQ(findings(), "1048577 bytes, expected at most 1048576 bytes");
}

TEST_F(DirectoryTest, TooManyEntriesAreRefused) {
  for (size_t i = 0; i <= EngineDirectory::kMaxEntries; ++i) write("f" + std::to_string(i), "");
  EXPECT_NE(findings().find("holds more than 4096 entries"), std::string::npos);
}

}  // namespace
}  // namespace ifab::test
