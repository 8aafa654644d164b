// SPDX-License-Identifier: Apache-2.0
//
// Checks documents and engine directories by the library's own rules, for the tests that hold other readers to them.
//
//   ifab_check < FRAMES
//
// Standard input is a row of frames: a line "KIND SIZE", then SIZE bytes. KIND is the name of a schema (`contract`,
// `llama`, ...), and the bytes are a document; or it is `directory`, and they are the path of an engine directory. For
// each frame one line of JSON goes to standard output: a list of {"path", "found", "expected"}, or, for a directory
// that cannot be opened, {"error": TEXT}. Exit status 2: a frame that cannot be read, or a schema that does not exist.
#include <cstddef>
#include <exception>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "directory.h"
#include "schema.h"

namespace {

using Json = nlohmann::ordered_json;

Json listed(const std::vector<ifab::Finding>& findings) {
  Json out = Json::array();
  for (const ifab::Finding& finding : findings) {
    out.push_back({{"path", finding.path}, {"found", finding.found}, {"expected", finding.expected}});
  }
  return out;
}

Json check(const std::string& kind, const std::string& bytes) {
  std::vector<ifab::Finding> findings;
  if (kind != "directory") {
    ifab::read_checked(bytes, kind, findings);
    return listed(findings);
  }
  std::unique_ptr<const ifab::EngineDirectory> directory;
  const ifab::Status status = ifab::EngineDirectory::open(bytes, directory);
  return status.ok() ? listed(directory->findings()) : Json{{"error", status.message()}};
}

}  // namespace

int main() {
  try {
    std::string kind;
    size_t size = 0;
    while (std::cin >> kind >> size) {
      std::cin.get();
      std::string bytes(size, '\0');
      if (!std::cin.read(bytes.data(), static_cast<std::streamsize>(size))) {
        std::cerr << "ifab_check: a frame of kind " << kind << " ends before its " << size << " bytes\n";
        return 2;
      }
      std::cout << check(kind, bytes).dump() << '\n' << std::flush;
    }
    return 0;
  } catch (const std::exception& error) {
    std::cerr << "ifab_check: " << error.what() << '\n';
    return 2;
  }
}
