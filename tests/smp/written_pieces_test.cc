// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <string>

#include "smp/smp.h"
#include "tests/smp/oracle.h"
#include "tests/temp_folder.h"

// Under `shard_optimizer_state` a replica has whole parameters and updates its pieces of them. A
// program that writes pieces itself changes them on one replica.
namespace smp {
namespace {

using namespace testing;

using torch::nn::Linear;
using Sgd = DistributedOptimizer<torch::optim::SGD>;

/// Replica 0 has the bias, and a piece of the weight, as replica 1 has.
constexpr int64_t kInputs = 4, kOutputs = 100;
constexpr int kReplicaCount = 2;

struct Replica {
  DistributedModel<Linear>& model;
  Sgd& optimizer;
  std::function<void()> train;  // a step and its backward

  void update() {
    optimizer.zero_grad();
    train();
    optimizer.step();
  }
  /// Its pieces of the parameters; none of some.
  Tensors pieces(const std::string& parameter) const {
    const auto all = model->virtual_named_parameters();
    return all.contains(parameter) ? Tensors{all[parameter]} : Tensors();
  }
};

torch::Tensor batch() { return torch::arange(32, torch::kFloat).view({8, kInputs}) / 32; }
torch::Tensor loss_of(const torch::Tensor& out) { return out.square().mean(); }

/// Nets of all ranks have the same values.
Linear make_linear() {
  const torch::NoGradGuard no_grad;
  Linear net(kInputs, kOutputs);
  net->weight.copy_(torch::arange(kInputs * kOutputs).view_as(net->weight) / 400);
  net->bias.copy_(torch::arange(kOutputs) / -100.0);
  return net;
}

void on_replicas(const std::function<void(Replica&)>& program) {
  torch::set_num_threads(1);
  const auto config = Config().ddp(true).shard_optimizer_state(true).timeout_seconds(60);
  run_as_threads(kReplicaCount, config, [&] {
    DistributedModel<Linear> model(make_linear());
    Sgd optimizer(model->parameters(), 0.5);
    auto train = step([&](torch::Tensor x) {
      auto loss = loss_of(model(x));
      model->backward(loss);
      return loss;
    });
    Replica replica{model, optimizer, [&] { train(shard(batch())); }};
    program(replica);
  });
}

void clamp(const Tensors& tensors) {
  const torch::NoGradGuard no_grad;
  for (auto tensor : tensors) tensor.clamp_(-0.1, 0.1);
}

const std::string kOfWeight =
    "the program has written this replica's piece of parameter \"weight\" "
    "(model->local_virtual_parameters()) after optimizer.step(), and the other replicas, which "
    "with \"shard_optimizer_state\" have the parameter whole, do not see that. Write "
    "model->parameters() instead, on all replicas alike";

/// Every call that reads parameters refuses them, on all replicas.
TEST(WrittenPieces, AreRefusedByTheNextCall) {
  const TempFolder folder;
  const std::vector<std::function<void(Replica&)>> calls{
      [](Replica& replica) { replica.train(); },
      [](Replica& replica) {
        smp::step([&](torch::Tensor x) { return replica.model(x); })(batch());
      },
      [&](Replica& replica) { save(folder.file("c"), replica.model, replica.optimizer); },
      [](Replica& replica) { replica.model->state_dict(); },
      [](Replica& replica) { replica.model->local_state_dict(); },
      [](Replica& replica) { replica.model->cpu(); }};
  for (size_t call = 0; call < calls.size(); ++call) {
    SCOPED_TRACE(call);
    on_replicas([&](Replica& replica) {
      replica.update();
      clamp(replica.model->local_virtual_parameters());
      expect_has(error_of<UsageError>([&] { calls[call](replica); }), kOfWeight);
    });
  }
}

TEST(WrittenPieces, AreRefusedByAverages) {
  for (const bool uses : {false, true}) {
    on_replicas([&](Replica& replica) {
      Ema average(replica.model, replica.optimizer);
      replica.update();
      average.update();
      clamp(replica.model->local_virtual_parameters());
      expect_has(error_of<UsageError>([&] { uses ? void(average.averaged()) : average.update(); }),
                 kOfWeight);
    });
  }
}

/// A replica without a piece of the parameter hears of it.
TEST(WrittenPieces, OfOneReplicaEndTheProgram) {
  const auto text = error_of<UsageError>([] {
    on_replicas([](Replica& replica) {
      replica.update();
      EXPECT_EQ(replica.pieces("bias").size(), dp_rank() == 0 ? 1u : 0u);
      clamp(replica.pieces("bias"));
      replica.update();
    });
  });
  expect_has(text, "has written this replica's piece of parameter \"bias\"");
}

/// Writes that the optimizer's next update gives to all, and those that all replicas make, are as
/// in one process.
TEST(WrittenPieces, BeforeAnUpdateAndWholeParametersAreLegal) {
  Linear plain = make_linear();
  torch::optim::SGD plain_optimizer(plain->parameters(), 0.5);
  const auto decay = [](const Tensors& tensors) {
    const torch::NoGradGuard no_grad;
    for (auto tensor : tensors) tensor.mul_(0.75);
  };
  for (int i = 0; i < 3; ++i) {
    plain_optimizer.zero_grad();
    plain_backward(plain->parameters(), kReplicaCount, 1,
                   [&](int m) { return loss_of(plain(part(batch(), kReplicaCount, m))); });
    decay(plain->parameters());
    plain_optimizer.step();
    clamp(plain->parameters());
  }
  const Named expected = state_of(*plain);
  on_replicas([&](Replica& replica) {
    for (int i = 0; i < 3; ++i) {
      replica.optimizer.zero_grad();
      replica.train();
      decay(replica.model->local_virtual_parameters());
      replica.optimizer.step();
      clamp(replica.model->parameters());
    }
    expect_equal(to_map(replica.model->state_dict()), expected, "value");
  });
}

/// Averages give pieces values themselves, and take them back.
TEST(WrittenPieces, OfTheLibraryAreLegal) {
  on_replicas([&](Replica& replica) {
    Ema average(replica.model, replica.optimizer);
    replica.update();
    average.update();
    replica.update();
    const Named before = to_map(replica.model->state_dict());
    {
      const auto scope = average.averaged();
      EXPECT_FALSE(torch::equal(replica.model->state_dict()["weight"], before.at("weight")));
    }
    expect_equal(to_map(replica.model->state_dict()), before, "value");
    replica.update();
  });
}

}  // namespace
}  // namespace smp
