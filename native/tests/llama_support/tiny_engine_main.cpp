// SPDX-License-Identifier: Apache-2.0
// ifab_tiny_llama_directory DIR   writes the directory of a tiny llama engine, for tests of other programs.
#include <cstdio>
#include <exception>

#include "tiny_engine.h"

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: %s DIR\n", argv[0]);
    return 2;
  }
  try {
    ifab::test::write_tiny_directory(argv[1], ifab::test::TinyEngine{});
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
