// SPDX-License-Identifier: Apache-2.0
//
// ifab_executor_directory SIMULATED OUT: the directory of a simulated engine as one for the Executor's stand-in.
#include <cstdio>
#include <exception>

#include "executor_directory.h"

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: ifab_executor_directory SIMULATED OUT\n");
    return 2;
  }
  try {
    ifab::standin::convert_directory(argv[1], argv[2]);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "ifab_executor_directory: %s\n", error.what());
    return 1;
  }
  return 0;
}
