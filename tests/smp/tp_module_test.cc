// SPDX-License-Identifier: Apache-2.0
// Modules of a program's own that are made in the place of others under smp::tensor_parallelism.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <set>
#include <string>

#include "smp/nn.h"
#include "tests/nn/harness.h"
#include "tests/smp/tensor_parallel_run.h"

namespace smp::testing {
namespace {

struct MlpOptions {
  int64_t width, hidden;
};

struct MlpImpl : torch::nn::Module {
  explicit MlpImpl(const MlpOptions& options)
      : up(register_module("up", torch::nn::Linear(options.width, options.hidden))),
        down(register_module("down", torch::nn::Linear(options.hidden, options.width))) {}
  torch::Tensor forward(torch::Tensor x) { return down(torch::gelu(up(x))); }
  torch::nn::Linear up, down;
};
TORCH_MODULE(Mlp);

struct DistributedMlpImpl : torch::nn::Module {
  DistributedMlpImpl(int64_t width, int64_t hidden)
      : up(register_module("up", nn::ColumnParallelLinear(width, hidden))),
        down(register_module("down", nn::RowParallelLinear(hidden, width))) {}
  torch::Tensor forward(torch::Tensor x) { return down(torch::gelu(up(x))); }
  nn::ColumnParallelLinear up;
  nn::RowParallelLinear down;
};
TORCH_MODULE(DistributedMlp);

void register_mlp() {
  tp_register_with_module<Mlp, MlpOptions>(
      [](const MlpOptions& options) { return DistributedMlp(options.width, options.hidden); });
}

constexpr int64_t kWidth = 8;

template <class M>
bool makes(const MlpOptions& options) {
  const torch::nn::AnyModule made = make_module<Mlp>(options);
  return made.type_info() == typeid(typename M::ContainedType);
}

template <bool kMarked>
struct Net : torch::nn::Module {
  Net() {
    tokens = register_module("tokens", torch::nn::Embedding(DividedModel::kVocabulary, kWidth));
    {
      const auto scope = tensor_parallelism(kMarked);
      mlp = make_module<Mlp>(MlpOptions{kWidth, 4 * kWidth});
    }
    register_module("mlp", mlp.ptr());
    head = register_module("head", torch::nn::Linear(kWidth, DividedModel::kVocabulary));
  }

  torch::Tensor loss(torch::Tensor ids, torch::Tensor targets) {
    const auto x = tokens(ids);
    const auto logits = head(x + mlp.forward<torch::Tensor>(x));
    return 9 * torch::nn::functional::cross_entropy(logits.flatten(0, -2), targets.flatten());
  }

  torch::nn::Embedding tokens{nullptr};
  torch::nn::AnyModule mlp;
  torch::nn::Linear head{nullptr};
};

TEST(TensorParallelModule, OfOnesOwnTrainsAsTheOneThatItStandsFor) {
  register_mlp();
  const auto plain = run_plain<Net<false>>();
  for (const TensorLayout& layout : {TensorLayout{1}, TensorLayout{2}}) {
    const auto got = run_on_ranks<Net<true>>(
        layout, [](Net<true>& net) { EXPECT_EQ(net.mlp.type_info(), typeid(DistributedMlpImpl)); });
    expect_close(got, plain);
    if (layout.degree == 1) continue;
    const std::set<std::string> parts{"mlp.down.weight", "mlp.up.bias", "mlp.up.weight"};
    EXPECT_EQ(got.divided, parts);
  }
}

TEST(TensorParallelModule, IsMadeInAScopeOnly) {
  register_mlp();
  const MlpOptions options{4, 8};
  EXPECT_TRUE(makes<Mlp>(options));
  nn::testing::on_ranks(2, [&](int) {
    const auto scope = tensor_parallelism();
    EXPECT_TRUE(makes<DistributedMlp>(options));
    const auto inner = tensor_parallelism(false);
    EXPECT_TRUE(makes<Mlp>(options));
  });
  const auto scope = tensor_parallelism();
  const auto linear = make_module<torch::nn::Linear>(torch::nn::LinearOptions(2, 3));
  EXPECT_EQ(linear.type_info(), typeid(torch::nn::LinearImpl)) << "nothing is registered for it";
}

TEST(TensorParallelModule, RefusesOptionsOfAnotherType) {
  using torch::nn::Softmax;
  using torch::nn::SoftmaxOptions;
  tp_register_with_module<Softmax, SoftmaxOptions>(
      [](const SoftmaxOptions& options) { return Softmax(options); });
  const auto scope = tensor_parallelism();
  expect_has(error_of<UsageError>([] { make_module<Softmax>(1); }),
             {"smp::make_module<torch::nn::Softmax>: was given int, and "
              "smp::tp_register_with_module registered what stands for it with",
              "SoftmaxOptions", "Use the same options for both"});
}

}  // namespace
}  // namespace smp::testing
