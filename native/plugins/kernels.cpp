// SPDX-License-Identifier: Apache-2.0
#include "kernels.h"

#include <dlfcn.h>

#include <algorithm>
#include <utility>

#include "shape.h"

// The compiled kernels of all architectures, as nvcc made them.
__asm__(
    ".pushsection .rodata\n"
    ".balign 64\n"
    ".hidden ifab_attention_image\n"
    ".global ifab_attention_image\n"
    "ifab_attention_image:\n"
    ".incbin \"" IFAB_ATTENTION_IMAGE
    "\"\n"
    ".popsection\n");
extern "C" __attribute__((visibility("hidden"))) const unsigned char ifab_attention_image[];

namespace ifab::attention {
namespace {

// Numbers of the driver's interface, which are its ABI.
constexpr int kMemoryOfMultiprocessor = 81;
constexpr int kMemoryReservedForBlock = 111;
constexpr int kDynamicSharedBytes = 8;
constexpr int kSharedMemoryCarveout = 9;

size_t place_of(const Shape& shape) {
  return (shape.head_size == 128 ? 4U : 0U) + (shape.packed != 0 ? 2U : 0U) + (shape.output_scale > 0.0F ? 1U : 0U);
}

}  // namespace

struct Kernels::Driver {
  int (*init)(unsigned);
  int (*load)(void**, const void*, void*, void*, unsigned, void*, void*, unsigned);
  int (*unload)(void*);
  int (*kernel)(void**, void*, const char*);
  int (*set)(int, int, void*, int);
  int (*device)(int*);
  int (*attribute)(int*, int, int);
  int (*launch)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**);
  int (*error_name)(int, const char**);
};

std::shared_ptr<Kernels> Kernels::shared(std::string& problem) {
  static std::mutex mutex;
  static std::weak_ptr<Kernels> kept;
  const std::lock_guard lock(mutex);
  std::shared_ptr<Kernels> kernels = kept.lock();
  if (kernels != nullptr) return kernels;
  kernels.reset(new Kernels);
  problem = kernels->load();
  if (!problem.empty()) return nullptr;
  kept = kernels;
  return kernels;
}

Kernels::~Kernels() {
  if (library_ != nullptr) driver_->unload(library_);
}

std::string Kernels::load() {
  // The driver keeps threads of its own: its library stays loaded.
  void* driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (driver == nullptr) return "attention needs an NVIDIA card, and there is no driver here (libcuda.so.1)";
  driver_ = std::make_unique<Driver>();
  const std::array<std::pair<const char*, void**>, 9> wanted = {{
      {"cuInit", reinterpret_cast<void**>(&driver_->init)},
      {"cuLibraryLoadData", reinterpret_cast<void**>(&driver_->load)},
      {"cuLibraryUnload", reinterpret_cast<void**>(&driver_->unload)},
      {"cuLibraryGetKernel", reinterpret_cast<void**>(&driver_->kernel)},
      {"cuKernelSetAttribute", reinterpret_cast<void**>(&driver_->set)},
      {"cuCtxGetDevice", reinterpret_cast<void**>(&driver_->device)},
      {"cuDeviceGetAttribute", reinterpret_cast<void**>(&driver_->attribute)},
      {"cuLaunchKernel", reinterpret_cast<void**>(&driver_->launch)},
      {"cuGetErrorName", reinterpret_cast<void**>(&driver_->error_name)},
  }};
  for (const auto& [name, slot] : wanted) {
    *slot = dlsym(driver, name);
    if (*slot == nullptr) return std::string("the NVIDIA driver here is too old for attention: it has no ") + name;
  }
  if (const int code = driver_->init(0); code != 0) return failed("the driver does not start", code);
  const int code = driver_->load(&library_, ifab_attention_image, nullptr, nullptr, 0, nullptr, nullptr, 0);
  return code == 0 ? std::string() : failed("the attention kernels do not load", code);
}

std::string Kernels::failed(const char* what, int code) const {
  const char* name = nullptr;
  driver_->error_name(code, &name);
  return std::string(what) + ": " + (name != nullptr ? name : "an unknown error of the driver");
}

std::string Kernels::prepare(const Shape& shape, int32_t card, Prepared& prepared) {
  const std::lock_guard lock(preparing_);
  if (prepared.function.load(std::memory_order_relaxed) != nullptr) return {};
  void* kernel = nullptr;
  int code = driver_->kernel(&kernel, library_, kernel_name(shape).c_str());
  if (code != 0) return failed("no attention kernel of that name", code);
  if (code = driver_->attribute(&prepared.multiprocessor_bytes, kMemoryOfMultiprocessor, card); code != 0) {
    return failed("asking the card for its shared memory", code);
  }
  if (code = driver_->attribute(&prepared.reserved_bytes, kMemoryReservedForBlock, card); code != 0) {
    return failed("asking the card for its shared memory", code);
  }
  Shape largest = shape;
  largest.row_tokens = kLongestRow;
  const int32_t bytes = geometry(largest, 1, prepared.multiprocessor_bytes, prepared.reserved_bytes).shared_bytes;
  if (code = driver_->set(kDynamicSharedBytes, bytes, kernel, card); code != 0) {
    return failed("the card has too little shared memory for attention, or no kernel was compiled for it", code);
  }
  // A hint, of which only speed depends: what two blocks need, the rest for cosines and sines in the cache.
  const int64_t both = 2 * (static_cast<int64_t>(bytes) + prepared.reserved_bytes);
  const int64_t percent = std::min<int64_t>(100, both * 100 / prepared.multiprocessor_bytes);
  (void)driver_->set(kSharedMemoryCarveout, static_cast<int>(percent), kernel, card);
  prepared.function.store(kernel, std::memory_order_release);
  return {};
}

std::string Kernels::launch(const Shape& shape, int64_t rows, const Arguments& addresses, void* stream) {
  int32_t card = 0;
  if (const int code = driver_->device(&card); code != 0) return failed("no card is current on this thread", code);
  if (static_cast<size_t>(card) >= kCards) return "attention knows 64 cards of one machine, and this is another";
  Prepared& prepared = prepared_[static_cast<size_t>(card)][place_of(shape)];
  void* function = prepared.function.load(std::memory_order_acquire);
  if (function == nullptr) {
    if (std::string problem = prepare(shape, card, prepared); !problem.empty()) return problem;
    function = prepared.function.load(std::memory_order_relaxed);
  }
  const Geometry cut = geometry(shape, rows, prepared.multiprocessor_bytes, prepared.reserved_bytes);
  Arguments arguments = arguments_of(shape, cut);
  arguments.qkv = addresses.qkv;
  arguments.positions = addresses.positions;
  arguments.segments = addresses.segments;
  arguments.cosine = addresses.cosine;
  arguments.sine = addresses.sine;
  arguments.output = addresses.output;
  std::array<void*, 1> values = {&arguments};
  const int code =
      driver_->launch(function, static_cast<unsigned>(cut.blocks), 1, 1, static_cast<unsigned>(cut.threads), 1, 1,
                      static_cast<unsigned>(cut.shared_bytes), stream, values.data(), nullptr);
  return code == 0 ? std::string() : failed("the card refuses a launch of attention", code);
}

}  // namespace ifab::attention

// For who has no TensorRT: launches one attention on a stream of the current context. Returns null, or a sentence that
// is valid until this thread's next call.
extern "C" __attribute__((visibility("default"))) const char* ifab_attention_launch(
    const void* qkv, const int32_t* positions, const int32_t* segments, const float* cosine, const float* sine,
    void* output, int64_t rows, int32_t heads, int32_t kv_heads, int32_t head_size, int32_t row_tokens,
    float output_scale, void* stream) {
  using namespace ifab::attention;
  static thread_local std::string problem;
  static std::shared_ptr<Kernels> kept;
  static std::mutex mutex;
  const Shape shape{heads, kv_heads, head_size, row_tokens, positions != nullptr ? 1 : 0, output_scale};
  problem = refuse(shape);
  if (problem.empty()) problem = refuse_tokens(shape, rows * row_tokens);
  if (problem.empty()) {
    const std::lock_guard lock(mutex);
    if (kept == nullptr) kept = Kernels::shared(problem);
  }
  if (problem.empty()) {
    Arguments addresses;
    addresses.qkv = static_cast<const uint16_t*>(qkv);
    addresses.positions = positions;
    addresses.segments = segments;
    addresses.cosine = cosine;
    addresses.sine = sine;
    addresses.output = static_cast<uint8_t*>(output);
    problem = kept->launch(shape, rows, addresses, stream);
  }
  return problem.empty() ? nullptr : problem.c_str();
}
