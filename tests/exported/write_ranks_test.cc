// SPDX-License-Identifier: Apache-2.0
// Programs of models that ranks have divided.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>
#include <tuple>
#include <vector>

#include "smp/export_program.h"
#include "smp/exported.h"
#include "smp/smp.h"
#include "tests/temp_folder.h"

namespace smp::testing {
namespace {

using torch::Tensor;

struct HalvesImpl : torch::nn::Module {
  HalvesImpl() {
    for (int i = 0; i < 4; ++i) {
      layers.push_back(register_module("layer" + std::to_string(i), torch::nn::Linear(8, 8)));
    }
    register_buffer("scale", torch::full({8}, 0.5));
  }
  Tensor forward(Tensor x) {
    for (auto& layer : layers) x = x + torch::gelu(layer(x));
    return x * named_buffers()["scale"];
  }
  std::vector<torch::nn::Linear> layers;
};
TORCH_MODULE(Halves);

/// Trains for three steps on four ranks, of which the first then writes the model. Returns its
/// outputs, and those of the program, for batches of several sizes.
std::tuple<std::vector<Tensor>, std::vector<Tensor>> trained_and_written(const Config& config) {
  const TempFolder folder;
  const std::string path = folder.file("model.pt2");
  std::vector<Halves> nets;  // ranks that are threads share the default generator
  for (int rank = 0; rank < 4; ++rank) {
    torch::manual_seed(3);
    nets.emplace_back();
  }
  torch::manual_seed(4);
  const Tensor x = torch::randn({8, 8}), y = torch::randn({8, 8});
  std::vector<Tensor> outputs, written;
  const auto batches = [&x] {
    return std::vector<Tensor>{x, x.narrow(0, 0, 3), x.narrow(0, 1, 6)};
  };
  run_as_threads(4, config, [&] {
    torch::set_num_threads(1);
    Halves net = nets[rank()];
    if (tp_size() > 1) set_tensor_parallelism(net);
    DistributedModel<Halves> model(net);
    DistributedOptimizer<torch::optim::SGD> optimizer(model->parameters(), 0.1);
    auto train = step([&](Tensor x, Tensor y) {
      const auto loss = torch::mse_loss(model(x), y);
      model->backward(loss);
      return loss;
    });
    for (int i = 0; i < 3; ++i) {
      optimizer.zero_grad();
      train(x, y);
      optimizer.step();
    }
    model->cpu();
    if (rank() != 0) return;
    export_program(path, net, std::make_tuple(x),
                   ExportProgramOptions().dynamic_shapes({{{0, ExportDim("batch")}}}));
    for (const Tensor& batch : batches()) outputs.push_back(net(batch).detach());
  });
  ExportedModule program = load_exported(path);
  for (const Tensor& batch : batches()) written.push_back(program(batch).toTensor().detach());
  torch::manual_seed(3);
  Halves untrained;
  EXPECT_FALSE(torch::equal(untrained(x), outputs.at(0))) << "nothing was trained";
  return {outputs, written};
}

void expect_whole(const Config& config) {
  const auto [outputs, written] = trained_and_written(config);
  ASSERT_EQ(outputs.size(), 3u);
  for (size_t i = 0; i < outputs.size(); ++i) {
    EXPECT_TRUE(torch::equal(outputs[i], written[i])) << "batch " << i;
  }
}

TEST(ExportProgramOfRanks, StagesAndReplicasAreWrittenWhole) {
  expect_whole(Config().partitions(2).microbatches(2).ddp(true).seed(7));
}

TEST(ExportProgramOfRanks, DividedLayersAreWrittenWhole) {
  expect_whole(Config().partitions(2).microbatches(2).tensor_parallel_degree(2).ddp(true).seed(7));
}

}  // namespace
}  // namespace smp::testing
