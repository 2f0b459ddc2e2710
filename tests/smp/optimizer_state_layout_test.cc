// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "tests/optim/set_state.h"
#include "tests/smp/factored.h"
#include "tests/smp/tensor_parallel.h"
#include "tests/smp/tensor_parallel_sharding.h"
#include "tests/temp_folder.h"

// Optimizers with tensors in their state that are not elementwise, where ranks have parameters in
// parts. Two ranks have "up" of `DividedModel` divided along its rows, in two blocks, "down"
// along its columns, of which a part is a square matrix.
namespace smp {
namespace {

using namespace testing;
namespace to = torch::optim;

/// Weights and state after some steps.
struct Result {
  Named weights;
  OptimizerState state;
};

/// A state in which each number is another one.
template <class Optimizer>
OptimizerState first_state() {
  const auto net = make_model<PlainModel>(5, 2, /*dropout=*/0.0);
  const auto names = optim::parameter_names(net->named_parameters());
  Optimizer optimizer(net->parameters());
  for (auto& parameter : net->parameters()) parameter.mutable_grad() = torch::zeros_like(parameter);
  optimizer.step({});
  auto state = optim::get_state(optimizer, names);
  double next = 1;
  for (const auto& [name, tensor] : optim::tensors_of(state)) {
    next += 0.01;
    const auto options = tensor.options();
    tensor.copy_(torch::linspace(next, next + 0.1, tensor.numel(), options).view(tensor.sizes()));
  }
  return state;
}

constexpr int kFirst = 2, kLast = 4;  // numbers of steps

/// One process with plain libtorch. `from` is the state before step `first`, if there is any.
template <class Optimizer = Factored>
Result train_plain(const Named& weights, const OptimizerState* from, int first, int last) {
  auto net = make_model<PlainModel>(5, 2, /*dropout=*/0.0);
  if (!weights.empty()) {
    torch::NoGradGuard no_grad;
    for (auto& item : net->named_parameters()) item.value().copy_(weights.at(item.key()));
  }
  const auto parameters = net->parameters();
  const auto names = optim::parameter_names(net->named_parameters());
  Optimizer optimizer(parameters);
  if (from != nullptr) {
    optim::set_state(optimizer, *from, names, optim::detail::make_param_state<FactoredState>);
  }
  for (int i = first; i < last; ++i) {
    optimizer.zero_grad();
    const auto batch = token_batch(i);
    plain_backward(parameters, 1, kMicrobatches, [&](int m) {
      return net->loss(part(batch[0], kMicrobatches, m), part(batch[1], kMicrobatches, m));
    });
    optimizer.step({});
  }
  return {state_of(*net), optim::get_state(optimizer, names)};
}

/// A rank of a run.
template <class Optimizer, class Net>
struct Rank {
  ModelOf<Net>& model;
  DistributedOptimizer<Optimizer>& optimizer;
  std::function<void(int)> train;
};

using Change = std::function<Config(Config)>;
Config unchanged(Config config) { return config; }

/// Runs `body` with a model and a function that makes the gradients of a step.
template <class Net, class Body>
void run_model(const TensorLayout& layout, const Body& body, const Change& change = unchanged) {
  torch::set_num_threads(1);
  run_as_threads(layout.ranks(), change(config_of(layout)), [&] {
    const auto net = make_model<Net>(5, 2, /*dropout=*/0.0);
    if (std::is_same_v<Net, PlainModel>) set_tensor_parallelism(*net);
    ModelOf<Net> model(net);
    auto train = step([&](torch::Tensor x, torch::Tensor y) {
      auto loss = net->loss(x, y);
      model->backward(loss);
      return loss;
    });
    body(model, [&](int i) {
      const auto batch = token_batch(i);
      train(own_batch(layout, batch[0]), own_batch(layout, batch[1]));
    });
  });
}

template <class Optimizer, class Net = DividedModel, class Body>
void run(const TensorLayout& layout, const Body& body, const Change& change = unchanged) {
  run_model<Net>(
      layout,
      [&](ModelOf<Net>& model, const auto& backward) {
        DistributedOptimizer<Optimizer> optimizer(model->parameters());
        Rank<Optimizer, Net> rank{model, optimizer, [&](int i) {
                                    optimizer.zero_grad();
                                    backward(i);
                                    optimizer.step();
                                  }};
        body(rank);
      },
      change);
}

/// The result in the end, on which all ranks agree.
template <class Optimizer = Factored, class Net = DividedModel, class Body>
Result outcome(const TensorLayout& layout, const Body& body, const Change& change = unchanged) {
  SCOPED_TRACE(c10::str(layout));
  Result result;
  std::mutex mutex;
  run<Optimizer, Net>(
      layout,
      [&](auto& rank) {
        body(rank);
        const Result mine{to_map(rank.model->state_dict()), rank.optimizer.state_dict()};
        const std::lock_guard lock(mutex);
        if (result.weights.empty()) result = mine;
        expect_equal(optim::tensors_of(mine.state), optim::tensors_of(result.state), "state");
      },
      change);
  return result;
}

/// Those that follow from no gradient have the same bits.
void expect_as(const Result& got, const Result& expected) {
  expect_close(got.weights, expected.weights, "value", 1e-10);
  EXPECT_EQ(optim::to_json(got.state)["state"], optim::to_json(expected.state)["state"]);
  const auto tensors = optim::tensors_of(got.state);
  const auto others = optim::tensors_of(expected.state);
  ASSERT_EQ(tensors.size(), others.size());
  for (const auto& [name, tensor] : others) {
    ASSERT_EQ(tensors.count(name), 1u) << name;
    if (name.find("/momentum") != std::string::npos) {
      expect_close(tensors.at(name), tensor, name, 1e-10);
    } else {
      expect_equal(tensors.at(name), tensor, name);
    }
  }
}

class OptimizerStateLayout : public ::testing::TestWithParam<TensorLayout> {
 protected:
  std::string path(const std::string& name) const { return folder_.file(name); }

 private:
  const TempFolder folder_;
};

TEST_P(OptimizerStateLayout, StatesAreCutAndJoinedAsTheyLie) {
  const auto start = first_state<Factored>();
  const auto expected = train_plain({}, &start, 0, kLast);
  const auto halfway = outcome(GetParam(), [&](auto& rank) {
    rank.optimizer.load_state_dict(start);
    for (int i = 0; i < kFirst; ++i) rank.train(i);
    save(path("saved"), rank.model, rank.optimizer);
  });
  expect_as(halfway, train_plain({}, &start, 0, kFirst));
  // One process, plain libtorch, goes on with it.
  expect_as(train_plain(halfway.weights, &halfway.state, kFirst, kLast), expected);
  for (const TensorLayout& other : {TensorLayout{1}, {2}, {4}, {2, 2}, {1, 2}, {2, 1, 2}}) {
    const auto before = outcome(other, [&](auto& rank) {
      load(path("saved"), rank.model, rank.optimizer);
      for (int i = kFirst; i < kLast; ++i) rank.train(i);
    });
    expect_as(before, expected);
    const auto later = outcome(other, [&](auto& rank) {
      rank.train(0);
      load(path("saved"), rank.model, rank.optimizer);
      for (int i = kFirst; i < kLast; ++i) rank.train(i);
      rank.optimizer.load_state_dict(rank.optimizer.local_state_dict());
    });
    expect_as(later, expected);
  }
}

/// The states that wait for the first step, which cuts them, are saved as they are.
TEST_P(OptimizerStateLayout, StatesThatWaitAreWhole) {
  const auto start = first_state<Factored>();
  outcome(GetParam(), [&](auto& rank) {
    rank.optimizer.load_state_dict(start);
    save(path("saved"), rank.model, rank.optimizer);
    rank.train(0);
  });
  const auto loaded = outcome({1}, [&](auto& rank) {
    rank.train(0);
    load(path("saved"), rank.model, rank.optimizer);
  });
  expect_equal(optim::tensors_of(loaded.state), optim::tensors_of(start), "state");
}

/// States that the constructor has made of wholes are cut by the first step.
TEST(OptimizerStateLayoutOfConstructors, StatesAreThoseOfWholesUntilTheFirstStep) {
  const auto expected = train_plain<Eager>({}, nullptr, 0, kFirst);
  const auto train = [](auto& rank) {
    for (int i = 0; i < kFirst; ++i) rank.train(i);
  };
  expect_as(outcome<Eager, DividedModel>({2}, train), expected);
  expect_as(outcome<Eager, PlainModel>({2, 2}, train), expected);
}

/// So are those of a plain optimizer that is given to `distributed` later.
TEST(OptimizerStateLayoutOfPlainOptimizers, GivenAfterTheFirstStep) {
  const auto expected = train_plain<Eager>({}, nullptr, 0, kFirst);
  for (const TensorLayout& layout : {TensorLayout{2}, {2, 2}, {2, 1, 2}}) {
    SCOPED_TRACE(c10::str(layout));
    run_model<PlainModel>(layout, [&](auto& model, const auto& backward) {
      Eager plain(model->parameters());
      backward(0);
      const auto optimizer = distributed(plain);
      optimizer.step();
      optimizer.zero_grad();
      backward(1);
      optimizer.step();
      expect_as({to_map(model->state_dict()), optimizer.state_dict()}, expected);
    });
  }
}

/// And those that it gets by itself after it was given.
TEST(OptimizerStateLayoutOfPlainOptimizers, ChangedByThemselvesBeforeTheFirstStep) {
  const auto start = first_state<Factored>();
  const auto expected = train_plain({}, &start, 0, kFirst);
  run_model<PlainModel>({2, 2}, [&](auto& model, const auto& backward) {
    Factored plain(model->parameters());
    const auto optimizer = distributed(plain);
    optim::set_state(plain, start, optim::parameter_names(model.get_module()->named_parameters()),
                     optim::detail::make_param_state<FactoredState>);
    for (int i = 0; i < kFirst; ++i) {
      optimizer.zero_grad();
      backward(i);
      optimizer.step();
    }
    expect_as({to_map(model->state_dict()), optimizer.state_dict()}, expected);
  });
}

/// Optimizers of a checkpoint whose states lie otherwise.
TEST(OptimizerStateLayoutOfSeveral, EachSaysHowItsOwnLies) {
  const TempFolder folder;
  const std::string path = folder.file("saved");
  Named saved;
  for (const TensorLayout& layout : {TensorLayout{2, 2}, {1}, {4}, {2, 1, 2}}) {
    SCOPED_TRACE(c10::str(layout));
    run_model<PlainModel>(layout, [&](auto& model, const auto& backward) {
      const auto all = model->parameters();
      DistributedOptimizer<Factored> first(Tensors(all.begin(), all.begin() + 6));
      DistributedOptimizer<to::Adagrad> second(Tensors(all.begin() + 6, all.end()));
      backward(saved.empty() ? 0 : 1);
      first.step();
      second.step();
      const auto parts = CheckpointParts().add(model, first).add(second);
      if (!saved.empty()) load(path, parts);
      auto states = optim::tensors_of(first.state_dict());
      states.merge(optim::tensors_of(second.state_dict()));
      if (!saved.empty()) return expect_equal(states, saved, "state");
      save(path, parts);
      if (rank() == 0) saved = states;
    });
  }
}

/// A checkpoint that the second optimizer refuses changes neither the first nor the model.
TEST(OptimizerStateLayoutOfSeveral, NothingChangesWhereOneRefuses) {
  const TempFolder folder;
  const std::string path = folder.file("saved");
  const auto run_two = [](const TensorLayout& layout, int steps, const auto& body) {
    run_model<PlainModel>(layout, [&](auto& model, const auto& backward) {
      const auto all = model->parameters();
      DistributedOptimizer<Factored> first(Tensors(all.begin(), all.begin() + 6));
      DistributedOptimizer<Undeclared> second(Tensors(all.begin() + 6, all.end()));
      for (int i = 0; i < steps; ++i) {
        backward(i);
        first.step();
        second.step();
      }
      body(model, first, CheckpointParts().add(model, first).add(second));
    });
  };
  run_two({1}, 2, [&](const auto&, auto& first, const CheckpointParts& parts) {
    first.param_groups()[0].options().set_lr(0.5);
    save(path, parts);
  });
  run_two({1}, 1, [&](const auto&, auto& first, const CheckpointParts& parts) {
    load(path, parts);  // states may have any shapes where nothing divides them
    EXPECT_EQ(first.param_groups()[0].options().get_lr(), 0.5);
  });
  run_two({2}, 1, [&](const auto& model, auto& first, const CheckpointParts& parts) {
    const Result before{to_map(model->state_dict()), first.state_dict()};
    expect_has(error_of<CheckpointError>([&] { load(path, parts); }),
               {"cannot divide the optimizer's state of parameter \"",
                "\"columns\" has an element for each of the parameter's, here sizes [",
                "Undeclared> (smp/optim/traits.h)"});
    const OptimizerState after = first.state_dict();
    EXPECT_EQ(optim::to_json(after), optim::to_json(before.state));
    expect_equal(optim::tensors_of(after), optim::tensors_of(before.state), "state");
    expect_equal(to_map(model->state_dict()), before.weights, "value");
  });
}

/// Ranges of a parameter's elements have whole tensors alike.
TEST(OptimizerStateLayoutOfPieces, WholeTensorsAreThoseOfAllPieces) {
  const auto start = first_state<Counted>();
  const auto expected = train_plain<Counted>({}, &start, 0, kFirst);
  const auto check = [&](const TensorLayout& layout, const Change& change) {
    const auto got = outcome<Counted>(
        layout,
        [&](auto& rank) {
          rank.optimizer.load_state_dict(start);
          rank.train(0);
          rank.optimizer.load_state_dict(rank.optimizer.local_state_dict(false));
          rank.optimizer.load_state_dict(rank.optimizer.local_state_dict(true));
          rank.optimizer.load_state_dict(rank.optimizer.state_dict());
          rank.train(1);
        },
        change);
    expect_as(got, expected);
  };
  for (const TensorLayout& layout : {TensorLayout{1, 1, 2}, {2, 1, 2}, {1, 1, 4}}) {
    check(layout, with_divided_states);
    check(layout, with_divided_parameters);
  }
  check({1, 2, 2}, with_divided_states);
}

/// A matrix of the parameter's sizes that is not elementwise keeps its order of memory.
TEST(OptimizerStateLayoutOfOneProcess, StridesAreThoseOfElementwiseTensorsOnly) {
  const Tensors parameters{torch::rand({kSquare, kSquare}).t().set_requires_grad(true)};
  parameters[0].mutable_grad() = torch::zeros_like(parameters[0]);
  const optim::ParameterNames names{{parameters[0].unsafeGetTensorImpl(), "weight"}};
  Counted optimizer(parameters);
  optimizer.step({});
  const auto set = [&](const OptimizerState& state) {
    optim::set_state(optimizer, state, names, optim::detail::make_param_state<FactoredState>,
                     optim::StateLayout<Counted>::fields());
    return optim::share_state(optimizer, names).params.at("weight").tensors;
  };
  const auto tensors = set(optim::get_state(optimizer, names));
  EXPECT_EQ(tensors.at("momentum").strides(), parameters[0].strides());
  EXPECT_EQ(tensors.at("shared").strides(), (std::vector<int64_t>{kSquare, 1}));
}

TEST(OptimizerStateLayoutErrors, NothingIsGuessed) {
  const auto joined = error_of<UsageError>([] {
    run<Undeclared>({2}, [](auto& rank) {
      rank.train(0);
      rank.optimizer.state_dict();
    });
  });
  expect_has(
      joined,
      {"cannot put the optimizer's state of parameter \"block0.up\" together: \"columns\" has "
       "an element for each of the parameter's, here sizes [16, 8], and is Double[8]. Say how "
       "it lies: specialise smp::optim::StateLayout<",
       "Undeclared> (smp/optim/traits.h)"});
  const auto cut = error_of<CheckpointError>([] {
    const auto whole = first_state<Undeclared>();
    run<Undeclared>({2}, [&](auto& rank) {
      rank.optimizer.load_state_dict(whole);
      rank.train(0);
    });
  });
  expect_has(cut,
             {"cannot divide the optimizer's state of parameter \"block0.up\": \"columns\" has an "
              "element for each of the parameter's, here sizes [32, 8], and is Double[8]",
              "Undeclared> (smp/optim/traits.h)"});
}

TEST(OptimizerStateLayoutErrors, TensorsThatLieOtherwise) {
  const auto text = error_of<CheckpointError>([] {
    auto whole = first_state<Factored>();
    whole.params.at("block0.up").tensors.at("rows") = torch::ones({4, 4});
    run<Factored>({2}, [&](auto& rank) {
      rank.optimizer.load_state_dict(whole);
      rank.train(0);
    });
  });
  expect_has(text,
             {"\"block0.up\": \"rows\" lies along dimensions [0] of it, here sizes [32], and is "
              "Float[4, 4]"});
  const auto lacking = error_of<CheckpointError>([] {
    auto whole = first_state<Factored>();
    whole.params.at("block0.up_bias").tensors["columns"] = torch::ones({4});
    run<Mistaken>({2}, [&](auto& rank) {
      rank.optimizer.load_state_dict(whole);
      rank.train(0);
    });
  });
  expect_has(lacking, {"\"block0.up_bias\": \"columns\" lies along dimensions [1] of it, of which "
                       "the parameter lacks one, and is Float[4]"});
  const auto scalar = error_of<UsageError>([] {
    run<Mistaken>({2}, [&](auto& rank) {
      rank.train(0);
      for (auto& [key, made] : rank.optimizer.state()) {
        static_cast<FactoredState&>(*made).count(torch::ones({3}));
      }
      rank.optimizer.state_dict();
    });
  });
  expect_has(scalar, {"\"count\" lies along dimensions [] of it, here sizes [], and is Float[3]"});
}

/// The text that all ranks are told by each of some calls of `state_dict()` after a step.
template <class Optimizer>
std::string error_of_all_ranks(const TensorLayout& layout, size_t calls,
                               const Change& change = unchanged) {
  std::vector<std::string> texts;
  std::mutex mutex;
  run<Optimizer>(
      layout,
      [&](auto& rank) {
        rank.train(0);
        for (size_t i = 0; i < calls; ++i) {
          const auto text = error_of<UsageError>([&] { rank.optimizer.state_dict(); });
          const std::lock_guard lock(mutex);
          texts.push_back(text.substr(text.find(']')));  // behind the rank's own number
        }
      },
      change);
  EXPECT_EQ(texts.size(), calls * layout.ranks());
  for (const auto& text : texts) EXPECT_EQ(text, texts.front());
  return texts.empty() ? "" : texts.front();
}

/// No rank waits for those of a stage whose states cannot be put together.
TEST(OptimizerStateLayoutErrors, ThoseOfOneStageReachAllRanks) {
  expect_has(error_of_all_ranks<Forgetful>({2, 2}, 2),
             {"cannot put the optimizer's state of parameter \"block1.",
              "has an element for each of the parameter's, here sizes [", "Forgetful>"});
}

/// Nor for those of ranks that put pieces of one part of a parameter together.
TEST(OptimizerStateLayoutErrors, ThoseOfOnePartReachAllRanks) {
  expect_has(error_of_all_ranks<MistakenInPart>({2, 1, 2}, 1, with_divided_states),
             {"together: \"shared\" differs between the ranks ",
              "MistakenInPart> says that ranks with these parts"});
}

TEST(OptimizerStateLayoutErrors, TensorsThatAreNotTheSame) {
  const auto text = error_of<UsageError>([] {
    run<Mistaken>({2}, [](auto& rank) {
      rank.train(0);
      rank.optimizer.state_dict();
    });
  });
  expect_has(text, {"cannot put the optimizer's state of parameter \"block0.",
                    "together: \"shared\" differs "
                    "between the ranks 0 and 1, and smp::optim::StateLayout<",
                    "Mistaken> says that ranks with these parts of the parameter have the same"});
}

TEST(OptimizerStateLayoutErrors, RangesHaveNoRows) {
  const auto error_with = [](const Change& change) {
    return error_of<UsageError>([&] {
      run<Factored>(
          {1, 1, 2}, [](auto&) {}, change);
    });
  };
  const std::string reason =
      "Factored keeps \"columns\" along dimensions of a parameter, and with ";
  const std::string rest = " each rank updates ranges of its elements, which have no dimensions";
  expect_has(error_with(with_divided_states), reason + "\"shard_optimizer_state\"" + rest);
  expect_has(error_with(with_divided_parameters),
             reason + "\"sharded_data_parallel_degree\"" + rest);
}

INSTANTIATE_TEST_SUITE_P(Layouts, OptimizerStateLayout,
                         ::testing::Values(TensorLayout{2}, TensorLayout{2, 2}, TensorLayout{4},
                                           TensorLayout{2, 1, 2}),
                         [](const auto& info) {
                           return c10::str("T", info.param.degree, "P", info.param.stages, "R",
                                           info.param.replicas);
                         });

}  // namespace
}  // namespace smp
