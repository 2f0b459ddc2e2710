// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <filesystem>
#include <mutex>
#include <string>
#include <vector>

#include "runtime/runtime.h"
#include "tests/smp/tensor_parallel_run.h"

// Buffers that steps write, where layers are divided and there are replicas.
namespace smp {
namespace {

using namespace testing;

constexpr int kReplicas = 2, kDegree = 2;
/// Microbatches of the group of a replica: T x microbatches.
constexpr int kOfGroup = kMicrobatches / kReplicas;

struct BatchNormed : torch::nn::Module {
  BatchNormed() {
    up = register_module("up", torch::nn::Linear(8, 32));
    down = register_module("down", torch::nn::Linear(torch::nn::LinearOptions(32, 16).bias(false)));
    norm = register_module("norm", torch::nn::BatchNorm1d(16));
    head = register_module("head", torch::nn::Linear(16, 4));
  }

  torch::Tensor loss(torch::Tensor x, torch::Tensor y) {
    const auto z = norm(down(torch::tanh(up(x.flatten(0, 1)))));
    return torch::mse_loss(head(torch::relu(z)), y.flatten(0, 1));
  }

  static Tensors step_batch(int number) {
    auto generator = at::make_generator<at::CPUGeneratorImpl>(100 + number);
    const auto draw = [&](int64_t channels) {
      return torch::randn({kMicrobatches * kSamples, 6, channels}, generator, torch::kDouble);
    };
    const auto x = draw(8);
    return {x, draw(4)};
  }

  torch::nn::Linear up{nullptr}, down{nullptr}, head{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
};

Named buffers_of(const BatchNormed& net) {
  Named result;
  for (const auto& item : net.named_buffers()) result[item.key()] = item.value().clone();
  return result;
}

void set_buffers(BatchNormed& net, const Named& values) {
  const torch::NoGradGuard no_grad;
  for (auto& item : net.named_buffers()) item.value().copy_(values.at(item.key()));
}

/// Every replica's parameters and buffers after training, from one process that runs each one's
/// microbatches, in order, on that one's buffers.
std::vector<Named> in_one_process(bool broadcast) {
  const auto net = make_model<BatchNormed>(5);
  const auto parameters = net->parameters();
  torch::optim::SGD optimizer(parameters, kOptions);
  std::vector<Named> buffers(kReplicas, buffers_of(*net));
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    if (broadcast) buffers.assign(kReplicas, buffers[0]);
    const auto batch = BatchNormed::step_batch(step);
    plain_backward(parameters, kReplicas, kOfGroup, [&](int m) {
      Named& own = buffers[m / kOfGroup];
      set_buffers(*net, own);
      const auto loss =
          net->loss(part(batch[0], kMicrobatches, m), part(batch[1], kMicrobatches, m));
      own = buffers_of(*net);
      return loss;
    });
    optimizer.step();
  }
  std::vector<Named> states;
  for (const Named& of_replica : buffers) {
    set_buffers(*net, of_replica);
    states.push_back(state_of(*net));
  }
  return states;
}

/// Each replica writes a buffer once for each of the T x microbatches of its group and keeps its
/// own; a checkpoint has the first one's, and so have all that load it. With `broadcast_buffers` a
/// step begins with the first one's.
TEST(TensorParallelBuffers, AreWrittenOnceForEachMicrobatchOfTheGroup) {
  torch::set_num_threads(1);
  const std::string file = std::string(::testing::TempDir()) + "/tensor_parallel_buffers";
  for (const bool broadcast : {false, true}) {
    SCOPED_TRACE(broadcast);
    const auto expected = in_one_process(broadcast);
    ASSERT_FALSE(
        torch::equal(expected[0].at("norm.running_mean"), expected[1].at("norm.running_mean")));
    EXPECT_EQ(expected[1].at("norm.num_batches_tracked").item<int64_t>(), kSteps * kOfGroup);
    const TensorLayout layout{kDegree, 1, kReplicas};
    run_as_threads(layout.ranks(), config_of(layout), [&] {
      const auto net = make_model<BatchNormed>(5);
      set_tensor_parallelism(*net);
      ModelOf<BatchNormed> model(net, ModelOptions().broadcast_buffers(broadcast));
      DistributedOptimizer<torch::optim::SGD> optimizer(model->parameters(), kOptions);
      auto train = step([&](torch::Tensor x, torch::Tensor y) {
        auto loss = net->loss(x, y);
        model->backward(loss);
        return loss;
      });
      for (int i = 0; i < kSteps; ++i) {
        optimizer.zero_grad();
        const auto batch = BatchNormed::step_batch(i);
        train(own_batch(layout, batch[0]), own_batch(layout, batch[1]));
        optimizer.step();
      }
      EXPECT_TRUE(model->is_distributed_parameter(net->up->weight));
      expect_close(to_map(model->state_dict()), expected[rdp_rank()],
                   "value of replica " + std::to_string(rdp_rank()));
      save(file, model, optimizer);
      load(file, model, optimizer);
      expect_close(to_map(model->state_dict()), expected[0], "value that was saved");
    });
    std::filesystem::remove_all(file);
  }
}

}  // namespace
}  // namespace smp
