// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "control.h"
#include "driver.h"

namespace ifab::standin {

using test::SimulatedEngine;

inline SimulatedEngine small() {
  SimulatedEngine engine;
  engine.slots = 8;
  engine.samples_max = 4;
  engine.step_token_budget = 64;
  engine.kv_pool_blocks = 256;
  engine.end_one_in = 40;
  return engine;
}

class ExecutorBackendTest : public ::testing::Test {
 protected:
  void SetUp() override { reset(); }
  void TearDown() override { reset(); }
  static void reset() {
    Control& process = control();
    process.gate.open();
    process.world_size = 1;
    process.register_plugins = true;
    process.semantics.reset();
    process.card_fails = false;
    process.requests.clear();
    process.cancels.clear();
    process.calls.clear();
  }
  // Loads, and expects to be refused; returns why.
  static std::string refusal(const SimulatedEngine& engine, const Patches& patches) {
    try {
      const Driver driver(engine, patches);
    } catch (const std::runtime_error& error) {
      return error.what();
    }
    return "loaded";
  }
};

#define EXPECT_SAYS(text, words) EXPECT_NE((text).find(words), std::string::npos) << (text)

}  // namespace ifab::standin
