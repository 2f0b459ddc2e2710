// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "smp/optim/lamb.h"
#include "tests/optim/set_state.h"
#include "tests/smp/sharded_state.h"

// State dictionaries of optimizers by parameter name: full, local and in pieces.
namespace smp {
namespace {

using namespace testing;
namespace to = torch::optim;

using Net = torch::nn::Sequential;

/// Gradients of several pieces.
Net make_state_net() {
  torch::manual_seed(3);
  return Net(torch::nn::Linear(13, 20), torch::nn::Tanh(), torch::nn::Linear(20, 17),
             torch::nn::Tanh(), torch::nn::Linear(17, 1));
}

struct Layout {
  int stages;
  int replicas;
  bool sharded;
  int degree = 1;  // degree of sharded data parallelism

  int ranks() const { return stages * replicas; }
};

std::ostream& operator<<(std::ostream& out, const Layout& layout) {
  return out << layout.stages << " stages x " << layout.replicas << " replicas"
             << (layout.sharded ? ", sharded" : "") << ", degree " << layout.degree;
}

constexpr int kStateMicrobatches = 4, kShards = 4;  // numbers of a step, whatever the layout

Config config_of(const Layout& layout) {
  return stages(layout.stages)
      .microbatches(kStateMicrobatches / layout.replicas)
      .ddp(true)
      .gradient_shards(kShards)
      .bucket_cap_mb(0.001)
      .shard_optimizer_state(layout.sharded)
      .sharded_data_parallel_degree(layout.degree)
      .sdp_param_persistence_threshold(100)
      .sdp_reduce_bucket_size(500)
      .sdp_gradient_clipping(1e9);
}

torch::Tensor batch_of_step(int step) {
  torch::manual_seed(70 + step);
  return torch::randn({2 * kStateMicrobatches, 13});
}

/// The state that a run leaves.
struct Saved {
  Named model;
  OptimizerState optimizer;
};

const auto kAdam = recipe<to::Adam>(to::AdamOptions(0.01).amsgrad(true).weight_decay(0.01), true);
const auto kSgd = recipe<to::SGD>(to::SGDOptions(0.1), true);  // has no state
const auto kLamb = recipe<optim::Lamb>(optim::LambOptions(0.02).max_grad_norm(0.05), true);

template <class Recipe>
Saved train_plain_net(const Recipe& recipe, int steps) {
  const auto net = make_state_net();
  const auto parameters = net->parameters();
  const auto optimizer = recipe.plain(parameters);
  for (int i = 0; i < steps; ++i) {
    optimizer->zero_grad();
    const auto x = batch_of_step(i);
    plain_backward(parameters, kShards, kStateMicrobatches / kShards, [&](int m) {
      return Net(net)->forward(part(x, kStateMicrobatches, m)).square().mean();
    });
    optimizer->step();
  }
  return {state_of(*net),
          optim::get_state(*optimizer, optim::parameter_names(net->named_parameters()))};
}

void expect_same_state(const OptimizerState& got, const OptimizerState& expected) {
  EXPECT_EQ(optim::to_json(got), optim::to_json(expected));
  const auto tensors = optim::tensors_of(got);
  const auto others = optim::tensors_of(expected);
  ASSERT_EQ(tensors.size(), others.size());
  for (const auto& [name, tensor] : others) expect_equal(tensors.at(name), tensor, name);
}

torch::OrderedDict<std::string, torch::Tensor> to_dict(const Named& named) {
  torch::OrderedDict<std::string, torch::Tensor> dict;
  for (const auto& [name, tensor] : named) dict.insert(name, tensor);
  return dict;
}

/// When a run takes the state that another has left.
enum class When { kNever, kBeforeTheFirstStep, kLater };

/// Calls `at_the_end(model, optimizer)` on each rank after steps `first` to `last` - 1.
template <class Recipe, class AtTheEnd>
void train_ranks_net(const Layout& layout, const Recipe& recipe, int first, int last,
                     const Saved* from, When when, const AtTheEnd& at_the_end) {
  SCOPED_TRACE(c10::str(layout));
  torch::set_num_threads(1);
  std::vector<Net> nets;
  for (int i = 0; i < layout.ranks(); ++i) nets.push_back(make_state_net());
  std::vector<torch::Tensor> batches;
  for (int i = 0; i < last; ++i) batches.push_back(batch_of_step(i));
  run_as_threads(layout.ranks(), config_of(layout), [&] {
    DistributedModel<Net> model(nets[rank()]);
    const auto optimizer = recipe.on_rank(model->parameters());
    auto train = step([&](torch::Tensor x) {
      auto loss = model(x).square().mean();
      model->backward(loss);
      return loss;
    });
    const auto train_step = [&](int i) {
      optimizer->zero_grad();
      train(part(batches[i], layout.replicas, dp_rank()));
      optimizer->step();
    };
    const auto load = [&] {
      model->load_state_dict(to_dict(from->model));
      optimizer->load_state_dict(from->optimizer);
    };
    if (when == When::kBeforeTheFirstStep) load();
    if (when == When::kLater) {
      train_step(0);  // makes another state, which is replaced
      load();
    }
    for (int i = first; i < last; ++i) train_step(i);
    at_the_end(model, *optimizer);
  });
}

/// The full state at the end, which all ranks have.
template <class Recipe>
Saved train_ranks_net(const Layout& layout, const Recipe& recipe, int first, int last,
                      const Saved* from = nullptr, When when = When::kNever) {
  Saved result;
  std::mutex mutex;
  train_ranks_net(layout, recipe, first, last, from, when, [&](auto& model, auto& optimizer) {
    const auto weights = to_map(model->state_dict());
    const auto state = optimizer.state_dict();
    const std::lock_guard lock(mutex);
    if (result.model.empty()) result = {weights, state};
    expect_same_state(state, result.optimizer);
  });
  return result;
}

const std::vector<Layout> kLayouts{{1, 1, false}, {2, 1, false},    {3, 1, false},
                                   {2, 2, false}, {1, 2, true},     {2, 2, true},
                                   {1, 4, true},  {1, 2, false, 2}, {1, 4, false, 2}};

/// The state is that of one plain process, in every layout.
TEST(OptimizerState, FullIsThatOfOneProcess) {
  const auto adam = train_plain_net(kAdam, 2);
  const auto sgd = train_plain_net(kSgd, 2);
  EXPECT_EQ(adam.optimizer.params.size(), 6u);
  EXPECT_TRUE(sgd.optimizer.params.empty());
  for (const auto& layout : kLayouts) {
    SCOPED_TRACE(c10::str(layout));
    const auto got = train_ranks_net(layout, kAdam, 0, 2);
    expect_equal(got.model, adam.model, "value");
    expect_same_state(got.optimizer, adam.optimizer);
    expect_same_state(train_ranks_net(layout, kSgd, 0, 2).optimizer, sgd.optimizer);
  }
}

/// Two steps, then two in another layout, are four in one process.
template <class Recipe>
void expect_moves(const Recipe& recipe, const std::vector<Layout>& layouts) {
  const auto expected = train_plain_net(recipe, 4);
  for (size_t i = 0; i < layouts.size(); ++i) {
    const auto& next = layouts[(i + 3) % layouts.size()];
    SCOPED_TRACE(c10::str(layouts[i], ", then ", next));
    const auto half = train_ranks_net(layouts[i], recipe, 0, 2);
    for (const When when : {When::kBeforeTheFirstStep, When::kLater}) {
      const auto got = train_ranks_net(next, recipe, 2, 4, &half, when);
      expect_equal(got.model, expected.model, "value");
      expect_same_state(got.optimizer, expected.optimizer);
    }
  }
}

TEST(OptimizerState, FullMovesBetweenLayouts) {
  expect_moves(kAdam, kLayouts);
  expect_moves(kLamb, kLayouts);
}

/// The states that ranks own are a part of the whole, and go back to where they were.
TEST(OptimizerState, LocalIsOfTheRanksParameters) {
  const auto expected = train_plain_net(kAdam, 2).optimizer;
  for (const auto& layout : kLayouts) {
    std::mutex mutex;
    std::map<int, OptimizerState> by_stage;
    const auto take = [&](auto& model, auto& optimizer) {
      const auto local = optimizer.local_state_dict();
      EXPECT_EQ(local.params.size(), model->local_parameters().size());
      optimizer.load_state_dict(local);
      const std::lock_guard lock(mutex);
      const auto [found, is_new] = by_stage.emplace(pp_rank(), local);
      if (!is_new) expect_same_state(local, found->second);
    };
    train_ranks_net(layout, kAdam, 0, 2, nullptr, When::kNever, take);
    size_t count = 0;
    const auto tensors = optim::tensors_of(expected);
    for (const auto& [stage, local] : by_stage) {
      count += local.params.size();
      for (const auto& [name, tensor] : optim::tensors_of(local)) {
        expect_equal(tensor, tensors.at(name), name);
      }
    }
    EXPECT_EQ(count, expected.params.size());
  }
}

/// The pieces of all ranks together are the whole; each rank goes on with its own.
TEST(OptimizerState, PiecesNameTheirElements) {
  const auto expected = optim::tensors_of(train_plain_net(kAdam, 2).optimizer);
  const auto four_steps = train_plain_net(kAdam, 4);
  for (const auto& layout : {Layout{1, 2, true}, Layout{2, 2, true}, Layout{1, 2, false, 2}}) {
    SCOPED_TRACE(c10::str(layout));
    std::mutex mutex;
    std::map<int, OptimizerState> of_rank;
    Named model;
    int64_t elements = 0;
    train_ranks_net(layout, kAdam, 0, 2, nullptr, When::kNever, [&](auto& net, auto& optimizer) {
      const auto state = optimizer.local_state_dict(/*gather_if_shard=*/false);
      const auto weights = to_map(net->state_dict());
      const std::lock_guard lock(mutex);
      of_rank[rank()] = state;
      model = weights;
      for (const auto& [key, tensor] : optim::tensors_of(state)) {
        const size_t slash = key.rfind('/'), bracket = key.find('[');
        if (bracket == std::string::npos) continue;
        const auto& whole = expected.at(key.substr(0, bracket) + key.substr(slash));
        const auto begin = std::stoll(key.substr(bracket + 1));
        expect_equal(tensor, whole.flatten().narrow(0, begin, tensor.numel()), key);
        elements += tensor.numel();
      }
    });
    EXPECT_GT(elements, 0);
    Named got;
    std::vector<Net> nets;
    for (int i = 0; i < layout.ranks(); ++i) nets.push_back(make_state_net());
    run_as_threads(layout.ranks(), config_of(layout), [&] {
      DistributedModel<Net> net(nets[rank()]);
      auto optimizer = kAdam.make<DistributedOptimizer<to::Adam>>(net->parameters());
      net->load_state_dict(to_dict(model));
      optimizer->load_state_dict(of_rank.at(rank()));  // before it is known who has which pieces
      auto train = step([&](torch::Tensor x) {
        auto loss = net(x).square().mean();
        net->backward(loss);
        return loss;
      });
      for (int i = 2; i < 4; ++i) {
        optimizer->zero_grad();
        torch::Tensor batch;
        {
          const std::lock_guard lock(mutex);
          batch = batch_of_step(i);
        }
        train(part(batch, layout.replicas, dp_rank()));
        optimizer->step();
      }
      const auto weights = to_map(net->state_dict());
      const std::lock_guard lock(mutex);
      got = weights;
    });
    expect_equal(got, four_steps.model, "value");
  }
}

/// Groups of one parameter each, so that a replica has pieces of some only, in another order than
/// they were saved in.
TEST(OptimizerState, OptionsFollowParametersOfWhichAReplicaHasNoPiece) {
  std::vector<Net> nets{make_state_net(), make_state_net()};
  run_as_threads(2, stages(1).ddp(true).shard_optimizer_state(true), [&] {
    DistributedModel<Net> model(nets[rank()]);
    // None of them Adam's own 1e-3, which a newer libtorch takes for a rate that was not given.
    const auto rate = [](size_t parameter) { return 2e-3 * static_cast<double>(parameter + 1); };
    const Tensors parameters = model->parameters();
    const size_t count = parameters.size();
    std::vector<to::OptimizerParamGroup> groups, reversed;
    for (size_t i = 0; i < count; ++i) {
      groups.emplace_back(Tensors{parameters[i]}, std::make_unique<to::AdamOptions>(rate(i)));
      reversed.emplace_back(Tensors{parameters[count - 1 - i]});
    }
    DistributedOptimizer<to::Adam> saved(groups, to::AdamOptions(1));
    DistributedOptimizer<to::Adam> loaded(reversed, to::AdamOptions(1));
    make_training(model)(torch::ones({4, 13}), torch::zeros({4, 1}));
    saved.step();
    loaded.load_state_dict(saved.state_dict());
    for (size_t i = 0; i < count; ++i) {
      EXPECT_EQ(loaded.param_groups()[i].options().get_lr(), rate(count - 1 - i))
          << "group " << i << " on rank " << rank();
    }
  });
}

/// Before the first step every rank has everything.
TEST(OptimizerState, BeforeTheFirstStep) {
  std::vector<Net> nets{make_state_net(), make_state_net()};
  run_as_threads(2, config_of({2, 1, false}), [&] {
    DistributedModel<Net> model(nets[rank()]);
    auto optimizer = kAdam.make<DistributedOptimizer<to::Adam>>(model->parameters());
    const auto state = optimizer->state_dict();
    EXPECT_TRUE(state.params.empty());
    EXPECT_EQ(state.groups.size(), 2u);
    EXPECT_EQ(state.groups[0].params,
              (std::vector<std::string>{"0.weight", "2.weight", "4.weight"}));
    expect_has(error_of<UsageError>([&] { optimizer->local_state_dict(); }),
               {"optimizer.local_state_dict() was called before the first step, which divides"});
  });
}

/// It would be given its state in the first step.
TEST(OptimizerState, OfAnOptimizerThatIsGoneBeforeTheFirstStep) {
  std::vector<Net> nets{make_state_net(), make_state_net()};
  run_as_threads(2, config_of({2, 1, false}), [&] {
    DistributedModel<Net> model(nets[rank()]);
    {
      auto gone = kAdam.make<DistributedOptimizer<to::Adam>>(model->parameters());
      gone->load_state_dict(gone->state_dict());
    }
    step([&](torch::Tensor x) { return model(x); })(torch::ones({kStateMicrobatches, 13}));
    EXPECT_TRUE(model->partitioned());
  });
}

/// A state that cannot be read.
struct Unreadable : to::AdamParamState {
  void serialize(torch::serialize::OutputArchive&) const override {
    throw std::domain_error("unreadable");
  }
};

/// An error of the program's own keeps its kind where all ranks have it.
TEST(OptimizerStateErrors, OfTheProgram) {
  train_ranks_net({2, 1, false}, kAdam, 0, 1, nullptr, When::kNever, [&](auto&, auto& optimizer) {
    const auto spoil = [&] {
      for (auto& [parameter, state] : optimizer.state()) state = std::make_unique<Unreadable>();
    };
    if (rank() == 1) spoil();
    expect_has(error_of<CheckpointError>([&] { optimizer.state_dict(); }), {"unreadable"});
    if (rank() == 0) spoil();
    EXPECT_THROW(optimizer.state_dict(), std::domain_error);
  });
}

TEST(OptimizerStateErrors, WhatDoesNotFit) {
  const auto whole = train_plain_net(kAdam, 2);
  std::vector<OptimizerState> of_rank(2);
  std::mutex mutex;
  train_ranks_net({2, 1, false}, kAdam, 0, 2, nullptr, When::kNever, [&](auto&, auto& optimizer) {
    auto other = whole.optimizer;
    other.params.at("0.weight").shape = {20, 14};
    other.groups[1].params.push_back("5.bias");
    const auto before = optimizer.state_dict();
    const auto text = error_of<CheckpointError>([&] { optimizer.load_state_dict(other); });
    expect_has(text, {"the state dictionary does not fit the optimizer:\n  unexpected: 5.bias",
                      "0.weight: expected shape [20, 13], got [20, 14]",
                      "Nothing was loaded. Build the optimizer as it was when the dictionary"});
    expect_same_state(optimizer.state_dict(), before);
    const auto local = optimizer.local_state_dict();
    const std::lock_guard lock(mutex);
    of_rank[rank()] = local;
  });
  // The other stage's.
  train_ranks_net({2, 1, false}, kAdam, 0, 2, nullptr, When::kNever, [&](auto&, auto& optimizer) {
    const auto text =
        error_of<CheckpointError>([&] { optimizer.load_state_dict(of_rank[1 - rank()]); });
    expect_has(text, {"the state dictionary does not fit the optimizer:\n  missing: ",
                      "What local_state_dict() gives fits the ranks that it was taken from"});
  });
}

TEST(OptimizerStateErrors, InsideAStep) {
  for (const int which : {0, 1, 2}) {
    const auto text = error_of_run<UsageError>(1, stages(1), [&] {
      DistributedModel<Mlp> model{Mlp()};
      DistributedOptimizer<to::SGD> optimizer(model->parameters(), 0.1);
      step([&](torch::Tensor x) {
        if (which == 0) optimizer.state_dict();
        if (which == 1) optimizer.local_state_dict();
        if (which == 2) optimizer.load_state_dict({});
        return model(x);
      })(torch::ones({4, MlpImpl::kWidth}));
    });
    expect_has(text, {"state_dict() was called inside a step function. Gradients are complete"});
  }
}

}  // namespace
}  // namespace smp
