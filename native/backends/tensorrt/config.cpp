// SPDX-License-Identifier: Apache-2.0
#include "config.h"

#include <utility>

#include "document.h"
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
    for (const Value& plugin : document->at("plugins").items()) config.plugins.push_back(plugin.text());
    if (directory.has(config.plan)) return config;
    own.push_back({"plan", render_text(config.plan), "a file of the engine directory"});
  }
  for (Finding& finding : own) {
    finding.path = std::string(kConfigurationFile) + ":" + finding.path;
    add_finding(findings, std::move(finding));
  }
  return std::nullopt;
}

}  // namespace ifab::tensorrt
