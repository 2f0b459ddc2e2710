// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <sstream>

#include "smp/ddp.h"
#include "tests/dp/models.h"
#include "tests/dp/replicas.h"

namespace smp::dp {
namespace {

using namespace testing;

class Replicas : public ::testing::TestWithParam<int> {
 protected:
  Training run() const {
    Training run;
    run.replicas = GetParam();
    return run;
  }
};

INSTANTIATE_TEST_SUITE_P(Counts, Replicas, ::testing::Values(1, 2, 3, 4));

TEST_P(Replicas, EqualOneProcess) {
  expect_as_alone(kMakeMlp, run(), kOnePass);
  expect_as_alone(kMakeMlp, run(), kOnePass, small_buckets());
}

TEST_P(Replicas, EqualOneProcessWhereverGradientsLie) {
  expect_as_alone(kMakeMlp, run(), kOnePass, DDPOptions().gradient_as_bucket_view(false));
  Training zeroed = run();
  zeroed.set_to_none = false;
  expect_as_alone(kMakeMlp, zeroed, kOnePass, small_buckets());
  expect_as_alone(kMakeMlp, zeroed, kOnePass, small_buckets().gradient_as_bucket_view(false));
}

TEST_P(Replicas, BatchNormFollowsTheFirst) {
  Training images = run();
  images.x_shape = {4, 2, 4, 4};
  expect_as_alone([] { return std::make_shared<ConvBlock>(); }, images, kPassOfPointer);
}

/// One tensor under two names.
struct TiedImpl : torch::nn::Module {
  struct Layer : torch::nn::Module {
    explicit Layer(torch::Tensor shared) { weight = register_parameter("weight", shared); }
    torch::Tensor weight;
  };
  TiedImpl() {
    in = register_module("in", std::make_shared<Layer>(0.3 * torch::randn({6, 6})));
    out = register_module("out", torch::nn::Linear(6, 3));
    again = register_module("again", std::make_shared<Layer>(in->weight));
  }
  torch::Tensor forward(torch::Tensor x) {
    return out(torch::matmul(torch::tanh(torch::matmul(x, in->weight)), again->weight));
  }
  std::shared_ptr<Layer> in, again;
  torch::nn::Linear out{nullptr};
};
TORCH_MODULE(Tied);

TEST_P(Replicas, TiedParametersAreOne) {
  expect_as_alone([] { return Tied(); }, run(), kOnePass, small_buckets());
}

TEST_P(Replicas, FrozenParametersStay) {
  const auto make = [] {
    Mlp mlp;
    mlp->first->bias.set_requires_grad(false);
    return mlp;
  };
  expect_as_alone(make, run(), kOnePass, small_buckets());
}

TEST_P(Replicas, UnusedParametersCountAsZero) {
  const auto make = [] { return Branches(); };
  const auto options = small_buckets().find_unused_parameters(true);
  expect_as_alone(make, run(), kBranchOfRank, options);
  expect_as_alone(make, run(), kBranchOfRank, DDPOptions(options).gradient_as_bucket_view(false));
}

/// Gradients add up over steps, so a parameter that no rank used keeps its own, and one that other
/// ranks used adds its old one.
TEST_P(Replicas, UnusedParametersKeepTheirGradients) {
  Training keeps = run();
  keeps.keep_gradients = true;
  keeps.steps = 4;
  const auto branch_of_step = [](auto& model, const Batch& batch) {
    auto outputs = model(batch.x, batch.step % 3);
    torch::mse_loss(outputs.at("result").at(0), batch.y).backward();
  };
  const auto make = [] { return Branches(); };
  for (const bool view : {true, false}) {
    const auto options = small_buckets().find_unused_parameters(true).gradient_as_bucket_view(view);
    torch::manual_seed(5);
    auto alone = make();
    std::vector<Branches> modules;
    for (int rank = 0; rank < keeps.replicas; ++rank) modules.push_back(make());
    copy_all(alone->parameters(), modules[0]->parameters());
    // Unused in all ranks: as it was. `train_alone` divides unused ones, too, so compare the
    // gradients of step 0 and 1 by hand.
    std::vector<State> after(keeps.replicas);
    comm::run_ranks(keeps.replicas, [&](const comm::CommunicatorPtr& world) {
      DistributedDataParallel<Branches> model(modules[world->rank()],
                                              DDPOptions(options).process_group(group_of(world)));
      branch_of_step(model, make_batch(keeps, world->rank(), 0, 0));
      const auto kept = model->branches[0]->weight.grad().clone();
      branch_of_step(model, make_batch(keeps, world->rank(), 1, 0));
      EXPECT_TRUE(torch::equal(model->branches[0]->weight.grad(), kept));
      EXPECT_TRUE(model->branches[1]->weight.grad().defined());
      EXPECT_FALSE(model->branches[2]->weight.grad().defined());
      branch_of_step(model, make_batch(keeps, world->rank(), 3, 0));
      EXPECT_FALSE(torch::equal(model->branches[0]->weight.grad(), kept));
    });
  }
}

struct MixedImpl : torch::nn::Module {
  MixedImpl() {
    wide = register_module("wide", torch::nn::Linear(6, 8));
    narrow = register_module("narrow", torch::nn::Linear(8, 8));
    exact = register_module("exact", torch::nn::Linear(8, 3));
    narrow->to(torch::kBFloat16);
    exact->to(torch::kDouble);
  }
  torch::Tensor forward(torch::Tensor x) {
    x = narrow(torch::relu(wide(x)).to(torch::kBFloat16));
    return exact(x.to(torch::kDouble)).to(torch::kFloat);
  }
  torch::nn::Linear wide{nullptr}, narrow{nullptr}, exact{nullptr};
};
TORCH_MODULE(Mixed);

TEST_P(Replicas, BucketsHoldOneType) {
  expect_as_alone([] { return Mixed(); }, run(), kOnePass);
}

TEST_P(Replicas, LossesMayBeSeparate) {
  // Two heads whose losses cover the parameters only together.
  struct Heads : torch::nn::Module {
    Heads() {
      a = register_module("a", torch::nn::Linear(6, 3));
      b = register_module("b", torch::nn::Linear(6, 3));
    }
    std::tuple<torch::Tensor, torch::Tensor> forward(torch::Tensor x) { return {a(x), b(x)}; }
    torch::nn::Linear a{nullptr}, b{nullptr};
  };
  const auto pass = [](auto& model, const Batch& batch) {
    const auto both = [&] {
      using Model = std::decay_t<decltype(model)>;
      if constexpr (std::is_same_v<Model, std::shared_ptr<Heads>>) {
        return model->forward(batch.x);
      } else {
        return model(batch.x);
      }
    }();
    torch::mse_loss(std::get<0>(both), batch.y).backward();
    torch::mse_loss(std::get<1>(both), -batch.y).backward();
  };
  expect_as_alone([] { return std::make_shared<Heads>(); }, run(), pass);
}

/// Each pass is reduced and adds to the mean of the one before.
TEST_P(Replicas, EveryBackwardPassIsReduced) {
  std::vector<Mlp> modules(run().replicas, nullptr);
  for (auto& module : modules) module = Mlp();
  const Training run = this->run();
  comm::run_ranks(run.replicas, [&](const comm::CommunicatorPtr& world) {
    DistributedDataParallel<Mlp> model(modules[world->rank()],
                                       DDPOptions().process_group(group_of(world)));
    const auto batch = make_batch(run, world->rank(), 0, 0);
    auto loss = torch::mse_loss(model(batch.x), batch.y);
    loss.backward({}, /*retain_graph=*/true);
    const auto once = model->first->weight.grad().clone();
    loss.backward();
    EXPECT_TRUE(torch::allclose(model->first->weight.grad(), 2 * once));
    const auto all = torch::empty({run.replicas, once.numel()});
    world->all_gather(all, model->first->weight.grad().contiguous());
    for (int rank = 1; rank < run.replicas; ++rank) EXPECT_TRUE(torch::equal(all[0], all[rank]));
  });
}

/// Passes under no_sync add up on each rank, and the last reduces the whole.
TEST_P(Replicas, NoSyncAddsUp) {
  Training three = run();
  three.passes = 3;
  const auto pass = [](auto& model, const Batch& batch) {
    using Model = std::decay_t<decltype(model)>;
    if constexpr (!std::is_same_v<Model, Mlp>) {
      if (batch.pass < 2) {
        const auto guard = model.no_sync();
        kOnePass(model, batch);
        return;
      }
    }
    kOnePass(model, batch);
  };
  for (const bool view : {true, false}) {
    expect_as_alone(kMakeMlp, three, pass, small_buckets().gradient_as_bucket_view(view));
    expect_as_alone(kMakeMlp, three, kOnePass,
                    DDPOptions().backward_passes_per_step(3).gradient_as_bucket_view(view));
  }
}

/// A parameter that was used only in passes that were not reduced is reduced with the last.
TEST_P(Replicas, NoSyncRemembersWhatWasUsed) {
  Training two = run();
  two.passes = 2;
  expect_as_alone([] { return Branches(); }, two, kBranchOfRank,
                  small_buckets().find_unused_parameters(true).backward_passes_per_step(2));
}

TEST_P(Replicas, StaticGraphLeavesOutParameters) {
  const auto branch_of_rank = [](auto& model, const Batch& batch) {
    auto outputs = model(batch.x, batch.rank % 3);
    torch::mse_loss(outputs.at("result").at(0), batch.y).backward();
  };
  expect_as_alone([] { return Branches(); }, run(), branch_of_rank,
                  small_buckets().static_graph(true));
}

TEST_P(Replicas, StaticGraphMayBeReentrant) {
  expect_as_alone([] { return Rerunning(); }, run(), kOnePass, small_buckets().static_graph(true));
}

/// Uses its layers in another order than they were registered, and on rank 1 in yet another.
struct ShuffledImpl : torch::nn::Module {
  ShuffledImpl() {
    for (int i = 0; i < 3; ++i) {
      layers.push_back(register_module("layer" + std::to_string(i), torch::nn::Linear(6, 6)));
    }
  }
  torch::Tensor forward(torch::Tensor x, const std::vector<int>& order) {
    for (int i : order) x = torch::tanh(layers.at(i)(x));
    return x;
  }
  std::vector<torch::nn::Linear> layers;
};
TORCH_MODULE(Shuffled);

TEST(Reducer, RebuildsBucketsInTheOrderOfRankZero) {
  std::vector<Shuffled> modules{Shuffled(), Shuffled()};
  const std::vector<std::vector<int>> order_of_rank{{2, 0, 1}, {0, 1, 2}};
  Training run;
  run.y_shape = {4, 6};
  comm::run_ranks(2, [&](const comm::CommunicatorPtr& world) {
    DistributedDataParallel<Shuffled> model(modules[world->rank()],
                                            small_buckets().process_group(group_of(world)));
    const auto layers = [&] {
      std::string result;
      for (const auto& bucket : model.buckets()) {
        for (const std::string& name : bucket) result += name[5];
      }
      return result;
    };
    EXPECT_EQ(layers(), "221100");
    torch::Tensor kept;
    for (int step = 0; step < 2; ++step) {
      const auto batch = make_batch(run, world->rank(), step, 0);
      auto output = model(batch.x, order_of_rank[world->rank()]);
      if (step == 1) {
        // The gradient of the first pass moved with the buckets.
        EXPECT_TRUE(torch::equal(kept, model->layers[1]->weight.grad()));
      }
      torch::mse_loss(output, batch.y).backward();
      kept = model->layers[1]->weight.grad().clone();
    }
    EXPECT_EQ(layers(), "110022");
  });
}

/// In evaluation one rank alone may call the model: nothing is communicated.
TEST(DistributedDataParallel, EvaluatesOnOneRank) {
  std::vector<std::shared_ptr<ConvBlock>> modules{std::make_shared<ConvBlock>(),
                                                  std::make_shared<ConvBlock>()};
  Training run;
  run.x_shape = {4, 2, 4, 4};
  comm::run_ranks(2, [&](const comm::CommunicatorPtr& world) {
    world->set_timeout(std::chrono::seconds(20));
    DistributedDataParallel<std::shared_ptr<ConvBlock>> model(
        modules[world->rank()], DDPOptions().process_group(group_of(world)));
    for (int step = 0; step < 3; ++step) {
      kPassOfPointer(model, make_batch(run, world->rank(), step, 0));
      if (world->rank() == 0) {
        model->eval();
        const auto x = make_batch(run, 0, 9, 0).x;
        {
          torch::NoGradGuard no_grad;
          EXPECT_FALSE(model(x).requires_grad());
        }
        EXPECT_TRUE(model(x).requires_grad());  // also when the guard was forgotten
        model->train();
      }
      world->barrier();
    }
  });
}

/// Which gives the parameters other memory.
TEST(DistributedDataParallel, ReducesAfterTorchLoad) {
  Training run;
  comm::run_ranks(2, [&](const comm::CommunicatorPtr& world) {
    DistributedDataParallel<Mlp> model(Mlp(), DDPOptions().process_group(group_of(world)));
    auto optimizer = make_optimizer(model);
    for (int step = 0; step < 3; ++step) {
      std::stringstream file;
      torch::save(model.module(), file);
      torch::load(model.module(), file);
      optimizer.zero_grad();
      kOnePass(model, make_batch(run, world->rank(), step, 0));
      const torch::Tensor gradient = model->first->weight.grad();
      const torch::Tensor first = gradient.clone();
      world->broadcast(first, 0);
      EXPECT_TRUE(torch::equal(gradient, first)) << "step " << step;
      optimizer.step();
    }
  });
}

TEST(DistributedDataParallel, GivesBuffersToAllAfterTorchLoad) {
  comm::run_ranks(2, [&](const comm::CommunicatorPtr& world) {
    torch::nn::BatchNorm1d norm(torch::nn::BatchNorm1dOptions(6).momentum(0.0));  // keeps its mean
    DistributedDataParallel<torch::nn::BatchNorm1d> model(
        norm, DDPOptions().process_group(group_of(world)));
    std::stringstream file;
    torch::save(model.module(), file);
    torch::load(model.module(), file);
    norm->running_mean.fill_(world->rank());
    model(torch::ones({4, 6})).sum().backward();
    EXPECT_TRUE(norm->running_mean.eq(0).all().item<bool>()) << "rank " << world->rank();
  });
}

/// A gradient that the program has kept is not overwritten by the next pass.
TEST(DistributedDataParallel, LeavesKeptGradientsAlone) {
  Training run;
  run.replicas = 1;
  comm::run_ranks(1, [&](const comm::CommunicatorPtr& world) {
    DistributedDataParallel<Mlp> model(Mlp(), DDPOptions().process_group(group_of(world)));
    auto optimizer = make_optimizer(model);
    kOnePass(model, make_batch(run, 0, 0, 0));
    const torch::Tensor kept = model->first->weight.grad();
    const torch::Tensor values = kept.clone();
    optimizer.zero_grad();
    kOnePass(model, make_batch(run, 0, 1, 0));
    EXPECT_TRUE(torch::equal(kept, values));
    EXPECT_FALSE(torch::equal(kept, model->first->weight.grad()));
  });
}

}  // namespace
}  // namespace smp::dp
