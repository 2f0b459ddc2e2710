// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <utility>

#include "smp/autocast.h"
#include "smp/smp.h"
#include "tests/smp/models.h"
#include "tests/smp/sharded.h"
#include "tests/temp_folder.h"

// Parameters sharded under pipelines: nets that read them in odd ways, and parameters of the
// configuration that change how a step runs. The bits of one process.
namespace smp {
namespace {

using namespace testing;
using torch::autograd::grad;

/// Two stages of two replicas, which divide all parameters and hold few whole ones.
template <class Net, class Optimizer = torch::optim::SGD, class Options = torch::optim::SGDOptions>
auto on_two_by_two(const std::string& pipeline, const std::function<Net()>& make,
                   const Options& options = kSgd, int stages = 2, int microbatches = 2) {
  return sharded_pipelines<Net, Optimizer>({stages, 2, microbatches, pipeline, 3},
                                           {2, 2, microbatches, /*threshold=*/0, /*max_live=*/1},
                                           make, options);
}

template <class Net>
void expect_net_as_plain(const std::string& pipeline, int stages = 2) {
  SCOPED_TRACE(pipeline);
  expect_as_plain(
      on_two_by_two<Net>(pipeline, std::function<Net()>([] { return Net(); }), kSgd, stages));
}

TEST(ShardedPipelineNets, ViewsOfWeights) {
  for (const char* pipeline : {"simple", "1f1b", "zb_h1", "zbv"}) {
    expect_net_as_plain<ViewNet>(pipeline);
  }
  expect_net_as_plain<ViewNet>("1f1b", /*stages=*/3);
}

/// Gradients of the embedding are sparse in plain libtorch.
struct SparseNetImpl : torch::nn::Module {
  SparseNetImpl() {
    tokens = register_module("tokens",
                             torch::nn::Embedding(torch::nn::EmbeddingOptions(11, 8).sparse(true)));
    middle = register_module("middle", torch::nn::Linear(8, 8));
    head = register_module("head", torch::nn::Linear(8, 11));
  }
  torch::Tensor loss(torch::Tensor ids, torch::Tensor targets) {
    const auto x = torch::tanh(middle(tokens(ids)));
    return torch::nn::functional::cross_entropy(head(x + tokens(targets)), targets);
  }
  static Tensors batch(int64_t size) {
    return {torch::randint(11, {size}), torch::randint(11, {size})};
  }
  torch::nn::Embedding tokens{nullptr};
  torch::nn::Linear middle{nullptr}, head{nullptr};
};
TORCH_MODULE(SparseNet);

TEST(ShardedPipelineNets, SparseEmbeddings) {
  for (const char* pipeline : {"simple", "1f1b", "zb_h1"}) expect_net_as_plain<SparseNet>(pipeline);
}

/// Differentiates with respect to its inputs, and to weights, with which it then goes a step.
struct SlopeNetImpl : torch::nn::Module {
  SlopeNetImpl() {
    trunk = register_module("trunk", torch::nn::Linear(6, 6));
    inner = register_module("inner", torch::nn::Linear(6, 6));
    last = register_module("last", torch::nn::Linear(6, 1));
    head = register_module("head", torch::nn::Linear(6, 6));
    out = register_module("out", torch::nn::Linear(6, 1));
  }
  torch::Tensor score(const torch::Tensor& x) { return last(torch::tanh(inner(x))); }
  torch::Tensor loss(torch::Tensor x, torch::Tensor y) {
    const torch::AutoGradMode with_history(true);  // in an evaluation, too
    const auto h = torch::tanh(trunk(x));
    auto between = (0.5 * (h.detach() + x)).requires_grad_(true);
    const auto slope = grad({score(between).sum()}, {between}, {}, true, true)[0];
    const auto penalty = (slope.norm(2, 1) - 1).pow(2).mean();
    const auto before = (score(h) - y).pow(2).mean();
    const auto weight = inner->weight;
    const auto stepped = weight - 0.5 * grad({before}, {weight}, {}, true, true)[0];
    const auto after = last(torch::tanh(torch::linear(h, stepped, inner->bias)));
    return penalty + (after - y).pow(2).mean() + (out(torch::tanh(head(h))) - y).pow(2).mean();
  }
  static Tensors batch(int64_t size) { return {torch::randn({size, 6}), torch::randn({size, 1})}; }
  torch::nn::Linear trunk{nullptr}, inner{nullptr}, last{nullptr}, head{nullptr}, out{nullptr};
};
TORCH_MODULE(SlopeNet);

TEST(ShardedPipelineNets, GradientPenalties) {
  for (const char* pipeline : {"simple", "1f1b", "zb_h1"}) expect_net_as_plain<SlopeNet>(pipeline);
}

/// Each replica has buffers of its own.
TEST(ShardedPipelineNets, BuffersOfBatchNorm) {
  for (const char* pipeline : {"interleaved", "1f1b", "zbv"}) {
    expect_net_as_plain<TinyConvNet>(pipeline);
  }
  expect_net_as_plain<TinyConvNet>("1f1b", /*stages=*/3);
}

/// Its embeddings and first layers are frozen: whole stages have no backward.
struct FrozenGptImpl : TinyGptImpl {
  FrozenGptImpl() : TinyGptImpl(/*tied=*/false) {
    for (auto& item : named_parameters()) {
      const std::string& name = item.key();
      const bool trains = name == "head" || name.find('2') != std::string::npos;
      item.value().set_requires_grad(trains);
    }
  }
};
TORCH_MODULE(FrozenGpt);

TEST(ShardedPipelineNets, FrozenStages) {
  for (const char* pipeline : {"interleaved", "1f1b", "zbv"}) {
    expect_net_as_plain<FrozenGpt>(pipeline, 3);
  }
}

/// Fewer operators than stages would divide; one weight reaches the loss by itself.
struct FewOperatorsImpl : torch::nn::Module {
  FewOperatorsImpl() {
    weight = register_parameter("weight", torch::randn({4, 4}));
    alone = register_parameter("alone", torch::randn({4, 4}));
    unused = register_parameter("unused", torch::randn({4, 4}));
    shift = register_buffer("shift", torch::ones({4}));
  }
  torch::Tensor loss(torch::Tensor x, torch::Tensor y) {
    return (torch::mm(x, weight) + shift - y).square().mean() + alone.square().sum();
  }
  static Tensors batch(int64_t size) { return {torch::randn({size, 4}), torch::randn({size, 4})}; }
  torch::Tensor weight, alone, unused, shift;
};
TORCH_MODULE(FewOperators);

TEST(ShardedPipelineNets, EmptyStages) {
  for (const char* pipeline : {"1f1b", "zb_h1"}) expect_net_as_plain<FewOperators>(pipeline, 4);
}

/// A leaf with several weights, and one that is called again with the rows of another microbatch.
struct LeavesImpl : torch::nn::Module {
  LeavesImpl() {
    first = register_module("first", torch::nn::Linear(8, 8));
    inner = register_module("inner",
                            torch::nn::Sequential(torch::nn::Linear(8, 16), torch::nn::Dropout(0.2),
                                                  torch::nn::Linear(16, 8)));
    norm = register_module("norm", torch::nn::BatchNorm1d(8));
    last = register_module("last", torch::nn::Linear(8, 8));
  }
  torch::Tensor loss(torch::Tensor x, torch::Tensor y) {
    x = leaf(inner)(torch::tanh(first(x)));
    x = x + leaf(inner)(torch::tanh(leaf(norm)(x)));
    return torch::mse_loss(last(x), y);
  }
  static Tensors batch(int64_t size) { return {torch::randn({size, 8}), torch::randn({size, 8})}; }
  torch::nn::Linear first{nullptr}, last{nullptr};
  torch::nn::Sequential inner{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
};
TORCH_MODULE(Leaves);

TEST(ShardedPipelineNets, LeafModules) {
  for (const char* pipeline : {"simple", "1f1b", "zb_h1"}) expect_net_as_plain<Leaves>(pipeline);
}

/// Calls backward twice. Each parameter has a gradient from each, which may be added in any order.
struct TwoBackwardsImpl : TinyGptImpl {
  TwoBackwardsImpl() : TinyGptImpl(/*tied=*/false, 2) {}
  torch::Tensor loss(torch::Tensor ids, torch::Tensor targets) {
    criterion(forward(ids), targets).backward();
    return forward(targets).square().mean();
  }
};
TORCH_MODULE(TwoBackwards);

TEST(ShardedPipelineNets, TwoBackwardsOfAStep) {
  for (const char* pipeline : {"1f1b", "zb_h1"}) {
    SCOPED_TRACE(pipeline);
    auto tested = on_two_by_two<TwoBackwards>(
        pipeline, std::function<TwoBackwards()>([] { return TwoBackwards(); }));
    tested.loss = [](auto& model, torch::Tensor ids, torch::Tensor targets) {
      model->backward(TinyGptImpl::criterion(model(ids), targets));
      return model(targets).square().mean();
    };
    tested.evaluates = false;
    expect_as_plain(tested);
  }
}

/// Its backward reads casts of weights, but where a module runs again.
struct AutocastGptImpl : TinyGptImpl {
  AutocastGptImpl() : TinyGptImpl(/*tied=*/true, 2) {}
  torch::Tensor loss(torch::Tensor ids, torch::Tensor targets) {
    torch::Tensor scores;
    {
      const amp::Autocast autocast(torch::kBFloat16);
      scores = forward(ids);
    }
    return criterion(scores.to(torch::kFloat), targets);
  }
};
TORCH_MODULE(AutocastGpt);

TEST(ShardedPipelineNets, Autocast) {
  for (const bool checkpoints : {false, true}) {
    SCOPED_TRACE(checkpoints);
    auto tested = on_two_by_two<AutocastGpt>(
        "1f1b", std::function<AutocastGpt()>([] { return AutocastGpt(); }));
    tested.loss = [](auto& model, torch::Tensor ids, torch::Tensor targets) {
      return model.get_module()->loss(ids, targets);
    };
    if (checkpoints) {
      tested.prepare = [](AutocastGpt& net) {
        for (auto& module : net->up) set_activation_checkpointing(module);
        for (auto& module : net->attention_in) set_activation_checkpointing(module);
      };
    }
    expect_as_plain(tested);
  }
}

auto gpt_on_pipelines(const std::string& pipeline, int microbatches = 2) {
  return on_two_by_two<TinyGpt, torch::optim::AdamW>(pipeline, std::function<TinyGpt()>(tied_gpt),
                                                     kAdamW, 2, microbatches);
}

/// Groups of modules run again, and what they keep lies in a file meanwhile.
TEST(ShardedPipelineSettings, CheckpointsAreOffloaded) {
  for (const char* pipeline : {"1f1b", "zbv"}) {
    SCOPED_TRACE(pipeline);
    const TempFolder folder;
    auto tested = gpt_on_pipelines(pipeline, 4);
    tested.config.offload_activations(true).offload_directory(folder.path());
    tested.config.activation_loading_horizon(2);
    tested.prepare = [](TinyGpt& net) {
      set_activation_checkpointing(net->tokens);
      for (size_t i = 0; i < net->up.size(); ++i) {
        set_activation_checkpointing(net->attention_in[i]);
        set_activation_checkpointing(net->norm[i]);
        set_activation_checkpointing(net->down[i]);
      }
    };
    expect_as_plain(tested);
  }
}

TEST(ShardedPipelineSettings, ASavedPlanIsLoaded) {
  const TempFolder folder;
  const auto with_file = [&](const std::string& pipeline, bool loads) {
    auto tested = gpt_on_pipelines(pipeline);
    tested.config.partition_file(folder.file("plan.json")).load_partition(loads);
    return tested;
  };
  expect_as_plain(with_file("1f1b", /*loads=*/false));
  EXPECT_TRUE(std::filesystem::exists(folder.file("plan.json")));
  expect_as_plain(with_file("1f1b", /*loads=*/true));
  expect_as_plain(with_file("zb_h1", /*loads=*/true));
}

/// Computes alone, and a list with its transfers.
TEST(ShardedPipelineSettings, AScheduleIsLoaded) {
  const TempFolder folder;
  const std::pair<const char*, const char*> files[] = {
      {"computes.csv", "0F0,0F1,,0B0,0B1\n,1F0,1I0,1W0,1F1,1B1\n"},
      {"all.json", R"({"format": "smp schedule", "version": 1, "microbatches": 2, "backward": true,
        "rank_of_stage": [0, 1], "actions": [
          ["0F0", "0SEND_F0>1", "0F1", "0SEND_F1>1", "0RECV_B0<1", "0B0", "0RECV_B1<1", "0B1",
           "0REDUCE"],
          ["1RECV_F0<0", "1F0", "1B0", "1SEND_B0>0", "1RECV_F1<0", "1F1", "1B1", "1SEND_B1>0",
           "1REDUCE"]]})"}};
  for (const auto& [name, text] : files) {
    SCOPED_TRACE(name);
    std::ofstream(folder.file(name)) << text;
    auto tested = gpt_on_pipelines("file");
    tested.config.schedule_file(folder.file(name));
    expect_as_plain(tested);
  }
}

TEST(ShardedPipelineSettings, GuardsOfTheFirstStepAlone) {
  auto tested = gpt_on_pipelines("1f1b");
  tested.config.guard("first_step");
  expect_as_plain(tested);
}

/// A plain process adds up four sums, two of each replica.
TEST(ShardedPipelineSettings, SeveralGradientShardsOfAReplica) {
  auto tested = gpt_on_pipelines("1f1b", 4);
  tested.config.gradient_shards(4);
  tested.shards = 4;
  expect_as_plain(tested);
}

TEST(ShardedPipelineSettings, RanksLieInAnyOrder) {
  for (const char* placement : {"spread", "PDT"}) {
    SCOPED_TRACE(placement);
    auto tested = gpt_on_pipelines("1f1b");
    tested.config.placement_strategy(placement);
    expect_as_plain(tested);
  }
}

TEST(ShardedPipelineSettings, ComputationsAreRecorded) {
  const TempFolder folder;
  auto tested = gpt_on_pipelines("1f1b");
  tested.config.record_hashes(folder.file("hashes")).replay_check(1);
  expect_as_plain(tested);
  tested = gpt_on_pipelines("zb_h1");
  tested.config.timeline(folder.file("timeline"));
  tested.steps = 3;
  expect_as_plain(tested);
}

/// Each rank knows the norms of all gradients, as libtorch's function takes them of whole ones.
TEST(ShardedPipelineSettings, GradientsAreClippedByTheProgram) {
  auto tested = gpt_on_pipelines("1f1b");
  tested.max_norm = 0.2;
  expect_as_plain(tested);
}

/// Each parameter is made by its owner in the first step, and divided at once.
TEST(ShardedPipelineSettings, ParametersAreMadeLater) {
  const auto plain = gpt_on_pipelines("1f1b").run_plain();
  auto tested = gpt_on_pipelines("1f1b");
  tested.make = [] {
    const auto scope = model_creation(ModelCreationOptions().eager_bytes(16));
    return TinyGpt(true);
  };
  auto sharded = tested.run_on_ranks();
  sharded.gradients = plain.gradients;
  expect_same(sharded, plain);
}

/// Several microbatches run as one, which rounds otherwise.
TEST(ShardedPipelineSettings, MicrobatchesRunAsOne) {
  auto tested = on_two_by_two<TinyGpt>(
      "1f1b", std::function<TinyGpt()>([] { return TinyGpt(true, 2, 0.0); }), kSgd, 2, 4);
  tested.config.numerics("fast");
  auto sharded = tested.run_on_ranks();
  const auto plain = tested.run_plain();
  sharded.gradients = plain.gradients;
  expect_close(sharded, plain, 1e-4);
}

/// Two groups of parameters with rates of their own, which fall.
TEST(ShardedPipelineSettings, GroupsOfParametersAndFallingRates) {
  auto tested = gpt_on_pipelines("1f1b");
  tested.recipe.groups = true;
  tested.decays = true;
  expect_as_plain(tested);
}

}  // namespace
}  // namespace smp
