// SPDX-License-Identifier: Apache-2.0
// Runs on 4 ranks under mpirun, each with a limit on its memory of a third of the model.

#include <malloc.h>
#include <sys/resource.h>

#include <fstream>
#include <iostream>
#include <new>
#include <sstream>
#include <string>

#include "graph/allocations.h"
#include "graph/content.h"
#include "tests/smp/oracle.h"

namespace smp::testing {
namespace {

constexpr int kRanks = 4, kLayers = 72, kTrained = 18, kSteps = 2;
constexpr int64_t kWide = 1024;
constexpr size_t kMiB = 1 << 20;
constexpr size_t kLayerBytes = kWide * kWide * sizeof(float);
constexpr size_t kModelBytes = kLayers * kLayerBytes;  // 288 MiB
constexpr size_t kLimitBytes = kModelBytes / 3;        // on top of the libraries' own memory

/// Many layers of one size. Only the weights of every 18th layer are trained, so that parameters
/// dominate a rank's memory: gradients take as much again. `made` counts layers, to tell how far a
/// construction came.
struct TallImpl : torch::nn::Module {
  explicit TallImpl(int* made = nullptr) {
    for (int i = 0; i < kLayers; ++i) {
      layers.push_back(
          register_module("layer" + std::to_string(i), torch::nn::Linear(kWide, kWide)));
      layers.back()->weight.set_requires_grad(i % kTrained == 0);
      if (made != nullptr) *made = i + 1;
    }
  }

  torch::Tensor forward(torch::Tensor x) {
    for (auto& layer : layers) x = torch::tanh(layer(x));
    return x.square().mean();
  }

  std::vector<torch::nn::Linear> layers;
};
TORCH_MODULE(Tall);

/// Bytes of private writable memory, which RLIMIT_DATA limits.
size_t data_bytes() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.rfind("VmData:", 0) != 0) continue;
    size_t kib = 0;
    std::istringstream(line.substr(7)) >> kib;
    return kib << 10;
  }
  throw std::runtime_error("no VmData in /proc/self/status");
}

void limit_data(size_t bytes) {
  const rlimit limit{bytes, bytes};
  ASSERT_EQ(setrlimit(RLIMIT_DATA, &limit), 0);
}

Tensors make_trained(Tall& net) {
  Tensors trained;
  for (const auto& parameter : net->parameters()) {
    if (parameter.requires_grad()) trained.push_back(parameter);
  }
  return trained;
}

/// The results of a process with enough memory: losses by step and hashes of the parameters.
struct Reference {
  std::vector<Tensors> losses;
  std::map<std::string, uint64_t> hashes;
};

Reference run_plain(const torch::Tensor& x) {
  Reference reference;
  torch::manual_seed(kSeed);
  Tall net;
  const Tensors trained = make_trained(net);
  torch::optim::SGD optimizer(trained, 0.5);
  for (int i = 0; i < kSteps; ++i) {
    optimizer.zero_grad();
    reference.losses.push_back(
        plain_backward(trained, 1, 2, [&](int m) { return net(part(x, 2, m)); }));
    optimizer.step();
  }
  for (const auto& item : net->named_parameters()) {
    reference.hashes[item.key()] = graph::hash_content(item.value());
  }
  return reference;
}

TEST(Memory, AModelOfThreeTimesTheLimitTrains) {
  at::set_num_threads(1);
  // Freed blocks go back to the system, so that the limit is about memory in use.
  mallopt(M_MMAP_THRESHOLD, 64 << 10);
  init(stages(kRanks).keep_freed_memory(false).trace_execution_times(false));
  torch::manual_seed(1);
  const torch::Tensor x = torch::randn({4, kWide});
  const Reference reference = run_plain(x);
  malloc_trim(0);
  limit_data(data_bytes() + kLimitBytes);

  int made = 0;
  torch::manual_seed(kSeed);
  EXPECT_ANY_THROW(Tall{&made}) << "the limit does not bind";
  EXPECT_LE(made * kLayerBytes, kLimitBytes);
  malloc_trim(0);

  const graph::Allocations allocations;
  torch::manual_seed(kSeed);
  Tall net{nullptr};
  {
    const auto scope = delayed_parameter_initialization();
    net = Tall();
  }
  torch::optim::SGD optimizer(make_trained(net), 0.5);
  DistributedModel<Tall> model(net);
  size_t peak_when_made = 0;
  model->register_post_partition_hook(
      [&] { peak_when_made = static_cast<size_t>(allocations.peak()); });
  auto train = step([&](torch::Tensor x) {
    auto loss = model(x);
    model->backward(loss);
    return loss;
  });
  for (int i = 0; i < kSteps; ++i) {
    optimizer.zero_grad();
    expect_equal(train(x).outputs(), reference.losses[i], "loss of step " + std::to_string(i));
    optimizer.step();
  }
  size_t own = 0;
  for (const auto& item : model->local_named_parameters()) {
    own += item.value().nbytes();
    EXPECT_EQ(graph::hash_content(item.value()), reference.hashes.at(item.key())) << item.key();
  }
  std::cout << "rank " << rank() << ": own parameters " << own / kMiB << " MiB, peak when made "
            << peak_when_made / kMiB << " MiB, in training " << allocations.peak() / kMiB
            << " MiB, limit " << kLimitBytes / kMiB << " MiB, model " << kModelBytes / kMiB
            << " MiB" << std::endl;
  EXPECT_GT(own, 0u);
  EXPECT_GE(peak_when_made, own);
  EXPECT_LE(peak_when_made, own + kLayerBytes + kMiB);  // for states of the generator and biases
  EXPECT_LT(static_cast<size_t>(allocations.peak()), kLimitBytes);
}

}  // namespace
}  // namespace smp::testing
