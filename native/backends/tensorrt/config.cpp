// SPDX-License-Identifier: Apache-2.0
#include "config.h"

#include <algorithm>
#include <utility>

#include "document.h"
#include "launcher.h"
#include "schema.h"

namespace ifab::tensorrt {

std::optional<Config> read_config(const EngineDirectory& directory, std::vector<Finding>& findings) {
  std::string text;
  if (Status status = directory.read_text(kConfigurationFile, text); !status.ok()) {
    add_finding(findings, {kConfigurationFile, status.message(), "a file that can be read"});
    return std::nullopt;
  }
  std::vector<Finding> own;
  const std::optional<Value> document = read_checked(text, "tensorrt", own);
  if (own.empty() && document) {
    Config config;
    config.plan = document->at("plan").text();
    for (const Value& plugin : document->at("plugins").items()) {
      // A library of the engine directory, which the contract's digests cover, goes before one of the machine.
      const std::string& name = plugin.text();
      config.plugins.push_back(directory.has(name) ? directory.file_path(name) : name);
    }
    if (directory.has(config.plan)) return config;
    own.push_back({"plan", render_text(config.plan), "a file of the engine directory"});
  }
  for (Finding& finding : own) {
    finding.path = std::string(kConfigurationFile) + ":" + finding.path;
    add_finding(findings, std::move(finding));
  }
  return std::nullopt;
}

std::string missing_plugin(std::string_view complaint) {
  constexpr std::string_view kWords = "ind plugin";
  const size_t words = complaint.find(kWords);
  if (words == std::string_view::npos) return {};
  complaint.remove_prefix(words + kWords.size());
  complaint.remove_prefix(std::min(complaint.find_first_not_of(": "), complaint.size()));
  return std::string(complaint.substr(0, complaint.find_first_of(", :)")));
}

}  // namespace ifab::tensorrt
