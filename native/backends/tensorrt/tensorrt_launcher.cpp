// SPDX-License-Identifier: Apache-2.0
//
// The one file that knows TensorRT. Its library is found at run time, as the driver is; its headers are only compiled
// against. Calls are those that mean the same in TensorRT 10.6 to 11: enqueueV3, inferShapes, setTensorAddress.
#include <NvInferRuntime.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "cuda_driver.h"
#include "launcher.h"
#include "log.h"

namespace ifab::tensorrt {
namespace {

// Keeps the runtime's last complaint, since its calls answer with null and say why here only.
class Logger final : public nvinfer1::ILogger {
 public:
  void log(Severity severity, const char* message) noexcept override {
    const bool error = severity <= Severity::kERROR;
    if (error) {
      const std::lock_guard lock(mutex_);
      last_ = message;
      if (std::string plugin = missing_plugin(message); !plugin.empty()) plugin_ = std::move(plugin);
    }
    const int32_t level = error ? IFAB_LOG_ERROR : severity == Severity::kWARNING ? IFAB_LOG_WARNING : IFAB_LOG_DEBUG;
    if (log_enabled(level)) ifab::log(level, "tensorrt", message);
  }
  std::string last() const {
    const std::lock_guard lock(mutex_);
    return last_.empty() ? "it gave no reason" : last_;
  }
  // The plugin that was asked for and not found; empty where none was.
  std::string plugin() const {
    const std::lock_guard lock(mutex_);
    return plugin_;
  }

 private:
  mutable std::mutex mutex_;
  std::string last_;
  std::string plugin_;
};

// A file in memory, for as long as the runtime reads it.
class MappedFile {
 public:
  explicit MappedFile(const std::string& path) {
    const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (file < 0) return;
    struct stat info{};
    if (::fstat(file, &info) == 0 && info.st_size > 0) {
      size_ = static_cast<size_t>(info.st_size);
      data_ = ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, file, 0);
      if (data_ == MAP_FAILED) data_ = nullptr;
    }
    ::close(file);
  }
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  ~MappedFile() {
    if (data_ != nullptr) ::munmap(data_, size_);
  }
  const void* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  void* data_ = nullptr;
  size_t size_ = 0;
};

ElementType element_type(nvinfer1::DataType type) {
  switch (type) {
    case nvinfer1::DataType::kFLOAT:
      return ElementType::kFloat32;
    case nvinfer1::DataType::kHALF:
      return ElementType::kFloat16;
    case nvinfer1::DataType::kBF16:
      return ElementType::kBfloat16;
    case nvinfer1::DataType::kINT32:
      return ElementType::kInt32;
    case nvinfer1::DataType::kINT64:
      return ElementType::kInt64;
    case nvinfer1::DataType::kINT8:
      return ElementType::kInt8;
    case nvinfer1::DataType::kBOOL:
      return ElementType::kBool;
    case nvinfer1::DataType::kFP8:
      return ElementType::kFp8;
    default:
      return ElementType::kOther;
  }
}

std::vector<int64_t> extents_of(const nvinfer1::Dims& dims) {
  std::vector<int64_t> out;
  for (int32_t axis = 0; axis < dims.nbDims; ++axis) out.push_back(dims.d[axis]);
  return out;
}

nvinfer1::Dims dims_of(const std::vector<int64_t>& extents) {
  nvinfer1::Dims dims{};
  dims.nbDims = static_cast<int32_t>(extents.size());
  for (size_t axis = 0; axis < extents.size(); ++axis) dims.d[axis] = extents[axis];
  return dims;
}

// Loaded once, it stays: its threads and its registry of plugins are the process's.
Status load_tensorrt(void*& library) {
  const std::string major = std::to_string(NV_TENSORRT_MAJOR);
  library = dlopen(("libnvinfer.so." + major).c_str(), RTLD_NOW | RTLD_GLOBAL);
  if (library != nullptr) return {};
  const char* reason = dlerror();
  return {IFAB_UNAVAILABLE, "this engine needs TensorRT " + major + ", which does not load here (" +
                                (reason != nullptr ? reason : "no reason given") + ")"};
}

class TensorRtLauncher final : public Launcher {
 public:
  ~TensorRtLauncher() override {
    for (Buffer& buffer : buffers_) {
      for (Slot& slot : buffer.slots) {
        if (slot.card != 0) driver_.release(slot.card);
        if (slot.host != nullptr) driver_.release_pinned(slot.host);
      }
      if (buffer.computed != nullptr) driver_.end_event(buffer.computed);
      if (buffer.copied != nullptr) driver_.end_event(buffer.copied);
    }
    context_.reset();
    engine_.reset();
    runtime_.reset();
    if (compute_ != nullptr) driver_.end_stream(compute_);
    if (copy_ != nullptr) driver_.end_stream(copy_);
  }

  Status open(const Config& config, const std::string& plan_path, const ContractValues& contract, int32_t card) {
    if (Status status = driver_.open(card); !status.ok()) return status;
    if (Status status = suits(contract); !status.ok()) return status;
    void* library = nullptr;
    if (Status status = load_tensorrt(library); !status.ok()) return status;
    for (const std::string& plugin : config.plugins) {
      if (Status status = load_plugin(library, plugin); !status.ok()) return status;
    }
    using Create = void* (*)(void*, int32_t);
    const auto create = reinterpret_cast<Create>(dlsym(library, "createInferRuntime_INTERNAL"));
    runtime_.reset(create == nullptr ? nullptr
                                     : static_cast<nvinfer1::IRuntime*>(create(&logger_, NV_TENSORRT_VERSION)));
    if (runtime_ == nullptr) return {IFAB_UNAVAILABLE, "TensorRT does not start: " + logger_.last()};
    const MappedFile plan(plan_path);
    if (plan.data() == nullptr) return {IFAB_FAILED_PRECONDITION, "the plan " + plan_path + " cannot be read"};
    engine_.reset(runtime_->deserializeCudaEngine(plan.data(), plan.size()));
    if (engine_ == nullptr) {
      if (const std::string plugin = logger_.plugin(); !plugin.empty()) {
        return {IFAB_FAILED_PRECONDITION,
                "the plan needs the plugin " + plugin + ", which no library has that tensorrt.json lists in plugins"};
      }
      return {IFAB_FAILED_PRECONDITION, "TensorRT refuses the plan: " + logger_.last()};
    }
    context_.reset(engine_->createExecutionContext());
    if (context_ == nullptr) return {IFAB_RESOURCE_EXHAUSTED, "TensorRT makes no context: " + logger_.last()};
    enumerate();
    return {};
  }

  const Enumeration& enumeration() const override { return enumeration_; }

  Status prepare(const BindingPlan& plan) override {
    plan_ = plan;
    if (Status status = driver_.make_stream(compute_); !status.ok()) return status;
    if (Status status = driver_.make_stream(copy_); !status.ok()) return status;
    for (Buffer& buffer : buffers_) {
      buffer.slots.resize(plan_.bindings.size());
      for (size_t i = 0; i < plan_.bindings.size(); ++i) {
        if (Status status = allocate(plan_.bindings[i], buffer.slots[i]); !status.ok()) return status;
      }
      if (Status status = driver_.make_event(buffer.computed); !status.ok()) return status;
      if (Status status = driver_.make_event(buffer.copied); !status.ok()) return status;
    }
    return {};
  }

  Status launch(const Batch& batch, uint32_t which) override {
    Buffer& buffer = buffers_[which];
    buffer.prompts = batch.size();
    for (size_t i = 0; i < plan_.bindings.size(); ++i) {
      if (Status status = bind(plan_.bindings[i], batch, buffer.slots[i]); !status.ok()) return status;
    }
    std::array<const char*, 1> unspecified{};
    if (context_->inferShapes(1, unspecified.data()) != 0) {
      return {IFAB_INTERNAL, "TensorRT refuses the extents of a launch: " + logger_.last()};
    }
    // An output with a row for each token is declared like one with a row for each prompt. Launched, it would be
    // written past the end of its memory.
    for (const size_t place : plan_.hidden) {
      const std::string& name = plan_.bindings[place].tensor.name;
      const nvinfer1::Dims dims = context_->getTensorShape(name.c_str());
      const int64_t rows = dims.nbDims > 0 ? dims.d[0] : 0;
      if (rows != static_cast<int64_t>(buffer.prompts)) return wrong_rows(name, rows, buffer.prompts);
    }
    if (!context_->enqueueV3(reinterpret_cast<cudaStream_t>(compute_))) {
      return {IFAB_INTERNAL, "TensorRT refuses a launch: " + logger_.last()};
    }
    if (Status status = driver_.record(buffer.computed, compute_); !status.ok()) return status;
    if (Status status = driver_.wait_on_stream(copy_, buffer.computed); !status.ok()) return status;
    for (const size_t place : plan_.hidden) {
      const Slot& slot = buffer.slots[place];
      if (Status status = driver_.copy_out(slot.host, slot.card, row_bytes(place) * buffer.prompts, copy_);
          !status.ok()) {
        return status;
      }
    }
    return driver_.record(buffer.copied, copy_);
  }

  Status collect(uint32_t which) override { return driver_.wait(buffers_[which].copied); }

  std::span<const uint8_t> output(uint32_t which, size_t hidden) const override {
    const size_t place = plan_.hidden[hidden];
    return {static_cast<const uint8_t*>(buffers_[which].slots[place].host), row_bytes(place) * buffers_[which].prompts};
  }

 private:
  // Memory of one tensor in one buffer: on the card, and pinned, where each is needed.
  struct Slot {
    CudaPointer card = 0;
    void* host = nullptr;
  };
  struct Buffer {
    std::vector<Slot> slots;
    CudaEvent computed = nullptr;
    CudaEvent copied = nullptr;
    uint64_t prompts = 0;
  };

  Status suits(const ContractValues& contract) const {
    const std::string here = std::to_string(driver_.card().major) + "." + std::to_string(driver_.card().minor);
    const std::string& wanted = contract.card.compute_capability.value_or("not_applicable");
    if (here != wanted) {
      return {IFAB_FAILED_PRECONDITION,
              "card.compute_capability: " + wanted + ", and the card here, " + driver_.card().name + ", has " + here};
    }
    if (driver_.card().memory_bytes < contract.card.memory_bytes) {
      return {IFAB_FAILED_PRECONDITION, "card.memory_bytes: " + std::to_string(contract.card.memory_bytes) +
                                            ", and the card here, " + driver_.card().name + ", has " +
                                            std::to_string(driver_.card().memory_bytes)};
    }
    return {};
  }

  // TensorRT-LLM's plugins register themselves in a call of their own. Another library that lists its plugins' creators
  // is registered by TensorRT itself, once a process, since a second time is refused; all others do so as they load.
  Status load_plugin(void* tensorrt, const std::string& name) {
    void* library = dlopen(name.c_str(), RTLD_NOW | RTLD_GLOBAL);
    if (library == nullptr) {
      const char* reason = dlerror();
      return {IFAB_UNAVAILABLE, "the plan's plugins are not here: " + name + " does not load (" +
                                    (reason != nullptr ? reason : "no reason given") + ")"};
    }
    using Register = bool (*)(void*, const char*);
    const auto call = reinterpret_cast<Register>(dlsym(library, "initTrtLlmPlugins"));
    if (call != nullptr) {
      if (call(&logger_, "tensorrt_llm")) return {};
      return {IFAB_UNAVAILABLE, "the plugins of " + name + " do not register: " + logger_.last()};
    }
    if (dlsym(library, "getCreators") != nullptr) {
      static std::mutex mutex;
      static std::set<void*> registered;
      const std::lock_guard lock(mutex);
      if (registered.contains(library)) return {};
      using Registry = nvinfer1::IPluginRegistry* (*)();
      const auto registry = reinterpret_cast<Registry>(dlsym(tensorrt, "getPluginRegistry"));
      if (registry == nullptr || registry()->loadLibrary(name.c_str()) == nullptr) {
        return {IFAB_UNAVAILABLE, "TensorRT does not register the plugins of " + name + ": " + logger_.last()};
      }
      registered.insert(library);
      return {};
    }
    return {};
  }

  void enumerate() {
    enumeration_.profiles = engine_->getNbOptimizationProfiles();
    for (int32_t i = 0; i < engine_->getNbIOTensors(); ++i) {
      const char* name = engine_->getIOTensorName(i);
      TensorInfo tensor;
      tensor.name = name;
      tensor.is_input = engine_->getTensorIOMode(name) == nvinfer1::TensorIOMode::kINPUT;
      tensor.type = element_type(engine_->getTensorDataType(name));
      tensor.extents = extents_of(engine_->getTensorShape(name));
      tensor.reported_on_host = engine_->getTensorLocation(name) == nvinfer1::TensorLocation::kHOST;
      tensor.shape_tensor = engine_->isShapeInferenceIO(name);
      if (tensor.is_input && enumeration_.profiles > 0) {
        tensor.smallest = extents_of(engine_->getProfileShape(name, 0, nvinfer1::OptProfileSelector::kMIN));
        tensor.largest = extents_of(engine_->getProfileShape(name, 0, nvinfer1::OptProfileSelector::kMAX));
      }
      enumeration_.tensors.push_back(std::move(tensor));
    }
    bound_outputs();
  }

  // How large outputs can become is known of a context whose inputs have their extents.
  void bound_outputs() {
    for (const TensorInfo& tensor : enumeration_.tensors) {
      if (tensor.is_input && !context_->setInputShape(tensor.name.c_str(), dims_of(tensor.largest))) return;
    }
    for (TensorInfo& tensor : enumeration_.tensors) {
      if (tensor.is_input) continue;
      tensor.most_bytes = static_cast<uint64_t>(std::max<int64_t>(context_->getMaxOutputSize(tensor.name.c_str()), 0));
    }
  }

  static Status wrong_rows(const std::string& name, int64_t rows, uint64_t prompts) {
    return {IFAB_INTERNAL, "output " + name + " has " + std::to_string(rows) + " rows for " + std::to_string(prompts) +
                               " prompts: it is not gathered to the last token"};
  }

  Status allocate(const Binding& binding, Slot& slot) {
    // Every input is filled in pinned memory; outputs come back through it where they are read.
    if (binding.tensor.is_input || binding.role == Role::kHidden) {
      if (Status status = driver_.allocate_pinned(binding.bytes, slot.host); !status.ok()) return status;
    }
    return binding.on_host ? Status{} : driver_.allocate(binding.bytes, slot.card);
  }

  Status bind(const Binding& binding, const Batch& batch, const Slot& slot) {
    const char* name = binding.tensor.name.c_str();
    if (binding.tensor.is_input) {
      const uint64_t count = batch.fill(binding, slot.host, extents_);
      if (!context_->setInputShape(name, dims_of(extents_))) {
        return {IFAB_INTERNAL, "TensorRT refuses the extents of " + binding.tensor.name + ": " + logger_.last()};
      }
      if (!binding.on_host) {
        const uint64_t bytes = count * element_bytes(binding.tensor.type);
        if (Status status = driver_.copy_in(slot.card, slot.host, bytes, compute_); !status.ok()) return status;
      }
    }
    void* address = binding.on_host ? slot.host : reinterpret_cast<void*>(slot.card);
    if (!context_->setTensorAddress(name, address)) {
      return {IFAB_INTERNAL, "TensorRT refuses the memory of " + binding.tensor.name + ": " + logger_.last()};
    }
    return {};
  }

  uint64_t row_bytes(size_t place) const {
    const TensorInfo& tensor = plan_.bindings[place].tensor;
    return static_cast<uint64_t>(tensor.extents[1]) * element_bytes(tensor.type);
  }

  Logger logger_;
  CudaDriver driver_;
  std::unique_ptr<nvinfer1::IRuntime> runtime_;
  std::unique_ptr<nvinfer1::ICudaEngine> engine_;
  std::unique_ptr<nvinfer1::IExecutionContext> context_;
  Enumeration enumeration_;
  BindingPlan plan_;
  std::array<Buffer, kBuffers> buffers_;
  CudaStream compute_ = nullptr;
  CudaStream copy_ = nullptr;
  std::vector<int64_t> extents_;
};

}  // namespace

Status runs_here(int32_t card) {
  CudaDriver driver;
  if (Status status = driver.find(card); !status.ok()) return status;
  void* library = nullptr;
  return load_tensorrt(library);
}

Status open_launcher(const Config& config, const std::string& plan_path, const ContractValues& contract, int32_t card,
                     std::unique_ptr<Launcher>& out) {
  auto launcher = std::make_unique<TensorRtLauncher>();
  if (Status status = launcher->open(config, plan_path, contract, card); !status.ok()) return status;
  out = std::move(launcher);
  return {};
}

}  // namespace ifab::tensorrt
