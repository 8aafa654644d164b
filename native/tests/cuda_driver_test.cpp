// SPDX-License-Identifier: Apache-2.0
//
// A machine without a card, with no driver and with one: each is one sentence and nothing worse.
#include "cuda_driver.h"

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <string>

namespace ifab::tensorrt {
namespace {

std::string refusal(int32_t number) {
  CudaDriver driver;
  const Status status = driver.open(number);
  EXPECT_EQ(status.code(), IFAB_UNAVAILABLE);
  return status.message();
}

TEST(CudaDriver, EveryWayToHaveNoCardIsOneSentence) {
  if (void* driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD | RTLD_LOCAL); driver != nullptr) {
    GTEST_SKIP() << "this process has a driver";
  }
  if (CudaDriver driver; driver.open(0).ok()) GTEST_SKIP() << "this machine has a card";
  EXPECT_EQ(refusal(0), "this engine needs an NVIDIA card, and there is no driver here (libcuda.so.1 is not found)");
  // It has the driver's soname: whoever asks for that gets it.
  void* stub = dlopen(IFAB_CUDA_STUB, RTLD_NOW | RTLD_LOCAL);
  ASSERT_NE(stub, nullptr) << dlerror();
  const auto answer = reinterpret_cast<void (*)(int, int)>(dlsym(stub, "stub_answer"));
  ASSERT_NE(answer, nullptr);
  answer(100, 0);
  EXPECT_EQ(refusal(0), "this engine needs an NVIDIA card, and the driver sees none");
  answer(0, 0);
  EXPECT_EQ(refusal(0), "this engine needs an NVIDIA card, and the driver sees none");
  answer(803, 0);
  EXPECT_EQ(refusal(0),
            "this engine needs an NVIDIA card, and the driver does not start: CUDA_ERROR_SYSTEM_DRIVER_MISMATCH");
  answer(0, 2);
  EXPECT_EQ(refusal(2), "this engine runs on card number 2, and the driver sees 2, counted from 0");
  EXPECT_EQ(refusal(1), "opening the card: CUDA_ERROR_INVALID_VALUE");
}

}  // namespace
}  // namespace ifab::tensorrt
