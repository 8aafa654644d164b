// SPDX-License-Identifier: Apache-2.0
//
// Engine directories of the llama backend: what is refused, with which findings, and what a load answers.
#include <gtest/gtest.h>

#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>

#include "backend.h"
#include "detect.h"
#include "directory.h"
#include "ifab/engine.h"
#include "llama_support/tiny_engine.h"
#include "sha256.h"
#include "simulated_directory.h"

namespace ifab {
extern const BackendEntry llama_backend;

namespace test {
namespace {

using Json = nlohmann::ordered_json;
using Edit = std::function<void(Json&)>;

class LlamaDirectory : public ::testing::Test {
 protected:
  static Json read(const std::filesystem::path& path) {
    std::ifstream in(path);
    return Json::parse(in);
  }

  // Writes a tiny engine, changes its documents, and makes the contract list the changed configuration.
  void write(const TinyEngine& engine, const Edit& configuration, const Edit& contract) {
    write_tiny_directory(directory_.path(), engine);
    Json llama = read(directory_.path() / "llama.json");
    Json document = read(directory_.path() / "contract.json");
    configuration(llama);
    contract(document);
    const std::string text = llama.dump(1);
    std::ofstream(directory_.path() / "llama.json") << text;
    for (Json& file : document["files"]) {
      if (file["path"] != "llama.json") continue;
      file["size_bytes"] = text.size();
      file["sha256"] = sha256_hex(text);
    }
    std::ofstream(directory_.path() / "contract.json") << document.dump(1);
  }

  // Every finding as "path: found, expected ..." lines.
  std::string findings() {
    std::unique_ptr<const EngineDirectory> directory;
    const Status status = EngineDirectory::open(directory_.path(), directory);
    if (!status.ok()) return status.message();
    std::string out;
    for (const Finding& finding : inspect(*directory).findings) {
      out += finding.path + ": " + finding.found + ", expected " + finding.expected + "\n";
    }
    return out;
  }

  std::string with_configuration(const Edit& edit) {
    write({}, edit, [](Json&) {});
    return findings();
  }
  std::string with_contract(const Edit& edit) {
    write({}, [](Json&) {}, edit);
    return findings();
  }

  TemporaryDirectory directory_;
};

TEST_F(LlamaDirectory, ThatIsRightHasNoFindings) {
  EXPECT_EQ(with_configuration([](Json&) {}), "");
  write(TinyEngine::unified(1024), [](Json&) {}, [](Json&) {});
  EXPECT_EQ(findings(), "");
  write(TinyEngine::mining({-1, 1}), [](Json&) {}, [](Json&) {});
  EXPECT_EQ(findings(), "");
}

TEST_F(LlamaDirectory, EveryFieldIsRequired) {
  write_tiny_directory(directory_.path(), {});
  const Json whole = read(directory_.path() / "llama.json");
  for (const auto& [key, value] : whole.items()) {
    const std::string name = key;
    EXPECT_NE(with_configuration([&](Json& json) { json.erase(name); }).find("llama.json:" + name), std::string::npos)
        << name;
  }
  EXPECT_NE(with_configuration([](Json& json) { json["n_ctx"] = 4096; }).find("n_ctx"), std::string::npos);
}

TEST_F(LlamaDirectory, RulesBetweenFieldsAreFindings) {
  const auto expect = [&](const Edit& edit, const std::string& part) {
    const std::string found = with_configuration(edit);
    EXPECT_NE(found.find(part), std::string::npos) << part << " not in:\n" << found;
  };
  expect([](Json& json) { json["resident_heads"] = 250; }, "llama.json:resident_heads");
  expect([](Json& json) { json["step_token_budget"] = 70; }, "llama.json:step_token_budget");
  expect([](Json& json) { json["pool_tokens"] = 1024; }, "llama.json:pool_tokens");
  expect([](Json& json) { json["kv_layout"] = "unified"; }, "llama.json:pool_tokens");
  expect([](Json& json) { json["kv_type"] = "q8_0"; }, "llama.json:kv_type");
  expect([](Json& json) { json["slots"] = 1; }, "llama.json:slots");
  expect([](Json& json) { json["device"] = "cuda"; }, "llama.json:device");
  expect([](Json& json) { json["gguf"] = "other.gguf"; }, "llama.json:gguf");
  expect([](Json& json) { json["sequence_tokens"] = 500; }, "llama.json:sequence_tokens");
  expect([](Json& json) { json["reproducible"] = false; }, "capabilities.reproducible");
  expect([](Json& json) { json["payload"] = {{"layers", {-1}}, {"dtype", "float32"}}; }, "capabilities.payload");
  write(TinyEngine::unified(1024), [](Json& json) { json["pool_tokens"] = 1000; }, [](Json&) {});
  EXPECT_NE(findings().find("multiple of 256"), std::string::npos);
}

TEST_F(LlamaDirectory, DisagreementsWithTheContractAreFindings) {
  const auto expect = [&](const Edit& edit, const std::string& part) {
    const std::string found = with_contract(edit);
    EXPECT_NE(found.find(part), std::string::npos) << part << " not in:\n" << found;
  };
  expect([](Json& json) { json["limits"]["slots"] = 4; }, "llama.json:slots: 8");
  expect([](Json& json) { json["limits"]["step_token_budget"] = 200; }, "llama.json:step_token_budget: 256");
  expect([](Json& json) { json["limits"]["kv_block_tokens"] = 32; }, "limits.kv_block_tokens: 32");
  expect([](Json& json) { json["limits"]["beams"] = 2; }, "limits.beams: 2");
  expect([](Json& json) { json["model"]["weights_dtype"] = "bf16"; }, "model.weights_dtype: bf16");
  expect([](Json& json) { json["model"]["kv_cache_dtype"] = "q8_0"; }, "model.kv_cache_dtype: q8_0");
  expect([](Json& json) { json["runtime"]["version"] = "0.0.1"; }, "runtime.version");
  expect([](Json& json) { json["runtime"]["name"] = "vllm"; }, "runtime.name");
  write(
      TinyEngine::mining({-1}), [](Json&) {}, [](Json& json) { json["capabilities"]["payload"]["dtype"] = "float16"; });
  EXPECT_NE(findings().find("capabilities.payload.dtype"), std::string::npos);
}

TEST_F(LlamaDirectory, ALoadAnswersWithWhatTheEngineIs) {
  write_tiny_directory(directory_.path(), {});
  ifab_engine_t* engine = nullptr;
  char error[2048] = "";
  ASSERT_EQ(ifab_engine_create(directory_.path().c_str(), &engine, error, sizeof error), IFAB_OK) << error;
  std::vector<char> text(1 << 16);
  size_t size = 0;
  ASSERT_EQ(ifab_engine_describe(engine, text.data(), text.size(), &size, error, sizeof error), IFAB_OK) << error;
  const Json said = Json::parse(text.begin(), text.begin() + static_cast<ptrdiff_t>(size));
  EXPECT_EQ(said["capabilities"]["reproducible"], true);
  EXPECT_EQ(said["capabilities"]["guided_decoding"].size(), 3u);
  EXPECT_EQ(said["vocab_size"], tiny_vocab_size());
  EXPECT_EQ(said["kv_pool_blocks"], 12u * 12u) << "twelve streams of 768 tokens";
  ifab_engine_destroy(&engine);
}

TEST_F(LlamaDirectory, AModelThatIsNotWhatItsContractSaysIsRefusedAtLoad) {
  const auto expect = [&](const Edit& edit, const std::string& part) {
    write({}, [](Json&) {}, edit);
    ifab_engine_t* engine = nullptr;
    char error[4096] = "";
    EXPECT_EQ(ifab_engine_create(directory_.path().c_str(), &engine, error, sizeof error), IFAB_FAILED_PRECONDITION);
    EXPECT_NE(std::string(error).find(part), std::string::npos) << error;
    ifab_engine_destroy(&engine);
  };
  expect([](Json& json) { json["model"]["vocab_size"] = 1000; }, "model.vocab_size");
  expect([](Json& json) { json["model"]["layers"] = 3; }, "model.layers");
  expect([](Json& json) { json["model"]["weights_dtype"] = "q4_1"; }, "model.weights_dtype");
}

TEST_F(LlamaDirectory, AFileThatIsNoModelIsRefusedWithItsName) {
  write_tiny_directory(directory_.path(), {});
  const std::string garbage(std::filesystem::file_size(directory_.path() / "model.gguf"), 'x');
  std::ofstream(directory_.path() / "model.gguf", std::ios::binary) << garbage;
  ifab_engine_t* engine = nullptr;
  char error[4096] = "";
  EXPECT_EQ(ifab_engine_create(directory_.path().c_str(), &engine, error, sizeof error), IFAB_FAILED_PRECONDITION);
  EXPECT_NE(std::string(error).find("model.gguf"), std::string::npos) << error;
}

}  // namespace
}  // namespace test
}  // namespace ifab
