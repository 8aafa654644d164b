// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "contract.h"
#include "status.h"

namespace ifab {

// An engine directory, opened: its files by name and size, and its contract. Everything that a backend reads of its
// engine, it reads through this. Constant once opened; weights are not read.
class EngineDirectory {
 public:
  // Opens a directory. IFAB_NOT_FOUND: there is none, or no contract.json in it. IFAB_FAILED_PRECONDITION: it cannot
  // be read, or holds more than kMaxEntries entries. Wrong content is no error: it is in findings().
  static Status open(const std::string& path, std::unique_ptr<const EngineDirectory>& out);

  // Absolute path, links resolved.
  const std::string& path() const { return path_; }
  // SHA-256 of the bytes of contract.json, 64 lower-case hexadecimal digits: the engine's digest.
  const std::string& contract_sha256() const { return contract_sha256_; }
  const std::string& contract_text() const { return contract_text_; }
  // The contract; null where its document has findings.
  const ContractValues* contract() const { return contract_ ? &*contract_ : nullptr; }
  // What is wrong with contract.json, and where it and the files that lie here disagree: a listed file that is missing
  // or of another size, a file that is not listed, a link out of the directory. Digests of files other than the
  // contract are not computed here: whoever brings an engine to a node checks them once.
  const std::vector<Finding>& findings() const { return findings_; }

  // Whether a regular file of that relative path lies here. A link out of the directory does not count.
  bool has(std::string_view name) const { return files_.contains(name); }
  // Relative path and size in bytes of every regular file, contract.json included, in order of path.
  const std::map<std::string, uint64_t, std::less<>>& files() const { return files_; }
  // Absolute path of a file for which has() is true.
  std::string file_path(std::string_view name) const;
  // The bytes of a configuration file, at most kMaxDocumentBytes + 1 of it, so that the reader of the document sees
  // that it is too large. IFAB_NOT_FOUND: has() is false. IFAB_FAILED_PRECONDITION: it cannot be read.
  Status read_text(std::string_view name, std::string& out) const;

  static constexpr size_t kMaxEntries = 4096;

 private:
  EngineDirectory() = default;
  Status list();
  Status list_entry(const std::filesystem::directory_entry& entry);
  void read_contract_document();
  void compare_files(const Value& document);

  std::string path_;
  std::string contract_text_;
  std::string contract_sha256_;
  std::optional<ContractValues> contract_;
  std::vector<Finding> findings_;
  std::map<std::string, uint64_t, std::less<>> files_;
  std::map<std::string, std::string, std::less<>> strangers_;  // what lies here and is no regular file: what it is
};

}  // namespace ifab
