// SPDX-License-Identifier: Apache-2.0
#include "cuda_driver.h"

#include <dlfcn.h>

#include <array>
#include <utility>

namespace ifab::tensorrt {
namespace {

// Numbers of the driver's interface, which are its ABI.
constexpr int kErrorOutOfMemory = 2;
constexpr int kErrorNoDevice = 100;
constexpr int kAttributeMajor = 75;
constexpr int kAttributeMinor = 76;
constexpr unsigned kStreamNonBlocking = 1;
constexpr unsigned kEventBlockingWithoutTiming = 1 | 2;
constexpr unsigned kPinnedPortable = 1;

}  // namespace

struct CudaDriver::Calls {
  int (*init)(unsigned);
  int (*device_count)(int*);
  int (*device)(int*, int);
  int (*device_name)(char*, int, int);
  int (*device_attribute)(int*, int, int);
  int (*device_memory)(size_t*, int);
  int (*retain)(void**, int);
  int (*let_go)(int);
  int (*set_current)(void*);
  int (*allocate)(CudaPointer*, size_t);
  int (*release)(CudaPointer);
  int (*allocate_pinned)(void**, size_t, unsigned);
  int (*release_pinned)(void*);
  int (*make_stream)(CudaStream*, unsigned);
  int (*end_stream)(CudaStream);
  int (*make_event)(CudaEvent*, unsigned);
  int (*end_event)(CudaEvent);
  int (*copy_in)(CudaPointer, const void*, size_t, CudaStream);
  int (*copy_out)(void*, CudaPointer, size_t, CudaStream);
  int (*record)(CudaEvent, CudaStream);
  int (*wait_on_stream)(CudaStream, CudaEvent, unsigned);
  int (*wait)(CudaEvent);
  int (*error_name)(int, const char**);
};

CudaDriver::~CudaDriver() {
  if (retained_) calls_->let_go(device_);
  delete calls_;
  // The driver keeps threads of its own: its library stays loaded.
}

Status CudaDriver::find(int32_t number) {
  library_ = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library_ == nullptr) {
    return {IFAB_UNAVAILABLE,
            "this engine needs an NVIDIA card, and there is no driver here (libcuda.so.1 is not found)"};
  }
  calls_ = new Calls{};
  const std::array<std::pair<const char*, void**>, 23> wanted = {{
      {"cuInit", reinterpret_cast<void**>(&calls_->init)},
      {"cuDeviceGetCount", reinterpret_cast<void**>(&calls_->device_count)},
      {"cuDeviceGet", reinterpret_cast<void**>(&calls_->device)},
      {"cuDeviceGetName", reinterpret_cast<void**>(&calls_->device_name)},
      {"cuDeviceGetAttribute", reinterpret_cast<void**>(&calls_->device_attribute)},
      {"cuDeviceTotalMem_v2", reinterpret_cast<void**>(&calls_->device_memory)},
      {"cuDevicePrimaryCtxRetain", reinterpret_cast<void**>(&calls_->retain)},
      {"cuDevicePrimaryCtxRelease_v2", reinterpret_cast<void**>(&calls_->let_go)},
      {"cuCtxSetCurrent", reinterpret_cast<void**>(&calls_->set_current)},
      {"cuMemAlloc_v2", reinterpret_cast<void**>(&calls_->allocate)},
      {"cuMemFree_v2", reinterpret_cast<void**>(&calls_->release)},
      {"cuMemHostAlloc", reinterpret_cast<void**>(&calls_->allocate_pinned)},
      {"cuMemFreeHost", reinterpret_cast<void**>(&calls_->release_pinned)},
      {"cuStreamCreate", reinterpret_cast<void**>(&calls_->make_stream)},
      {"cuStreamDestroy_v2", reinterpret_cast<void**>(&calls_->end_stream)},
      {"cuEventCreate", reinterpret_cast<void**>(&calls_->make_event)},
      {"cuEventDestroy_v2", reinterpret_cast<void**>(&calls_->end_event)},
      {"cuMemcpyHtoDAsync_v2", reinterpret_cast<void**>(&calls_->copy_in)},
      {"cuMemcpyDtoHAsync_v2", reinterpret_cast<void**>(&calls_->copy_out)},
      {"cuEventRecord", reinterpret_cast<void**>(&calls_->record)},
      {"cuStreamWaitEvent", reinterpret_cast<void**>(&calls_->wait_on_stream)},
      {"cuEventSynchronize", reinterpret_cast<void**>(&calls_->wait)},
      {"cuGetErrorName", reinterpret_cast<void**>(&calls_->error_name)},
  }};
  for (const auto& [name, slot] : wanted) {
    *slot = dlsym(library_, name);
    if (*slot == nullptr)
      return {IFAB_UNAVAILABLE, std::string("the NVIDIA driver here is too old: it has no ") + name};
  }
  const int started = calls_->init(0);
  int count = 0;
  if (started != kErrorNoDevice) {
    if (Status status = check(started, "this engine needs an NVIDIA card, and the driver does not start");
        !status.ok()) {
      return status;
    }
    if (Status status = check(calls_->device_count(&count), "counting cards"); !status.ok()) return status;
  }
  if (count == 0) return {IFAB_UNAVAILABLE, "this engine needs an NVIDIA card, and the driver sees none"};
  if (number >= count) {
    return {IFAB_UNAVAILABLE, "this engine runs on card number " + std::to_string(number) + ", and the driver sees " +
                                  std::to_string(count) + ", counted from 0"};
  }
  return {};
}

Status CudaDriver::open(int32_t number) {
  if (Status status = find(number); !status.ok()) return status;
  if (Status status = check(calls_->device(&device_, number), "opening the card"); !status.ok()) return status;
  void* context = nullptr;
  if (Status status = check(calls_->retain(&context, device_), "opening the card"); !status.ok()) return status;
  retained_ = true;
  if (Status status = check(calls_->set_current(context), "opening the card"); !status.ok()) return status;
  std::array<char, 128> name{};
  size_t bytes = 0;
  calls_->device_name(name.data(), static_cast<int>(name.size()) - 1, device_);
  calls_->device_attribute(&card_.major, kAttributeMajor, device_);
  calls_->device_attribute(&card_.minor, kAttributeMinor, device_);
  calls_->device_memory(&bytes, device_);
  card_.name = name.data();
  card_.memory_bytes = bytes;
  return {};
}

Status CudaDriver::check(int code, const char* what) const {
  if (code == 0) return {};
  const char* name = nullptr;
  calls_->error_name(code, &name);
  return {code == kErrorOutOfMemory ? IFAB_RESOURCE_EXHAUSTED : IFAB_UNAVAILABLE,
          std::string(what) + ": " + (name != nullptr ? name : "an unknown error of the driver")};
}

Status CudaDriver::allocate(uint64_t bytes, CudaPointer& out) {
  return check(calls_->allocate(&out, bytes), "allocating memory of the card");
}
void CudaDriver::release(CudaPointer pointer) {
  calls_->release(pointer);
}
Status CudaDriver::allocate_pinned(uint64_t bytes, void*& out) {
  return check(calls_->allocate_pinned(&out, bytes, kPinnedPortable), "allocating pinned memory");
}
void CudaDriver::release_pinned(void* pointer) {
  calls_->release_pinned(pointer);
}
Status CudaDriver::make_stream(CudaStream& out) {
  return check(calls_->make_stream(&out, kStreamNonBlocking), "making a stream");
}
void CudaDriver::end_stream(CudaStream stream) {
  calls_->end_stream(stream);
}
Status CudaDriver::make_event(CudaEvent& out) {
  return check(calls_->make_event(&out, kEventBlockingWithoutTiming), "making an event");
}
void CudaDriver::end_event(CudaEvent event) {
  calls_->end_event(event);
}
Status CudaDriver::copy_in(CudaPointer to, const void* from, uint64_t bytes, CudaStream stream) {
  return check(calls_->copy_in(to, from, bytes, stream), "copying inputs to the card");
}
Status CudaDriver::copy_out(void* to, CudaPointer from, uint64_t bytes, CudaStream stream) {
  return check(calls_->copy_out(to, from, bytes, stream), "copying outputs from the card");
}
Status CudaDriver::record(CudaEvent event, CudaStream stream) {
  return check(calls_->record(event, stream), "recording an event");
}
Status CudaDriver::wait_on_stream(CudaStream stream, CudaEvent event) {
  return check(calls_->wait_on_stream(stream, event, 0), "ordering two streams");
}
Status CudaDriver::wait(CudaEvent event) {
  return check(calls_->wait(event), "waiting for the card");
}

}  // namespace ifab::tensorrt
