// SPDX-License-Identifier: Apache-2.0
// The programs of docs/tensor_parallelism.md, "Modules".

#include "smp/nn.h"
#include "tests/nn/modules.h"

namespace smp::nn::testing {
namespace {

using smp::nn::ColumnParallelLinear;
using smp::nn::RowParallelLinear;

struct MlpImpl : torch::nn::Module {
  MlpImpl() {
    up = register_module("up", ColumnParallelLinear(512, 2048));
    down = register_module("down", RowParallelLinear(2048, 512));
  }
  torch::Tensor forward(torch::Tensor x) { return down(torch::gelu(up(x))); }
  ColumnParallelLinear up{nullptr};
  RowParallelLinear down{nullptr};
};
TORCH_MODULE(Mlp);

struct ScaleImpl : torch::nn::Module, smp::nn::SplitModule {
  explicit ScaleImpl(int64_t channels) {
    split = {{channels}, 0, 1, smp::nn::group_size()};
    weight = register_parameter("weight", torch::ones(split.local_sizes()));
  }
  std::map<std::string, smp::nn::ParameterSplit> split_parameters() const override {
    return {{"weight", split}};
  }
  torch::Tensor forward(torch::Tensor x) { return x * weight; }  // x: the rank's channels
  smp::nn::ParameterSplit split;
  torch::Tensor weight;
};
TORCH_MODULE(Scale);

TEST(PageExamples, ComputeWhatPlainLayersDo) {
  torch::manual_seed(1);
  const auto x = torch::randn({3, 512}, torch::kDouble);
  for (const int ranks : {1, 2}) {
    const Outcome mlp = run_module<Mlp>(
        ranks, [] { return Mlp(); }, [&](Mlp& module) -> Tensors { return {module(x).detach()}; });
    const auto linear = [&](const torch::Tensor& input, const std::string& name) {
      return torch::linear(input, mlp.parameters.at(name + ".weight"),
                           mlp.parameters.at(name + ".bias"));
    };
    expect_close(mlp.outputs[0], linear(torch::gelu(linear(x, "up")), "down"), "mlp");
    const Outcome scale = run_module<Scale>(
        ranks, [] { return Scale(512); },
        [&](Scale& module) -> Tensors {
          const auto y = gather_from_group(module(scatter_to_group(x, -1)), -1);
          y.sum().backward();
          return {y.detach()};
        });
    expect_equal(scale.outputs[0], x, "scaled by ones");
    expect_close(scale.gradients.at("weight"), x.sum(0), "gradient");
  }
}

}  // namespace
}  // namespace smp::nn::testing
