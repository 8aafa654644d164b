// SPDX-License-Identifier: Apache-2.0
#include "directory.h"

#include <fstream>
#include <set>
#include <system_error>
#include <utility>

#include "schema.h"
#include "sha256.h"

namespace ifab {
namespace {

namespace fs = std::filesystem;

constexpr const char* kContractFile = "contract.json";

Status unreadable(const std::string& what, const std::error_code& error) {
  return {IFAB_FAILED_PRECONDITION, what + " cannot be read: " + error.message()};
}

// Whether `path` lies below `root`; both absolute, links resolved.
bool inside(const fs::path& path, const fs::path& root) {
  const fs::path relative = path.lexically_relative(root);
  return !relative.empty() && *relative.begin() != "..";
}

}  // namespace

Status EngineDirectory::open(const std::string& path, std::unique_ptr<const EngineDirectory>& out) {
  std::error_code error;
  const fs::path root = fs::canonical(path, error);
  if (error || !fs::is_directory(root, error)) return {IFAB_NOT_FOUND, "no such engine directory: " + path};
  std::unique_ptr<EngineDirectory> directory(new EngineDirectory);
  directory->path_ = root.string();
  if (Status status = directory->list(); !status.ok()) return status;
  if (!directory->has(kContractFile)) return {IFAB_NOT_FOUND, "no contract.json in engine directory " + path};
  if (Status status = directory->read_text(kContractFile, directory->contract_text_); !status.ok()) return status;
  directory->read_contract_document();
  out = std::move(directory);
  return {};
}

Status EngineDirectory::list() {
  std::error_code error;
  fs::recursive_directory_iterator at(path_, error);
  if (error) return unreadable(path_, error);
  size_t entries = 0;
  for (; at != fs::recursive_directory_iterator(); at.increment(error)) {
    if (++entries > kMaxEntries) {
      return {IFAB_FAILED_PRECONDITION,
              "engine directory " + path_ + " holds more than " + std::to_string(kMaxEntries) + " entries"};
    }
    if (Status status = list_entry(*at); !status.ok()) return status;
  }
  return error ? unreadable(path_, error) : Status{};
}

Status EngineDirectory::list_entry(const fs::directory_entry& entry) {
  const std::string name = entry.path().lexically_relative(path_).generic_string();
  std::error_code error;
  const bool link = entry.is_symlink(error);
  if (!link && entry.is_directory(error)) return {};
  if (link) {
    const fs::path target = fs::canonical(entry.path(), error);
    if (error || !inside(target, path_)) {
      strangers_.emplace(name, "a link out of the directory");
      return {};
    }
  }
  if (!entry.is_regular_file(error)) {
    strangers_.emplace(name, "no regular file");
    return {};
  }
  const uintmax_t size = entry.file_size(error);
  if (error) return unreadable(entry.path().string(), error);
  files_.emplace(name, size);
  return {};
}

void EngineDirectory::read_contract_document() {
  contract_sha256_ = sha256_hex(contract_text_);
  const std::optional<Value> document = read_checked(contract_text_, "contract", findings_);
  if (!document) return;
  if (findings_.empty()) contract_ = contract_values(*document);
  compare_files(*document);
}

// Works on a document with findings too, as far as its list of files can be read: all findings come at once.
void EngineDirectory::compare_files(const Value& document) {
  const Value* list = document.find("files");
  if (list == nullptr || !list->is(Value::Kind::kList)) return;
  std::set<std::string, std::less<>> listed = {kContractFile};
  for (size_t i = 0; i < list->items().size(); ++i) {
    const Value& file = list->items()[i];
    const Value* path = file.find("path");
    if (path == nullptr || !path->is(Value::Kind::kText)) continue;
    listed.insert(path->text());
    const std::string at = item_path("files", i);
    if (!has(path->text())) {
      const auto stranger = strangers_.find(path->text());
      const std::string found = stranger == strangers_.end() ? "missing" : stranger->second;
      add_finding(findings_, {at + ".path", render(*path) + ", " + found, "file in the engine directory"});
      continue;
    }
    const uint64_t size = files_.find(path->text())->second;
    const Value* said = file.find("size_bytes");
    if (said != nullptr && said->is(Value::Kind::kInteger) && !std::cmp_equal(said->integer(), size)) {
      add_finding(findings_, {at + ".size_bytes", render(*said), std::to_string(size) + ", the size of the file"});
    }
  }
  const auto unlisted = [&](const std::string& name, const std::string& what) {
    if (!listed.contains(name)) {
      add_finding(findings_, {"files", render_text(name) + what + " beside the listed files",
                              "entry for every file of the engine directory"});
    }
  };
  for (const auto& [name, size] : files_) unlisted(name, "");
  for (const auto& [name, what] : strangers_) unlisted(name, ", " + what + ",");
}

std::string EngineDirectory::file_path(std::string_view name) const {
  return (fs::path(path_) / name).string();
}

Status EngineDirectory::read_text(std::string_view name, std::string& out) const {
  if (!has(name)) return {IFAB_NOT_FOUND, "no file " + std::string(name) + " in engine directory " + path_};
  std::ifstream file(file_path(name), std::ios::binary);
  std::string text(kMaxDocumentBytes + 1, '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  if (file.bad() || (file.fail() && !file.eof())) {
    return {IFAB_FAILED_PRECONDITION, file_path(name) + " cannot be read"};
  }
  text.resize(static_cast<size_t>(file.gcount()));
  out = std::move(text);
  return {};
}

}  // namespace ifab
