// SPDX-License-Identifier: Apache-2.0
// CUDA graphs, as libtorch captures them.

#include <ATen/Context.h>
#include <ATen/cuda/CUDAContextLight.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/core/DeviceGuard.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

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

struct Shared {
  at::Device device;
  at::cuda::MempoolId_t memory = at::cuda::graph_pool_handle();
  std::vector<at::Generator> generators = {};
};

class CudaGraph final : public DeviceGraph {
 public:
  explicit CudaGraph(std::shared_ptr<const Shared> shared) : shared_(std::move(shared)) {}

  /// libtorch marks the default generator as captured, too, and leaves it so if the capture fails:
  /// it gets another one for that moment. Other threads may go on with what they have begun.
  void begin() override {
    const auto lock = lock_generators();
    const Substitute substitute(shared_->device,
                                at::cuda::detail::createCUDAGenerator(shared_->device.index()));
    for (const at::Generator& generator : shared_->generators) {
      graph_.register_generator_state(generator);
    }
    graph_.capture_begin(shared_->memory, cudaStreamCaptureModeThreadLocal);
  }

  void end() override { graph_.capture_end(); }

  /// libtorch's own end gives up at the first error, and its allocator would wait for ever.
  void abandon() noexcept override {
    cudaGraph_t broken = nullptr;
    cudaStreamEndCapture(c10::cuda::getCurrentCUDAStream(shared_->device.index()), &broken);
    if (broken != nullptr) {
      cudaGraphDestroy(broken);
    }
    cudaGetLastError();  // or the next kernel would report it
    try {
      c10::cuda::CUDACachingAllocator::endAllocateToPool(shared_->device.index(), shared_->memory);
      c10::cuda::CUDACachingAllocator::releasePool(shared_->device.index(), shared_->memory);
    } catch (const c10::Error&) {
      // The capture had not come so far, or was past it.
    }
  }

  void call_random(const c10::OperatorHandle& op, torch::jit::Stack& stack,
                   size_t generator) override {
    const Substitute substitute(shared_->device, shared_->generators[generator]);
    op.callBoxed(stack);
  }

  void launch(const std::vector<Seed>& seeds) override {
    for (const Seed& seed : seeds) {
      at::Generator generator = shared_->generators[seed.generator];
      generator.set_current_seed(seed.seed);
    }
    graph_.replay();
  }

 private:
  const std::shared_ptr<const Shared> shared_;
  at::cuda::CUDAGraph graph_;
};

class CudaGraphPool final : public DeviceGraphPool {
 public:
  CudaGraphPool(at::Device device, size_t generators) {
    auto shared = std::make_shared<Shared>(Shared{device});
    for (size_t i = 0; i < generators; ++i) {
      shared->generators.push_back(at::cuda::detail::createCUDAGenerator(device.index()));
    }
    shared_ = std::move(shared);
  }
  /// What cuBLAS was lent while its calls were captured belongs to the graphs.
  ~CudaGraphPool() override { at::cuda::clearCublasWorkspaces(); }

  std::unique_ptr<DeviceGraph> make_graph() override {
    return std::make_unique<CudaGraph>(shared_);
  }

 private:
  std::shared_ptr<const Shared> shared_;
};

const bool registered = [] {
  register_device_graphs(c10::DeviceType::CUDA, [](at::Device device, size_t generators) {
    return std::make_shared<CudaGraphPool>(device, generators);
  });
  return true;
}();

}  // namespace
}  // namespace smp::graph
