// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <mutex>

#include "smp/smp.h"
#include "tests/smp/oracle.h"

// `join` of a DistributedModel, whose replicas run out of batches one after the other.
namespace smp {
namespace {

using namespace testing;

constexpr int kJoinMicrobatches = 2;
constexpr double kRate = 0.1;

/// How many batches each replica has in the join; then all have one more.
struct Uneven {
  std::vector<int> batches;
  bool divide_by_all = true;
  int passes = 1;             ///< steps whose gradients add up
  bool shorter_last = false;  ///< each replica's last batch is half as large

  int replicas() const { return static_cast<int>(batches.size()); }
  int most() const { return *std::max_element(batches.begin(), batches.end()); }
};

torch::Tensor make_data(const Uneven& run) {
  torch::manual_seed(4);
  return torch::randn({run.most() + 1, run.replicas(), 4, MlpImpl::kWidth});
}

/// The batch of a replica in a step; the one after the join is of full size.
torch::Tensor batch_of(const Uneven& run, const torch::Tensor& data, int step, int replica) {
  const bool is_short = run.shorter_last && step + 1 == run.batches[replica];
  return data[step][replica].narrow(0, 0, is_short ? 2 : 4).clone();
}

torch::Tensor loss_of(const torch::Tensor& result) { return result.square().mean(); }

/// One process: the gradients of the replicas that have a batch, in order, divided once.
Named train_alone(const Uneven& run) {
  Mlp net = make_mlp();
  const auto data = make_data(run);
  const auto parameters = net->parameters();
  std::vector<Tensors> sums(run.replicas(), Tensors(parameters.size()));
  for (int step = 0; step <= run.most(); ++step) {
    const bool joins = step < run.most();
    double active = 0;
    for (int replica = 0; replica < run.replicas(); ++replica) {
      if (joins && step >= run.batches[replica]) continue;
      ++active;
      for (int m = 0; m < kJoinMicrobatches; ++m) {
        net->zero_grad();
        loss_of(net(part(batch_of(run, data, step, replica), kJoinMicrobatches, m))).backward();
        for (size_t i = 0; i < parameters.size(); ++i) {
          torch::Tensor& sum = sums[replica][i];
          sum = sum.defined() ? sum + parameters[i].grad() : parameters[i].grad().clone();
        }
      }
    }
    if ((step + 1) % run.passes != 0) continue;
    const double divisor = kJoinMicrobatches * (run.divide_by_all ? run.replicas() : active);
    const torch::NoGradGuard no_grad;
    for (size_t i = 0; i < parameters.size(); ++i) {
      auto total = torch::zeros_like(parameters[i]);
      for (auto& of_replica : sums) {
        if (of_replica[i].defined()) total += of_replica[i];
        of_replica[i] = torch::Tensor();
      }
      parameters[i].add_(total / divisor, -kRate);
    }
  }
  return state_of(*net);
}

/// Two stages of each replica.
std::vector<Named> train(const Uneven& run) {
  torch::set_num_threads(1);
  const int ranks = 2 * run.replicas();
  std::vector<Mlp> nets;
  for (int rank = 0; rank < ranks; ++rank) nets.push_back(make_mlp());
  const auto data = make_data(run);
  std::vector<Named> states(ranks);
  const auto config =
      Config().partitions(2).microbatches(kJoinMicrobatches).ddp(true).timeout_seconds(60);
  run_as_threads(ranks, config, [&] {
    DistributedModel<Mlp> model(nets[rank()], ModelOptions().backward_passes_per_step(run.passes));
    DistributedOptimizer<torch::optim::SGD> optimizer(model->parameters(),
                                                      torch::optim::SGDOptions(kRate));
    auto step = smp::step([&](torch::Tensor x) { model->backward(loss_of(model(x))); });
    const auto train_on = [&](int number) {
      step(batch_of(run, data, number, rdp_rank()));
      if ((number + 1) % run.passes != 0) return;
      optimizer.step();
      optimizer.zero_grad();
    };
    {
      const auto guard = model->join(JoinOptions().divide_by_initial_world_size(run.divide_by_all));
      for (int i = 0; i < run.batches[rdp_rank()]; ++i) train_on(i);
    }
    for (const auto& parameter : model->local_parameters()) {
      EXPECT_FALSE(parameter.grad().defined());
    }
    train_on(run.most());
    states[rank()] = to_map(model->state_dict());
  });
  return states;
}

class ReplicaJoin : public ::testing::TestWithParam<Uneven> {};

INSTANTIATE_TEST_SUITE_P(Batches, ReplicaJoin,
                         ::testing::Values(Uneven{{3, 1}}, Uneven{{1, 3}}, Uneven{{2, 2}},
                                           Uneven{{1, 3, 2}}, Uneven{{1, 3, 2}, false},
                                           Uneven{{3, 1}, true, 2},
                                           Uneven{{2, 4, 3}, true, 1, true}));

TEST_P(ReplicaJoin, EqualsOneProcess) {
  const auto expected = train_alone(GetParam());
  for (const Named& state : train(GetParam())) expect_equal(state, expected, "value");
}

/// Buffers come from the first replica that has a batch, and at the end from one that was last.
TEST(ReplicaJoinBuffers, FollowWhoHasBatches) {
  std::vector<int64_t> counts(2);
  run_as_threads(2, Config().ddp(true).timeout_seconds(60), [&] {
    torch::nn::Sequential net(torch::nn::Linear(6, 4), torch::nn::BatchNorm1d(4));
    DistributedModel<torch::nn::Sequential> model(net, ModelOptions().broadcast_buffers(true));
    auto step = smp::step([&](torch::Tensor x) { model->backward(loss_of(model(x))); });
    {
      const auto guard = model->join();
      for (int i = 0; i < 1 + 2 * rank(); ++i) step(torch::full({2, 6}, 1. + rank() + i));
    }
    counts[rank()] = net->named_buffers()["1.num_batches_tracked"].item<int64_t>();
  });
  EXPECT_EQ(counts, (std::vector<int64_t>{3, 3}));
}

/// Two models, each trained by a step function of its own while the other is frozen; the second
/// replica has one batch of three. Without a join it goes on with batches that weigh nothing.
std::vector<Named> train_in_turns(bool joins) {
  torch::set_num_threads(1);
  std::vector<Mlp> bodies;
  std::vector<torch::nn::Linear> heads;
  for (int rank = 0; rank < 2; ++rank) {
    bodies.push_back(make_mlp());  // seeds
    heads.emplace_back(1, 3);
  }
  const auto data = make_data({{3, 1}});
  std::vector<Named> states(2);
  run_as_threads(2, Config().microbatches(kJoinMicrobatches).ddp(true).timeout_seconds(60), [&] {
    DistributedModel<Mlp> body(bodies[rank()]);
    DistributedModel<torch::nn::Linear> head(heads[rank()]);
    auto train_body = smp::step([&](torch::Tensor x, torch::Tensor weight) {
      body->backward(loss_of(head(body(x))) * weight.mean());
    });
    auto train_head = smp::step([&](torch::Tensor x, torch::Tensor weight) {
      head->backward(loss_of(head(body(x).detach())) * weight.mean());
    });
    DistributedOptimizer<torch::optim::SGD> body_optimizer(body->parameters(),
                                                           torch::optim::SGDOptions(kRate));
    DistributedOptimizer<torch::optim::SGD> head_optimizer(head->parameters(),
                                                           torch::optim::SGDOptions(kRate));
    const auto train = [](auto& step, auto& optimizer, auto& trained, auto& frozen,
                          const auto&... batch) {
      for (auto& parameter : trained->parameters()) parameter.set_requires_grad(true);
      for (auto& parameter : frozen->parameters()) parameter.set_requires_grad(false);
      step(batch...);
      optimizer.step();
      optimizer.zero_grad();
    };
    {
      const auto guard = body->join(JoinOptions().enable(joins));
      for (int i = 0; i < 3; ++i) {
        const bool has_batch = rank() == 0 || i == 0;
        if (joins && !has_batch) break;
        const auto x = data[i][rank()].clone();
        const auto weight = torch::full({x.size(0)}, has_batch ? 1. : 0.);
        train(train_body, body_optimizer, body, head, x, weight);
        train(train_head, head_optimizer, head, body, x, weight);
      }
    }
    states[rank()] = state_of(*bodies[rank()]);
    states[rank()].merge(state_of(*heads[rank()]));
  });
  return states;
}

TEST(ReplicaJoinStepFunctions, AreToldApart) {
  const auto expected = train_in_turns(false);
  const auto got = train_in_turns(true);
  for (size_t rank = 0; rank < got.size(); ++rank) {
    expect_equal(got[rank], expected[rank], "value");
  }
}

/// Masks are keyed by how often a step function was called, so they go on alike.
TEST(ReplicaJoinCounts, AreThoseOfTheLast) {
  std::vector<torch::Tensor> got(2), expected(2);
  for (const bool uneven : {false, true}) {
    run_as_threads(2, Config().ddp(true).seed(7).timeout_seconds(60), [&] {
      torch::nn::Sequential net(torch::nn::Linear(6, 4), torch::nn::Dropout(0.5));
      DistributedModel<torch::nn::Sequential> model(net);
      auto step = smp::step([&](torch::Tensor x) {
        auto result = model(x);
        model->backward(loss_of(result));
        return result.eq(0);
      });
      const auto x = torch::ones({8, 6});
      {
        const auto guard = model->join();
        for (int i = 0; i < (uneven ? 3 - rank() : 3); ++i) step(x);
      }
      (uneven ? got : expected)[rank()] = step(x).concat();
    });
  }
  expect_equal(got, expected, "mask");
  EXPECT_FALSE(torch::equal(got[0], got[1]));
}

/// Layers that `model->cpu()` has put together are taken back before the last replica's parts come.
TEST(ReplicaJoinOfDividedLayers, EndsAfterModelCpu) {
  torch::set_num_threads(1);
  const auto train = [](bool gathers) {
    std::vector<Mlp> nets;
    for (int rank = 0; rank < 4; ++rank) nets.push_back(make_mlp());
    std::vector<Named> states(4);
    const auto config = Config().tensor_parallel_degree(2).prescaled_batch(true).ddp(true);
    run_as_threads(4, Config(config).timeout_seconds(60), [&] {
      set_tensor_parallelism(*nets[rank()]);
      DistributedModel<Mlp> model(nets[rank()]);
      DistributedOptimizer<torch::optim::SGD> optimizer(model->parameters(),
                                                        torch::optim::SGDOptions(kRate));
      auto step = smp::step([&](torch::Tensor x) { model->backward(loss_of(model(x))); });
      {
        const auto guard = model->join();
        for (int i = 0; i < 3 - 2 * rdp_rank(); ++i) {
          optimizer.zero_grad();
          step(torch::full({2, MlpImpl::kWidth}, 1. + i + rdp_rank()));
          optimizer.step();
        }
        if (gathers) model->cpu();
      }
      states[rank()] = to_map(model->state_dict());
    });
    return states;
  };
  const auto expected = train(false);
  for (const Named& state : train(true)) expect_equal(state, expected[0], "value");
}

/// The text of the error of a program that trains an Mlp on two replicas.
std::string join_error_with(const Config& config,
                            const std::function<void(DistributedModel<Mlp>&)>& program) {
  return error_of_run<Error>(2, Config(config).ddp(true).timeout_seconds(60), [&] {
    Mlp net;
    DistributedModel<Mlp> model(net);
    program(model);
  });
}

void expect_says(const std::string& text, const std::string& words) {
  EXPECT_NE(text.find(words), std::string::npos) << text;
}

TEST(ReplicaJoinErrors, InTheWrongPlace) {
  expect_says(join_error_with(Config(),
                              [](DistributedModel<Mlp>& model) {
                                const auto guard = model->join();
                                const auto other = model->join();
                              }),
              "DistributedModel::join was called inside of another");
  expect_says(join_error_with(Config(),
                              [](DistributedModel<Mlp>& model) {
                                auto step = smp::step([&](torch::Tensor x) {
                                  const auto guard = model->join();
                                  return model(x);
                                });
                                step(torch::ones({2, MlpImpl::kWidth}));
                              }),
              "join was called inside a step function");
}

TEST(ReplicaJoinErrors, EarlyTerminationEndsTrainingEverywhere) {
  expect_says(join_error_with(Config(),
                              [](DistributedModel<Mlp>& model) {
                                auto step = smp::step(
                                    [&](torch::Tensor x) { model->backward(loss_of(model(x))); });
                                const auto guard =
                                    model->join(JoinOptions().throw_on_early_termination(true));
                                for (int i = 0; i < 2 + rank(); ++i) {
                                  step(torch::ones({2, MlpImpl::kWidth}));
                                }
                              }),
              "DistributedModel::join: 1 of 2 replicas have no batches left");
}

TEST(ReplicaJoinErrors, AReplicaThatHasTrainedNothing) {
  expect_says(join_error_with(Config(),
                              [](DistributedModel<Mlp>& model) {
                                auto step = smp::step(
                                    [&](torch::Tensor x) { model->backward(loss_of(model(x))); });
                                const auto guard = model->join();
                                if (rank() == 0) step(torch::ones({2, MlpImpl::kWidth}));
                              }),
              "this replica has no step function that has trained, so it cannot take part");
}

TEST(ReplicaJoinErrors, AStepFunctionThatAReplicaHasNotTrainedWith) {
  const auto program = [](DistributedModel<Mlp>& model) {
    auto step = smp::step([&](torch::Tensor x) { model->backward(loss_of(model(x))); });
    auto other = smp::step([&](torch::Tensor x) { model->backward(loss_of(2 * model(x))); });
    const auto x = torch::ones({2, MlpImpl::kWidth});
    const auto guard = model->join();
    step(x);
    if (rank() == 0) other(x);
  };
  expect_says(join_error_with(Config(), program),
              "this replica has not trained with the step function that others call, so it cannot "
              "take part in their steps. Call each step function at least once on each replica");
}

TEST(ReplicaJoinErrors, WhereAReplicaWouldStayBehind) {
  const auto join = [](DistributedModel<Mlp>& model) { const auto guard = model->join(); };
  for (const auto& config :
       {Config().shard_optimizer_state(true), Config().sharded_data_parallel_degree(2)}) {
    expect_says(join_error_with(config, join), "each replica updates a part of the parameters");
  }
  for (const auto& config : {Config().bf16(true), Config().fp16(true)}) {
    expect_says(join_error_with(config, join),
                "a replica without batches takes no part in the updates");
  }
}

}  // namespace
}  // namespace smp
