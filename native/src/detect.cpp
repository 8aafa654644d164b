// SPDX-License-Identifier: Apache-2.0
#include "detect.h"

#include <algorithm>

namespace ifab {
namespace {

constexpr size_t kNamesShown = 12;

std::string names_in(const EngineDirectory& directory) {
  std::string names;
  size_t shown = 0;
  for (const auto& [name, size] : directory.files()) {
    if (shown++ == kNamesShown)
      return names + " and " + std::to_string(directory.files().size() - kNamesShown) + " more";
    names += (names.empty() ? "" : ", ") + name;
  }
  return names.empty() ? "no files" : names;
}

std::string looked_for(std::string_view between) {
  std::string text;
  for (const BackendEntry& entry : backends()) {
    if (!text.empty()) text += between;
    text += std::string(entry.configuration_file) + " (" + entry.looks_for + ")";
  }
  return text;
}

}  // namespace

Inspection inspect(const EngineDirectory& directory) {
  Inspection result;
  result.findings = directory.findings();
  std::vector<const BackendEntry*> known;
  for (const BackendEntry& entry : backends()) {
    if (entry.recognises(directory)) known.push_back(&entry);
  }
  if (known.empty()) {
    result.findings.push_back({"", names_in(directory), "the configuration of one backend: " + looked_for(", or ")});
    for (const AbsentBackend& absent : absent_backends()) {
      if (!directory.has(absent.file)) continue;
      result.findings.push_back(
          {"", absent.file,
           std::string("a library that is built with the backend of ") + absent.runs + ", which this one is not"});
    }
  } else if (known.size() > 1) {
    std::string found;
    for (const BackendEntry* entry : known)
      found += (found.empty() ? "" : " and ") + std::string(entry->configuration_file);
    result.findings.push_back({"", found, "the configuration of exactly one backend: " + looked_for(", or ")});
  } else {
    result.backend = known.front();
    result.backend->inspect(directory, result.findings);
  }
  return result;
}

}  // namespace ifab
