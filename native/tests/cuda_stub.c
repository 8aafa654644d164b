/* SPDX-License-Identifier: Apache-2.0
 *
 * A driver without a card, for tests: what cuInit() and cuDeviceGetCount() answer is set by stub_answer(); the other
 * calls are there to be found, and fail. */
static int init_answer = 100;
static int cards = 0;

void stub_answer(int init, int count) {
  init_answer = init;
  cards = count;
}

int cuInit(unsigned flags) {
  (void)flags;
  return init_answer;
}
int cuDeviceGetCount(int* count) {
  *count = cards;
  return 0;
}
int cuGetErrorName(int code, const char** name) {
  *name = code == 803 ? "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH" : "CUDA_ERROR_INVALID_VALUE";
  return 0;
}

#define STUB(name) \
  int name(void) { \
    return 1;      \
  }
STUB(cuDeviceGet)
STUB(cuDeviceGetName)
STUB(cuDeviceGetAttribute)
STUB(cuDeviceTotalMem_v2)
STUB(cuDevicePrimaryCtxRetain)
STUB(cuDevicePrimaryCtxRelease_v2)
STUB(cuCtxSetCurrent)
STUB(cuMemAlloc_v2)
STUB(cuMemFree_v2)
STUB(cuMemHostAlloc)
STUB(cuMemFreeHost)
STUB(cuStreamCreate)
STUB(cuStreamDestroy_v2)
STUB(cuEventCreate)
STUB(cuEventDestroy_v2)
STUB(cuMemcpyHtoDAsync_v2)
STUB(cuMemcpyDtoHAsync_v2)
STUB(cuEventRecord)
STUB(cuStreamWaitEvent)
STUB(cuEventSynchronize)
