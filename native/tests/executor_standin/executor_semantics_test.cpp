// SPDX-License-Identifier: Apache-2.0
//
// The stand-in behaves as the vendor's Executor is known to, and each of these facts is noticed: with the switch of a
// fact turned, and nothing else, its check fails.
#include <gtest/gtest.h>

#include <string>

#include "bench.h"

namespace ifab::standin {
namespace {

class Switched : public ::testing::TestWithParam<Switch> {
 protected:
  void TearDown() override {
    control().gate.open();
    control().world_size = 1;
    control().semantics.reset();
  }
};

class Fact : public Switched {};
class Unknown : public Switched {};

TEST_P(Fact, HoldsAndIsNoticedWhereItDoesNot) {
  const Checks& loading = checks_of_loading();
  const auto found = loading.find(GetParam().name);
  const auto check = found != loading.end() ? found->second : checks_of_running().at(GetParam().name);
  Semantics semantics;
  EXPECT_TRUE(check(semantics)) << "as it is known";
  semantics.*(GetParam().value) = false;
  EXPECT_FALSE(check(semantics)) << "turned";
}

INSTANTIATE_TEST_SUITE_P(Executor, Fact, ::testing::ValuesIn(kFacts),
                         [](const auto& tested) { return std::string(tested.param.name); });

TEST_P(Unknown, IsEitherWay) {
  const auto check = checks_of_unknown().at(GetParam().name);
  for (const bool value : {true, false}) {
    Semantics semantics;
    semantics.*(GetParam().value) = value;
    EXPECT_EQ(check(semantics), value);
  }
}

INSTANTIATE_TEST_SUITE_P(Executor, Unknown, ::testing::ValuesIn(kUnknown),
                         [](const auto& tested) { return std::string(tested.param.name); });

}  // namespace
}  // namespace ifab::standin
