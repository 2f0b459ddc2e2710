// SPDX-License-Identifier: Apache-2.0
// CUDA graphs, as libtorch captures them.

#include <ATen/Context.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/cuda/CUDAContextLight.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/cuda/CUDAGraph.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/select.h>
#include <c10/core/DeviceGuard.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/Exception.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <iterator>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "graph/device_graph.h"
#include "graph/random.h"

namespace smp::graph {
namespace {

/// While it lives, the device's default generator has the state of another one. Under the lock of
/// the generators.
class Substitute {
 public:
  Substitute(at::Device device, const at::Generator& other)
      : default_(at::globalContext().defaultGenerator(device)),
        own_(default_.graphsafe_get_state()) {
    default_.graphsafe_set_state(other);
  }
  ~Substitute() { default_.graphsafe_set_state(own_); }
  Substitute(const Substitute&) = delete;
  Substitute& operator=(const Substitute&) = delete;

 private:
  at::Generator default_;
  at::Generator own_;
};

/// Takes libtorch's warning that a graph is empty, which here may well be, and passes others on.
class EmptyGraphs final : public c10::WarningHandler {
 public:
  void process(const c10::Warning& warning) override {
    if (warning.msg().find("CUDA Graph is empty") != std::string::npos) {
      seen_ = true;
    } else {
      outer_->process(warning);
    }
  }
  bool seen() const { return seen_; }

 private:
  c10::WarningHandler* const outer_ = c10::WarningUtils::get_warning_handler();
  bool seen_ = false;
};

/// Forgets the memory lent to cuBLAS for a stream: it belongs to the graphs.
void forget_workspaces(at::cuda::WorkspaceMapWithMutex& workspaces, cudaStream_t stream) {
  const std::unique_lock lock(workspaces.mutex);
  for (auto entry = workspaces.map.begin(); entry != workspaces.map.end();) {
    entry = std::get<1>(entry->first) == stream ? workspaces.map.erase(entry) : std::next(entry);
  }
}

/// Lives as long as the last graph.
struct Shared {
  explicit Shared(at::Device device) : device(device) {
    const c10::DeviceGuard guard(device);
    C10_CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  }
  ~Shared() {
    forget_workspaces(at::cuda::cublas_handle_stream_to_workspace(), stream);
    forget_workspaces(at::cuda::cublaslt_handle_stream_to_workspace(), stream);
    cudaStreamDestroy(stream);
  }
  Shared(const Shared&) = delete;
  Shared& operator=(const Shared&) = delete;

  const at::Device device;
  const at::cuda::MempoolId_t memory = at::cuda::graph_pool_handle();
  cudaStream_t stream = nullptr;
};

/// The seeds of a graph's random operators, in memory of the device that the graph reads at each
/// launch. A copy writes them all. libtorch's own way is two tensors for each generator, filled one
/// by one, and two more for the default generator, from which no operator of ours draws.
class Seeds {
 public:
  /// Memory of the current stream.
  Seeds(at::Device device, size_t count)
      : memory_(at::empty({static_cast<int64_t>(count) + 1}, at::device(device).dtype(at::kLong))) {
  }

  /// A generator that begins with the `number`-th seed. Its kernels note where the seed lies.
  at::Generator generator(size_t number) const {
    auto state = c10::make_intrusive<at::CUDAGeneratorState>();
    state->capturing_ = true;
    state->seed_extragraph_ = memory_[static_cast<int64_t>(number)];
    state->offset_extragraph_ = memory_[-1];
    return at::make_generator<at::CUDAGeneratorImpl>(memory_.device().index(), std::move(state));
  }

  /// Before the later work of the current stream. The copy reads memory of libtorch's, which is not
  /// used again before it has ended.
  void write(const std::vector<uint64_t>& seeds) const {
    const at::Tensor host =
        at::empty(memory_.sizes(), at::device(at::kCPU).dtype(at::kLong).pinned_memory(true));
    auto* numbers = host.mutable_data_ptr<int64_t>();
    std::copy(seeds.begin(), seeds.end(), numbers);
    numbers[seeds.size()] = 0;
    memory_.copy_(host, /*non_blocking=*/true);
  }

 private:
  const at::Tensor memory_;  // behind the seeds the place in their streams where all begin: 0
};

class CudaGraph final : public DeviceGraph {
 public:
  explicit CudaGraph(std::shared_ptr<const Shared> shared) : shared_(std::move(shared)) {}

  /// libtorch marks the default generator as captured, too, and leaves it so if the capture fails:
  /// it gets another one for that moment. Other threads may go on with the work that they have
  /// begun.
  void begin(size_t seeds) override {
    if (seeds > 0) seeds_.emplace(shared_->device, seeds);
    const auto lock = lock_generators();
    const Substitute substitute(shared_->device,
                                at::cuda::detail::createCUDAGenerator(shared_->device.index()));
    graph_.capture_begin(shared_->memory, cudaStreamCaptureModeThreadLocal);
  }

  bool end() override {
    EmptyGraphs empty;
    const c10::WarningUtils::WarningHandlerGuard guard(&empty);
    graph_.capture_end();
    return !empty.seen();
  }

  /// libtorch's own end gives up at the first error, and its allocators would wait for ever.
  void abandon() noexcept override {
    cudaGraph_t broken = nullptr;
    cudaStreamEndCapture(shared_->stream, &broken);
    if (broken != nullptr) {
      cudaGraphDestroy(broken);
    }
    cudaGetLastError();  // or the next kernel would report it
    at_most([&] {
      c10::cuda::CUDACachingAllocator::endAllocateToPool(shared_->device.index(), shared_->memory);
      c10::cuda::CUDACachingAllocator::releasePool(shared_->device.index(), shared_->memory);
    });
    at_most([&] {
      at::HostAllocator* pinned = at::getHostAllocator(at::kCUDA);
      pinned->end_allocate_to_pool(shared_->memory);
      pinned->release_pool(shared_->memory);
    });
  }

  void call_random(const c10::OperatorHandle& op, torch::jit::Stack& stack, size_t seed) override {
    const Substitute substitute(shared_->device, seeds_->generator(seed));
    op.callBoxed(stack);
  }

  /// libtorch's own `replay` would fill the seed and the offset of the default generator as well.
  void launch(const std::vector<uint64_t>& seeds) override {
    const c10::DeviceGuard guard(shared_->device);
    if (!seeds.empty()) seeds_->write(seeds);
    C10_CUDA_CHECK(cudaGraphLaunch(graph_.raw_cuda_graph_exec(),
                                   c10::cuda::getCurrentCUDAStream(shared_->device.index())));
  }

 private:
  /// A capture may not have come so far, or be past it.
  template <class Undo>
  static void at_most(const Undo& undo) {
    try {
      undo();
    } catch (const c10::Error&) {
    }
  }

  const std::shared_ptr<const Shared> shared_;
  std::optional<Seeds> seeds_;
  at::cuda::CUDAGraph graph_;
};

class CudaGraphPool final : public DeviceGraphPool {
 public:
  explicit CudaGraphPool(at::Device device) : shared_(std::make_shared<const Shared>(device)) {}

  c10::Stream stream() const override {
    return c10::cuda::getStreamFromExternal(shared_->stream, shared_->device.index()).unwrap();
  }
  std::unique_ptr<DeviceGraph> make_graph() override {
    return std::make_unique<CudaGraph>(shared_);
  }

 private:
  const std::shared_ptr<const Shared> shared_;
};

const bool registered = [] {
  register_device_graphs(c10::DeviceType::CUDA,
                         [](at::Device device) { return std::make_shared<CudaGraphPool>(device); });
  return true;
}();

}  // namespace
}  // namespace smp::graph
