// SPDX-License-Identifier: Apache-2.0
#include "kernels.h"

#include <dlfcn.h>

#include <algorithm>
#include <utility>

#include "attention_shape.h"
#include "rows_shape.h"

// The compiled kernels of all architectures, as nvcc made them.
__asm__(
    ".pushsection .rodata\n"
    ".balign 64\n"
    ".hidden ifab_plugins_image\n"
    ".global ifab_plugins_image\n"
    "ifab_plugins_image:\n"
    ".incbin \"" IFAB_PLUGINS_IMAGE
    "\"\n"
    ".popsection\n");
extern "C" __attribute__((visibility("hidden"))) const unsigned char ifab_plugins_image[];

namespace ifab::plugins {
namespace {

// Numbers of the driver's interface, which are its ABI.
constexpr int kMemoryOfMultiprocessor = 81;
constexpr int kMemoryReservedForBlock = 111;
constexpr int kDynamicSharedBytes = 8;
constexpr int kSharedMemoryCarveout = 9;

// Numbers of the kernels in the order of kernels.cu.
size_t number_of(const AttentionShape& shape) {
  return (shape.head_size == 128 ? 4U : 0U) + (shape.packed != 0 ? 2U : 0U) + (shape.output_scale > 0.0F ? 1U : 0U);
}
size_t number_of(const Norm& norm) {
  return 8U + (norm.added != 0 ? 2U : 0U) + (norm.output_scale > 0.0F ? 1U : 0U);
}
size_t number_of(const GatedUnit& unit) {
  return 12U + (unit.output_scale > 0.0F ? 1U : 0U);
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
  if (driver == nullptr) return "our kernels need an NVIDIA card, and there is no driver here (libcuda.so.1)";
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
    if (*slot == nullptr) return std::string("the NVIDIA driver here is too old for our kernels: it has no ") + name;
  }
  if (const int code = driver_->init(0); code != 0) return failed("the driver does not start", code);
  const int code = driver_->load(&library_, ifab_plugins_image, nullptr, nullptr, 0, nullptr, nullptr, 0);
  return code == 0 ? std::string() : failed("our kernels do not load", code);
}

std::string Kernels::failed(const std::string& what, int code) const {
  const char* name = nullptr;
  driver_->error_name(code, &name);
  return what + ": " + (name != nullptr ? name : "an unknown error of the driver");
}

std::string Kernels::find(const std::string& name, size_t number, int32_t head_size, Prepared*& found) {
  int32_t card = 0;
  if (const int code = driver_->device(&card); code != 0) return failed("no card is current on this thread", code);
  if (static_cast<size_t>(card) >= kCards) return "our kernels know 64 cards of one machine, and this is another";
  found = &prepared_[static_cast<size_t>(card)][number];
  return found->function.load(std::memory_order_acquire) != nullptr ? std::string()
                                                                    : prepare(name, head_size, card, *found);
}

std::string Kernels::prepare(const std::string& name, int32_t head_size, int32_t card, Prepared& prepared) {
  const std::lock_guard lock(preparing_);
  if (prepared.function.load(std::memory_order_relaxed) != nullptr) return {};
  void* kernel = nullptr;
  int code = driver_->kernel(&kernel, library_, name.c_str());
  if (code != 0) return failed("no kernel " + name, code);
  if (head_size > 0) {
    if (code = driver_->attribute(&prepared.multiprocessor_bytes, kMemoryOfMultiprocessor, card); code == 0) {
      code = driver_->attribute(&prepared.reserved_bytes, kMemoryReservedForBlock, card);
    }
    if (code != 0) return failed("asking the card for its shared memory", code);
    AttentionShape largest;
    largest.heads = largest.kv_heads = 1;
    largest.head_size = head_size;
    largest.row_tokens = kLongestRow;
    const int32_t bytes = geometry(largest, 1, prepared.multiprocessor_bytes, prepared.reserved_bytes).shared_bytes;
    if (code = driver_->set(kDynamicSharedBytes, bytes, kernel, card); code != 0) {
      return failed("the card has too little shared memory for attention, or no kernel was compiled for it", code);
    }
    // A hint, of which only speed depends: what two blocks need, the rest for cosines and sines in the cache.
    const int64_t both = 2 * (static_cast<int64_t>(bytes) + prepared.reserved_bytes);
    const int64_t percent = std::min<int64_t>(100, both * 100 / prepared.multiprocessor_bytes);
    (void)driver_->set(kSharedMemoryCarveout, static_cast<int>(percent), kernel, card);
  }
  prepared.function.store(kernel, std::memory_order_release);
  return {};
}

std::string Kernels::run(const Prepared& prepared, int64_t blocks, int32_t threads, int32_t shared_bytes,
                         void* arguments, void* stream) {
  std::array<void*, 1> values = {arguments};
  const int code = driver_->launch(prepared.function.load(std::memory_order_relaxed), static_cast<unsigned>(blocks), 1,
                                   1, static_cast<unsigned>(threads), 1, 1, static_cast<unsigned>(shared_bytes), stream,
                                   values.data(), nullptr);
  return code == 0 ? std::string() : failed("the card refuses a launch", code);
}

std::string Kernels::launch(const AttentionShape& shape, int64_t rows, const AttentionArguments& addresses,
                            void* stream) {
  Prepared* found = nullptr;
  std::string problem = find(kernel_name(shape), number_of(shape), shape.head_size, found);
  if (!problem.empty()) return problem;
  const Geometry cut = geometry(shape, rows, found->multiprocessor_bytes, found->reserved_bytes);
  AttentionArguments arguments = arguments_of(shape, cut);
  arguments.qkv = addresses.qkv;
  arguments.positions = addresses.positions;
  arguments.segments = addresses.segments;
  arguments.cosine = addresses.cosine;
  arguments.sine = addresses.sine;
  arguments.output = addresses.output;
  return run(*found, cut.blocks, cut.threads, cut.shared_bytes, &arguments, stream);
}

std::string Kernels::launch(const Norm& norm, int64_t tokens, int32_t width, const NormArguments& addresses,
                            void* stream) {
  Prepared* found = nullptr;
  std::string problem = find(kernel_name(norm), number_of(norm), 0, found);
  if (!problem.empty()) return problem;
  NormArguments arguments = arguments_of(norm, width);
  arguments.x = addresses.x;
  arguments.addend = addresses.addend;
  arguments.weight = addresses.weight;
  arguments.sum = addresses.sum;
  arguments.output = addresses.output;
  return run(*found, tokens, arguments.threads, kNormSharedBytes, &arguments, stream);
}

std::string Kernels::launch(const GatedUnit& unit, int64_t tokens, int32_t width, const GatedUnitArguments& addresses,
                            void* stream) {
  Prepared* found = nullptr;
  std::string problem = find(kernel_name(unit), number_of(unit), 0, found);
  if (!problem.empty()) return problem;
  GatedUnitArguments arguments = arguments_of(unit, width);
  arguments.x = addresses.x;
  arguments.output = addresses.output;
  return run(*found, tokens, arguments.threads, 0, &arguments, stream);
}

}  // namespace ifab::plugins
