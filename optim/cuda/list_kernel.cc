// SPDX-License-Identifier: Apache-2.0
#include "optim/cuda/list_kernel.h"

#include <ATen/cuda/CUDAContextLight.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Scalar.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/Exception.h>
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <link.h>
#include <nvrtc.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <type_traits>
#include <utility>

#include "core/log.h"

namespace smp::optim {
namespace {

/// Compiled here, and a text for the kernels.
#define SMP_HERE_AND_ON_THE_GPU(...) \
  __VA_ARGS__                        \
  constexpr char kSharedText[] = #__VA_ARGS__;

// clang-format off
SMP_HERE_AND_ON_THE_GPU(
constexpr int kTensors = 72;   // most tensors of a launch
constexpr int kChunk = 16384;  // elements of a block
constexpr int kThreads = 256;  // threads of a block

/// Arguments of a launch. CUDA takes 4 KiB of them.
struct Arguments {
  double numbers[16];            // a float lies in the first half of each
  long long numel[kTensors];     // elements of each tensor
  void* addresses[5][kTensors];  // addresses by list and tensor
  int first_block[kTensors + 1]; // first block of each tensor, and the one behind the last
  int tensors;
};)
// clang-format on

static_assert(sizeof(Arguments) <= 4096);
static_assert(sizeof(Arguments::numbers) / sizeof(double) == kKernelNumbers);
static_assert(sizeof(Arguments::addresses) / sizeof(void*) == kKernelLists * kTensors);

/// Types of a dtype in memory and in computations, and how one becomes the other. As in libtorch's
/// kernels, half precision is computed in float32, and each operation's result is rounded to it.
constexpr char kFloat32[] = R"(
using Memory = float;
using Number = float;
__device__ Number load(Memory x) { return x; }
__device__ Memory store(Number x) { return x; }
__device__ Number rounded(Number x) { return x; }
)";
constexpr char kFloat64[] = R"(
using Memory = double;
using Number = double;
__device__ Number load(Memory x) { return x; }
__device__ Memory store(Number x) { return x; }
__device__ Number rounded(Number x) { return x; }
)";
constexpr char kFloat16[] = R"(
using Memory = unsigned short;
using Number = float;
__device__ Number load(Memory x) {
  Number result;
  asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(x));
  return result;
}
__device__ Memory store(Number x) {
  Memory result;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result) : "f"(x));
  return result;
}
__device__ Number rounded(Number x) { return load(store(x)); }
)";
constexpr char kBFloat16[] = R"(
using Memory = unsigned short;
using Number = float;
__device__ Number load(Memory x) { return __uint_as_float(static_cast<unsigned>(x) << 16); }
__device__ Memory store(Number x) {
#if __CUDA_ARCH__ >= 800
  Memory result;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result) : "f"(x));
  return result;
#else
  if (x != x) return 0x7FFF;
  const unsigned bits = __float_as_uint(x);
  return static_cast<Memory>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
#endif
}
__device__ Number rounded(Number x) { return load(store(x)); }
)";

/// The operations, rounded where the kernels of libtorch's functions over lists are (ATen's
/// ForeachFunctors.cuh and DeviceAddCmulCdiv.cuh, as nvcc compiles them): `x + s * y` is fused, and
/// so are the sums of `addcmul` and `addcdiv`, whose product or quotient has been rounded. The
/// compiler may neither fuse the intrinsics nor take them apart.
constexpr char kOperations[] = R"(
__device__ float product(float x, float y) { return __fmul_rn(x, y); }
__device__ float sum(float x, float y) { return __fadd_rn(x, y); }
__device__ float fused(float x, float y, float z) { return __fmaf_rn(x, y, z); }
__device__ float quotient(float x, float y) { return __fdiv_rn(x, y); }
__device__ float root(float x) { return __fsqrt_rn(x); }
__device__ double product(double x, double y) { return __dmul_rn(x, y); }
__device__ double sum(double x, double y) { return __dadd_rn(x, y); }
__device__ double fused(double x, double y, double z) { return __fma_rn(x, y, z); }
__device__ double quotient(double x, double y) { return __ddiv_rn(x, y); }
__device__ double root(double x) { return __dsqrt_rn(x); }

__device__ Number copy(Number x) { return x; }
__device__ Number mul(Number x, Number s) { return rounded(product(x, s)); }
__device__ Number add(Number x, Number s) { return rounded(sum(x, s)); }
__device__ Number add(Number x, Number y, Number s) { return rounded(fused(s, y, x)); }
__device__ Number addcmul(Number x, Number y, Number z, Number s) {
  return rounded(s == 1 ? fused(y, z, x) : fused(s, product(y, z), x));
}
__device__ Number addcdiv(Number x, Number y, Number z, Number s) {
  return rounded(s == 1 ? sum(x, quotient(y, z)) : fused(s, quotient(y, z), x));
}
__device__ Number sqrt(Number x) { return rounded(root(x)); }
__device__ Number maximum(Number x, Number y) { return x != x || x > y ? x : y; }
)";

/// Each block has a chunk of one tensor. kRead, kWritten, kLists and `apply` are the text's.
constexpr char kKernel[] = R"(
constexpr int kVector = 4;  // elements that a thread reads at once

struct alignas(kVector * sizeof(Memory)) Vector {
  Memory elements[kVector];
};

__device__ int tensor_of(const Arguments& arguments, int block) {
  int first = 0, behind = arguments.tensors;
  while (behind - first > 1) {
    const int middle = (first + behind) / 2;
    (arguments.first_block[middle] <= block ? first : behind) = middle;
  }
  return first;
}

/// Elements that lie behind each other in each list.
template <class Part>
__device__ void update(Memory* const (&lists)[kLists], int index, const Arguments& arguments) {
  constexpr int kElements = sizeof(Part) / sizeof(Memory);
  Part parts[kLists];
#pragma unroll
  for (int list = 0; list < kLists; ++list) {
    if (kRead >> list & 1) parts[list] = reinterpret_cast<const Part*>(lists[list])[index];
  }
#pragma unroll
  for (int element = 0; element < kElements; ++element) {
    Number x[kLists];
#pragma unroll
    for (int list = 0; list < kLists; ++list) {
      if (kRead >> list & 1) {
        x[list] = load(reinterpret_cast<const Memory*>(&parts[list])[element]);
      }
    }
    apply(x, arguments);
#pragma unroll
    for (int list = 0; list < kLists; ++list) {
      if (kWritten >> list & 1) {
        reinterpret_cast<Memory*>(&parts[list])[element] = store(x[list]);
      }
    }
  }
#pragma unroll
  for (int list = 0; list < kLists; ++list) {
    if (kWritten >> list & 1) reinterpret_cast<Part*>(lists[list])[index] = parts[list];
  }
}

extern "C" __global__ void __launch_bounds__(kThreads)
    update_lists(const __grid_constant__ Arguments arguments) {
  const int tensor = tensor_of(arguments, blockIdx.x);
  const long long begin =
      static_cast<long long>(blockIdx.x - arguments.first_block[tensor]) * kChunk;
  const long long left = arguments.numel[tensor] - begin;
  const int count = left < kChunk ? static_cast<int>(left) : kChunk;
  Memory* lists[kLists];
  bool aligned = true;
#pragma unroll
  for (int list = 0; list < kLists; ++list) {
    lists[list] = static_cast<Memory*>(arguments.addresses[list][tensor]) + begin;
    aligned = aligned && reinterpret_cast<unsigned long long>(lists[list]) % sizeof(Vector) == 0;
  }
  const int vectors = aligned ? count / kVector : 0;
  for (int i = threadIdx.x; i < vectors; i += kThreads) update<Vector>(lists, i, arguments);
  for (int i = vectors * kVector + threadIdx.x; i < count; i += kThreads) {
    update<Memory>(lists, i, arguments);
  }
}
)";

std::string text_of(at::ScalarType type) {
  switch (type) {
    case at::kFloat:
      return kFloat32;
    case at::kDouble:
      return kFloat64;
    case at::kHalf:
      return kFloat16;
    default:
      return kBFloat16;
  }
}

std::string source_of(const ListKernelText& text, at::ScalarType type) {
  size_t lists = 0;
  while ((text.read | text.written) >> lists != 0) ++lists;
  return c10::str(kSharedText, "\n", text_of(type), kOperations, "constexpr int kLists = ", lists,
                  ", kRead = ", text.read, ", kWritten = ", text.written,
                  ";\n__device__ void apply(Number (&x)[kLists], const Arguments& arguments) {\n"
                  "  const auto s = [&](int i) {\n"
                  "    return *reinterpret_cast<const Number*>(&arguments.numbers[i]);\n"
                  "  };\n",
                  text.body, "}\n", kKernel);
}

/// The file of libtorch's that is linked with CUDA's compiler and driver, which lies beside its
/// CUDA part. Neither may be linked with a program that is to start on machines without a driver.
std::string compiler_library() {
  void* const library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
  TORCH_CHECK(library != nullptr, "libtorch_cuda.so is not loaded");
  link_map* map = nullptr;
  const bool found = dlinfo(library, RTLD_DI_LINKMAP, &map) == 0;
  const std::unique_ptr<char, decltype(&std::free)> file(
      found ? realpath(map->l_name, nullptr) : nullptr, &std::free);
  dlclose(library);
  TORCH_CHECK(file != nullptr, "libtorch_cuda.so has no file");
  const std::string path = file.get();
  return path.substr(0, path.rfind('/') + 1) + "libcaffe2_nvrtc.so";
}

/// CUDA's compiler and driver, by the functions that are used. Stays loaded.
class Compiler {
 public:
  Compiler() {
    const std::string file = compiler_library();
    void* const library = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      const char* const reason = dlerror();
      TORCH_CHECK(false, "cannot load ", file, ": ", reason == nullptr ? "no reason" : reason);
    }
    const auto find = [library](auto& function, const char* name) {
      function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name));
      TORCH_CHECK(function != nullptr, "CUDA's compiler and driver have no ", name);
    };
    find(count_architectures_, "nvrtcGetNumSupportedArchs");
    find(architectures_, "nvrtcGetSupportedArchs");
    find(create_, "nvrtcCreateProgram");
    find(compile_, "nvrtcCompileProgram");
    find(log_size_, "nvrtcGetProgramLogSize");
    find(log_, "nvrtcGetProgramLog");
    find(cubin_size_, "nvrtcGetCUBINSize");
    find(cubin_, "nvrtcGetCUBIN");
    find(ptx_size_, "nvrtcGetPTXSize");
    find(ptx_, "nvrtcGetPTX");
    find(destroy_, "nvrtcDestroyProgram");
    find(explain_, "nvrtcGetErrorString");
    find(context_, "cuCtxGetCurrent");
    find(load_module_, "cuModuleLoadData");
    find(function_, "cuModuleGetFunction");
    find(launch_, "cuLaunchKernel");
  }

  /// Compiles for the current device, and loads. The module stays as long as the process.
  CUfunction make(const std::string& source) const {
    use_context();
    const std::string binary = compile(source);
    CUmodule module = nullptr;
    check(load_module_(&module, binary.data()), "cuModuleLoadData");
    CUfunction function = nullptr;
    check(function_(&function, module, "update_lists"), "cuModuleGetFunction");
    return function;
  }

  /// Fails as libtorch's own launches do: the numbers of the driver's errors are the runtime's.
  void launch(CUfunction function, int blocks, Arguments& arguments) const {
    use_context();
    void* pointers[] = {&arguments};
    C10_CUDA_CHECK(static_cast<cudaError_t>(
        launch_(function, static_cast<unsigned>(blocks), 1, 1, kThreads, 1, 1, /*shared=*/0,
                c10::cuda::getCurrentCUDAStream(), pointers, nullptr)));
  }

 private:
  /// A thread that has not called the runtime yet has no context.
  void use_context() const {
    CUcontext context = nullptr;
    check(context_(&context), "cuCtxGetCurrent");
    if (context == nullptr) C10_CUDA_CHECK(cudaFree(nullptr));
  }

  static void check(CUresult result, const char* name) {
    TORCH_CHECK(result == CUDA_SUCCESS, name, " failed with error ", static_cast<int>(result));
  }
  void check(nvrtcResult result, const char* name) const {
    TORCH_CHECK(result == NVRTC_SUCCESS, name, " failed: ", explain_(result));
  }

  /// The newest architecture up to the device's that the compiler knows.
  int architecture_for(int device) const {
    int count = 0;
    check(count_architectures_(&count), "nvrtcGetNumSupportedArchs");
    std::vector<int> known(static_cast<size_t>(count));
    check(architectures_(known.data()), "nvrtcGetSupportedArchs");
    int newest = 0;
    for (const int one : known) {
      if (one <= device) newest = std::max(newest, one);
    }
    TORCH_CHECK(newest > 0, "CUDA's compiler does not know the architecture ", device);
    return newest;
  }

  /// Machine code; where the compiler does not know the device, text for the driver's compiler.
  std::string compile(const std::string& source) const {
    const cudaDeviceProp* const properties = at::cuda::getCurrentDeviceProperties();
    const int device = 10 * properties->major + properties->minor;
    const int architecture = architecture_for(device);
    const bool known = architecture == device;
    const std::string target =
        c10::str("--gpu-architecture=", known ? "sm_" : "compute_", architecture);
    nvrtcProgram program = nullptr;
    check(create_(&program, source.c_str(), "update_lists.cu", 0, nullptr, nullptr),
          "nvrtcCreateProgram");
    const std::unique_ptr<nvrtcProgram, std::function<void(nvrtcProgram*)>> end(
        &program, [this](nvrtcProgram* made) { destroy_(made); });
    const char* const options[] = {"--std=c++17", target.c_str()};
    if (compile_(program, 2, options) != NVRTC_SUCCESS) {
      TORCH_CHECK(false, "CUDA's compiler refuses the kernel:\n", read(program, log_size_, log_));
    }
    return known ? read(program, cubin_size_, cubin_) : read(program, ptx_size_, ptx_);
  }

  template <class Size, class Text>
  std::string read(nvrtcProgram program, Size size_of, Text text_of) const {
    size_t size = 0;
    check(size_of(program, &size), "the size of what CUDA's compiler made");
    std::string text(size, '\0');
    check(text_of(program, text.data()), "reading what CUDA's compiler made");
    return text;
  }

  decltype(&nvrtcGetNumSupportedArchs) count_architectures_ = nullptr;
  decltype(&nvrtcGetSupportedArchs) architectures_ = nullptr;
  decltype(&nvrtcCreateProgram) create_ = nullptr;
  decltype(&nvrtcCompileProgram) compile_ = nullptr;
  decltype(&nvrtcGetProgramLogSize) log_size_ = nullptr;
  decltype(&nvrtcGetProgramLog) log_ = nullptr;
  decltype(&nvrtcGetCUBINSize) cubin_size_ = nullptr;
  decltype(&nvrtcGetCUBIN) cubin_ = nullptr;
  decltype(&nvrtcGetPTXSize) ptx_size_ = nullptr;
  decltype(&nvrtcGetPTX) ptx_ = nullptr;
  decltype(&nvrtcDestroyProgram) destroy_ = nullptr;
  decltype(&nvrtcGetErrorString) explain_ = nullptr;
  decltype(&cuCtxGetCurrent) context_ = nullptr;
  decltype(&cuModuleLoadData) load_module_ = nullptr;
  decltype(&cuModuleGetFunction) function_ = nullptr;
  decltype(&cuLaunchKernel) launch_ = nullptr;
};

/// The kernels of the process, which ranks that are threads share. Never destroyed: the driver's
/// own end may come before.
class Kernels {
 public:
  static Kernels& get() {
    static auto* const kernels = new Kernels;
    return *kernels;
  }

  const Compiler& compiler() const { return *compiler_; }

  /// Null if it cannot be made, which is tried once.
  CUfunction find(const std::string& source, at::Device device) {
    const std::lock_guard lock(mutex_);
    const auto [entry, is_new] = functions_.try_emplace({device.index(), source}, nullptr);
    if (is_new) entry->second = make(source, device);
    return entry->second;
  }

 private:
  CUfunction make(const std::string& source, at::Device device) {
    try {
      if (compiler_ == nullptr) compiler_ = std::make_unique<const Compiler>();
      return compiler_->make(source);
    } catch (const c10::Error& error) {
      if (!std::exchange(told_, true)) {
        core::log_warning(c10::str("updates of parameters on ", device,
                                   " take a kernel for each operation instead of one for all, "
                                   "which makes them slower and changes no numbers: ",
                                   error.what_without_backtrace()));
      }
      return nullptr;
    }
  }

  std::mutex mutex_;
  std::unique_ptr<const Compiler> compiler_;
  std::map<std::pair<c10::DeviceIndex, std::string>, CUfunction> functions_;
  bool told_ = false;
};

void set_number(double& place, double number, at::ScalarType type) {
  if (type == at::kDouble) {
    place = number;
  } else {
    const auto value = at::Scalar(number).to<float>();
    std::memcpy(&place, &value, sizeof(value));
  }
}

/// Adds a tensor of each list to the launch.
void add(Arguments& arguments, const std::vector<std::vector<at::Tensor>>& lists, size_t index) {
  const int64_t numel = lists.front()[index].numel();
  const int tensor = arguments.tensors++;
  arguments.numel[tensor] = numel;
  for (size_t list = 0; list < lists.size(); ++list) {
    arguments.addresses[list][tensor] = lists[list][index].data_ptr();
  }
  const auto blocks = static_cast<int>((numel + kChunk - 1) / kChunk);
  arguments.first_block[tensor + 1] = arguments.first_block[tensor] + blocks;
}

void run(CUfunction function, const std::vector<std::vector<at::Tensor>>& lists,
         const std::vector<double>& numbers) {
  const c10::DeviceGuard guard(lists.front().front().device());
  Arguments arguments = {};
  for (size_t i = 0; i < numbers.size(); ++i) {
    set_number(arguments.numbers[i], numbers[i], lists.front().front().scalar_type());
  }
  const auto launch = [&] {
    if (arguments.tensors == 0) return;
    const int blocks = arguments.first_block[arguments.tensors];
    Kernels::get().compiler().launch(function, blocks, arguments);
    arguments.tensors = 0;
  };
  for (size_t i = 0; i < lists.front().size(); ++i) {
    if (lists.front()[i].numel() == 0) continue;
    add(arguments, lists, i);
    if (arguments.tensors == kTensors) launch();
  }
  launch();
}

}  // namespace

ListKernel find_list_kernel(const ListKernelText& text, const at::Tensor& first) {
  if (!first.is_cuda()) return {};
  const c10::DeviceGuard guard(first.device());
  CUfunction const function =
      Kernels::get().find(source_of(text, first.scalar_type()), first.device());
  if (function == nullptr) return {};
  return [function](const auto& lists, const auto& numbers) { run(function, lists, numbers); };
}

}  // namespace smp::optim
