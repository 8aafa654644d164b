// SPDX-License-Identifier: Apache-2.0
// ifab_simulated_directory DIR   writes the directory of a simulated engine that stops now and then by itself.
#include <cstdio>
#include <exception>

#include "simulated_directory.h"

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: %s DIR\n", argv[0]);
    return 2;
  }
  try {
    ifab::test::SimulatedEngine engine;
    engine.end_one_in = 64;
    ifab::test::write_simulated_directory(argv[1], engine);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
