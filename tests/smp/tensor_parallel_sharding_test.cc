// SPDX-License-Identifier: Apache-2.0
#include "tests/smp/tensor_parallel_sharding.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "runtime/parameters/parameter_shards.h"
#include "runtime/runtime.h"
#include "smp/optim/lamb.h"
#include "smp/optim/novograd.h"
#include "tests/smp/models.h"
#include "tests/smp/tensor_parallel_run.h"

// Tensor parallelism together with `shard_optimizer_state` and sharded data parallelism: replicas
// divide the parts, which changes no bit.
namespace smp {
namespace {

using namespace testing;

using Change = std::function<Config(Config)>;

template <class Net>
void mark(Net& net) {
  set_tensor_parallelism(net);
}

/// Those of modules of `nn::SplitModule` are divided already.
void mark(DividedModel&) {}

template <class Net>
Outcome run_with(const TensorLayout& layout, const Change& change) {
  return run_on_ranks<Net>(
      layout, [](Net& net) { mark(net); }, change);
}

/// Gradients of pieces are compared by the optimizers' results.
void expect_same_results(Outcome got, const Outcome& expected) {
  got.gradients = expected.gradients;
  expect_same(got, expected);
}

template <class Net>
void check(const TensorLayout& layout, const std::vector<Change>& changes) {
  SCOPED_TRACE(c10::str(layout));
  const auto whole = run_with<Net>(layout, [](Config config) { return config; });
  for (size_t i = 0; i < changes.size(); ++i) {
    SCOPED_TRACE(i);
    expect_same_results(run_with<Net>(layout, changes[i]), whole);
  }
}

const Change kStates = with_divided_states, kParameters = with_divided_parameters;

/// Which equals one process up to rounding: tensor_parallel_rewrite_test.cc and _step_test.cc.
TEST(TensorParallelSharding, HasTheBitsOfWholeReplicas) {
  check<PlainModel>({2, 1, 2}, {kStates, kParameters});
  check<DividedModel>({2, 1, 2}, {kStates, kParameters});
  check<DividedModel>({2, 2, 2, true}, {kStates, kParameters});
  check<PlainModel>({2, 2, 2}, {kStates, kParameters});
  check<PlainModel>({2, 1, 4, true}, {kStates, kParameters});
}

/// The documented configurations: a degree of 4 with sharded states, 8 times 16 sharded replicas,
/// scaled down.
TEST(TensorParallelSharding, RunsTheDocumentedConfigurations) {
  check<TiedGpt>({4, 1, 2, true}, {kStates});
  check<TiedGpt>({2, 1, 2}, {kParameters, [](Config config) {
                               return with_divided_parameters(config).sdp_max_live_parameters(1);
                             }});
}

TEST(TensorParallelSharding, IsThatOfOneProcess) {
  const auto plain = run_plain<PlainModel>();
  for (const Change& change : {kStates, kParameters}) {
    auto got = run_with<PlainModel>({2, 1, 2}, change);
    got.gradients = plain.gradients;
    expect_close(got, plain);
  }
}

TEST(TensorParallelSharding, IsTheSameHoweverItRuns) {
  const TensorLayout layout{2, 1, 2};
  const auto marked = [](TiedGpt& net) { mark(net); };
  const auto again = [](TiedGpt& net) {
    mark(net);
    set_activation_checkpointing(*net.up[1]);
    set_activation_checkpointing(*net.attention_in[0]);
  };
  const auto speed = [](Config config) { return config.optimize("speed"); };
  const auto expected = run_on_ranks<TiedGpt>(layout, marked);
  const auto fast = run_on_ranks<TiedGpt>(layout, marked, speed);
  for (const Change& change : {kStates, kParameters}) {
    expect_same_results(run_on_ranks<TiedGpt>(layout, again, change), expected);
    expect_same_results(
        run_on_ranks<TiedGpt>(layout, marked, [&](Config config) { return speed(change(config)); }),
        fast);
    expect_same_results(
        run_on_ranks<TiedGpt>(layout, marked,
                              [&](Config config) { return change(config).guard("first_step"); }),
        expected);
  }
}

/// LAMB and NovoGrad take norms of wholes: of parts of parameters, pieces of parameters and pieces
/// of parts.
template <class Net>
void check_norms(const TensorLayout& layout, const std::vector<Change>& changes) {
  SCOPED_TRACE(c10::str(layout));
  const auto run = [&](const MakeOptimizer& make, const Change& change) {
    return run_on_ranks<Net>(
        layout, [](Net& net) { mark(net); }, change, make);
  };
  for (const MakeOptimizer& make :
       {optimizer_with<optim::Lamb>(optim::LambOptions(0.02).max_grad_norm(0.3)),
        optimizer_with<optim::NovoGrad>(optim::NovoGradOptions(0.02).weight_decay(0.01)),
        optimizer_with<optim::NovoGrad>(optim::NovoGradOptions(0.02).norm_type(0))}) {
    const auto parts = run(make, [](Config config) { return config; });
    expect_close(parts, run_plain<PlainModel>([](PlainModel&) {}, make), 1e-11);
    for (const Change& change : changes) expect_same_results(run(make, change), parts);
  }
}

TEST(TensorParallelSharding, TakesNormsOfWholes) {
  check_norms<PlainModel>({2, 1, 2}, {kStates, kParameters});
  check_norms<DividedModel>({2, 1, 2}, {kStates, kParameters});
  check_norms<PlainModel>({2, 2, 2}, {kStates});
}

/// The ranks of a group are no neighbours with `spread`.
TEST(TensorParallelSharding, GoesWithEveryPlacement) {
  for (const char* placement : {"spread", "TDP", "PDT"}) {
    check<PlainModel>({2, 1, 2, false, placement}, {kStates, kParameters});
  }
}

/// Elements of tensors, by rank.
using Counts = std::map<int, int64_t>;

/// After a step of AdamW replicas have together the elements that `count` counts of a rank's part
/// of the model.
template <class Count>
void expect_divided(const Change& change, const Count& count) {
  const TensorLayout layout{2, 1, 2};
  Counts held, parts;  // sums of the replicas' elements by tp_rank
  int64_t whole = 0;
  std::mutex mutex;
  torch::set_num_threads(1);
  run_as_threads(4, change(config_of(layout)), [&] {
    const auto net = make_model<PlainModel>(5);
    int64_t all = 0, part = 0;
    for (const auto& parameter : net->parameters()) all += parameter.numel();
    mark(*net);
    ModelOf<PlainModel> model(net);
    DistributedOptimizer<torch::optim::AdamW> optimizer(model->parameters());
    auto train = step([&](torch::Tensor x, torch::Tensor y) {
      auto loss = net->loss(x, y);
      model->backward(loss);
      return loss;
    });
    const auto batch = token_batch(0);
    train(own_batch(layout, batch[0]), own_batch(layout, batch[1]));
    optimizer.step();
    for (const auto& parameter : net->parameters()) part += parameter.numel();
    const int64_t mine = count(model, optimizer);
    EXPECT_LT(mine, part * 9 / 10);  // the smallest lie on the first replica
    EXPECT_GT(mine, part / 10);
    const std::lock_guard lock(mutex);
    held[tp_rank()] += mine;
    parts[tp_rank()] = part;
    whole = all;
  });
  for (const int tp : {0, 1}) {
    EXPECT_EQ(held[tp], parts[tp]);
    EXPECT_LT(parts[tp], whole * 3 / 4);
  }
}

TEST(TensorParallelSharding, LeavesAPieceOfAPartOfTheStates) {
  expect_divided(kStates, [](auto&, auto& optimizer) {
    int64_t count = 0;
    for (const auto& [name, param] : optimizer.local_state_dict(false).params) {
      count += param.tensors.at("exp_avg").numel();
    }
    return count;
  });
}

TEST(TensorParallelSharding, LeavesAPieceOfAPartOfTheParameters) {
  // All are divided, the smallest too.
  const auto all = [](Config config) {
    return with_divided_parameters(config).sdp_param_persistence_threshold(0);
  };
  expect_divided(all, [](auto& model, auto&) {
    int64_t count = 0;
    for (const auto& parameter : model->parameters()) {
      EXPECT_EQ(parameter.storage().nbytes(), 0u);
    }
    for (const auto& item : model->virtual_named_parameters()) count += item.value().numel();
    return count;
  });
}

}  // namespace
}  // namespace smp
