// SPDX-License-Identifier: Apache-2.0
// The results and arguments of `DistributedModel` around steps.

#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "graph/absent.h"
#include "tests/smp/api.h"
#include "tests/smp/models.h"

namespace smp::testing {
namespace {

using Model = ApiTest;

TEST_F(Model, OnOneRankCanBeCalledOutsideAStep) {
  run_as_threads(1, stages(1), [&] {
    Mlp net = make_net();
    DistributedModel<Mlp> model(net);
    expect_equal(model(x_), net(x_), "before the first step");
    make_training(model)(x_, y_);
    expect_equal(model(x_), net(x_), "after it");
  });
}

TEST_F(Model, CallsOfADividedModelOutsideAStepAreRefused) {
  run_as_threads(2, stages(2), [&] {
    DistributedModel<Mlp> model(make_net());
    const auto call = error_of<UsageError>([&] { model(x_); });
    expect_has(call,
               {"a DistributedModel was called outside a step function: its parameters lie on "
                "several ranks. Call it inside smp::step("});
    const auto backward = error_of<UsageError>([&] { model->backward(torch::ones({})); });
    expect_has(backward, {"model->backward was called outside a step function. Call it inside: ",
                          "smp::step("});
    const auto train = make_training(model);
    (void)train;
    EXPECT_FALSE(model->partitioned());
  });
}

TEST_F(Model, WrappingTwiceOrNothingIsRefused) {
  run_as_threads(1, stages(1), [&] {
    Mlp net = make_net();
    DistributedModel<Mlp> model(net);
    expect_has(error_of<UsageError>([&] { DistributedModel<Mlp> again(net); }),
               {"wrapped", "already"});
    expect_has(error_of<UsageError>([] { DistributedModel<Mlp> none{Mlp(nullptr)}; }),
               {"empty", "DistributedModel"});
    expect_has(
        error_of<UsageError>([] { DistributedModel<std::shared_ptr<MlpImpl>> none{nullptr}; }),
        {"empty", "DistributedModel"});
  });
}

TEST_F(Model, MayBeASharedPointer) {
  run_as_threads(2, stages(2), [&] {
    DistributedModel<std::shared_ptr<MlpImpl>> model(make_net().ptr());
    auto train = make_training(model);
    expect_equal(train(x_, y_).outputs(), plain_losses(prototype_), "loss");
  });
}

TEST_F(Model, MadeAfterTheFirstStepIsRefused) {
  run_as_threads(2, stages(2), [&] {
    DistributedModel<Mlp> model(make_net());
    auto train = make_training(model);
    train(x_, y_);
    expect_has(error_of<UsageError>([&] { DistributedModel<Mlp> late(make_net()); }),
               {"a DistributedModel was made after the first step, when the models had been "
                "divided among the ranks; make all models before"});
  });
}

TEST_F(Model, LocalPartIsUnknownBeforeTheFirstStep) {
  run_as_threads(2, stages(2), [&] {
    DistributedModel<Mlp> model(make_net());
    for (const auto& query : std::vector<std::function<void()>>{
             [&] { model->local_parameters(); }, [&] { model->local_named_parameters(); },
             [&] { model->local_buffers(); }, [&] { model->local_state_dict(); }}) {
      expect_has(
          error_of<UsageError>(query),
          {"local parameters and buffers are known after the first step, which partitions the "
           "model; use register_post_partition_hook to be called as soon as they are"});
    }
    EXPECT_FALSE(model->partitioned());
    EXPECT_EQ(model->partition_report(), "");
    EXPECT_EQ(model->parameters().size(), 12u);
  });
}

TEST_F(Model, ClashingNamesNeedAName) {
  run_as_threads(2, stages(2), [&] {
    DistributedModel<Mlp> first(make_net());
    expect_has(error_of<c10::Error>([&] { DistributedModel<Mlp> second(make_net()); }),
               {"in.weight", "name"});
  });
  run_as_threads(2, stages(2), [&] {
    DistributedModel<Mlp> first(make_net(), ModelOptions().name("first"));
    DistributedModel<Mlp> second(make_net(), ModelOptions().name("second"));
    auto train = step([&](torch::Tensor x, torch::Tensor y) {
      auto loss = torch::mse_loss(first(x) + second(x), y);
      first->backward(loss);
      return loss;
    });
    const auto loss = train(x_, y_).outputs()[0];
    expect_equal(loss, torch::mse_loss(2 * prototype_(part(x_, 2, 0)), part(y_, 2, 0)).detach(),
                 "loss of two models");
    // The plain module's names, so that its values load there.
    EXPECT_TRUE(second->state_dict().contains("in.weight"));
  });
}

TEST_F(Model, LocalParametersCoverAllOnceAndTheOthersHoldNoData) {
  for (int count : {1, 2, 3}) {
    std::map<std::string, int> owners;
    int empty = 0;
    run_as_threads(count, stages(count), [&] {
      DistributedModel<Mlp> model(make_net());
      std::map<std::string, std::vector<int64_t>> sizes, strides;
      Named before = to_map(model->named_parameters());
      for (const auto& [name, tensor] : before) {
        sizes[name] = tensor.sizes().vec();
        strides[name] = tensor.strides().vec();
      }
      auto train = make_training(model);
      train(x_, y_);
      EXPECT_TRUE(model->partitioned());
      const auto local = to_map(model->local_named_parameters());
      EXPECT_EQ(model->local_parameters().size(), local.size());
      EXPECT_EQ(model->parameters().size(), before.size());
      for (const auto& item : model->named_parameters()) {
        const auto& name = item.key();
        const auto& tensor = item.value();
        EXPECT_TRUE(tensor.is_same(before.at(name))) << name;
        EXPECT_EQ(tensor.sizes().vec(), sizes.at(name)) << name;
        EXPECT_EQ(tensor.strides().vec(), strides.at(name)) << name;
        EXPECT_TRUE(tensor.requires_grad()) << name;
        const bool mine = local.count(name) == 1;
        EXPECT_EQ(tensor.storage().nbytes() > 0, mine) << name;
        EXPECT_TRUE(tensor.grad().defined()) << name;
        EXPECT_EQ(graph::is_absent(tensor), !mine) << name;
        EXPECT_EQ(graph::is_absent(tensor.grad()), !mine) << name;
      }
      EXPECT_TRUE(model.get_module()->head->weight.is_same(before.at("head.weight")));
      EXPECT_EQ(model.get_module()->head->weight.size(1), MlpImpl::kWidth);
      const std::lock_guard<std::mutex> lock(mutex_);
      empty += local.empty();
      for (const auto& [name, tensor] : local) ++owners[name];
    });
    EXPECT_EQ(owners.size(), 12u) << count;
    for (const auto& [name, times] : owners) EXPECT_EQ(times, 1) << name;
    EXPECT_EQ(empty, 0) << count;
  }
}

TEST_F(Model, TiedParameterIsListedOnceAndNamedTwice) {
  torch::manual_seed(5);
  TinyGpt prototype(true, 2);
  const auto batch = TinyGptImpl::batch(4);
  std::set<std::string> owned;
  size_t local = 0;
  run_as_threads(2, stages(2), [&] {
    TinyGpt net(true, 2);
    copy_values(*prototype, *net);
    DistributedModel<TinyGpt> model(net);
    EXPECT_EQ(model->parameters().size() + 1, model->named_parameters().size());
    auto train = step([&](torch::Tensor ids, torch::Tensor targets) {
      auto loss = torch::nn::functional::cross_entropy(model(ids).flatten(0, 1), targets.flatten());
      model->backward(loss);
      return loss;
    });
    train(batch[0], batch[1]);
    const std::lock_guard<std::mutex> lock(mutex_);
    local += model->local_parameters().size();
    for (const auto& item : model->local_named_parameters()) {
      EXPECT_TRUE(owned.insert(item.key()).second) << item.key();
    }
  });
  EXPECT_EQ(owned, [&] {
    std::set<std::string> names;
    for (const auto& item : prototype->named_parameters()) names.insert(item.key());
    return names;
  }());
  EXPECT_EQ(local + 1, owned.size());
}

TEST_F(Model, LocalModulesAreThoseWithLocalParameters) {
  for (int count : {1, 2}) {
    std::map<std::string, int> owners;
    run_as_threads(count, stages(count), [&] {
      DistributedModel<Mlp> model(make_net());
      expect_has(error_of<UsageError>([&] { model->local_modules(); }),
                 {"local parameters and buffers are known after the first step"});
      make_training(model)(x_, y_);
      const auto local = to_map(model->local_named_parameters());
      const auto modules = model->local_named_modules();
      EXPECT_EQ(model->local_modules().size(), modules.size());
      for (const auto& item : model.get_module()->named_modules()) {
        const bool mine =
            local.count(item.key() + ".weight") + local.count(item.key() + ".bias") > 0;
        EXPECT_EQ(modules.contains(item.key()), mine) << item.key();
        if (mine) {
          EXPECT_EQ(modules[item.key()], item.value());
        }
      }
      const std::lock_guard<std::mutex> lock(mutex_);
      for (const auto& item : modules) ++owners[item.key()];
    });
    EXPECT_EQ(owners.size(), 6u) << count;
  }
}

TEST_F(Model, PostPartitionHookRunsOnceBeforeTheFirstMicrobatch) {
  Mlp scaled = make_net();
  {
    torch::NoGradGuard no_grad;
    for (auto& parameter : scaled->parameters()) parameter.mul_(0.5);
  }
  run_as_threads(2, stages(2), [&] {
    DistributedModel<Mlp> model(make_net());
    int calls = 0, removed_calls = 0;
    model->register_post_partition_hook([&] {
      ++calls;
      EXPECT_TRUE(model->partitioned());
      torch::NoGradGuard no_grad;
      for (auto& parameter : model->local_parameters()) parameter.mul_(0.5);
    });
    auto removed = model->register_post_partition_hook([&] { ++removed_calls; });
    removed.remove();
    removed.remove();
    auto train = make_training(model);
    expect_equal(train(x_, y_).outputs(), plain_losses(scaled), "first step after the hook");
    train(x_, y_);
    EXPECT_EQ(calls, 1);
    EXPECT_EQ(removed_calls, 0);
    int late = 0;
    model->register_post_partition_hook([&] { ++late; });
    EXPECT_EQ(late, 1);
    train(x_, y_);
    EXPECT_EQ(late, 1);
  });
}

TEST_F(Model, PostStepHookRunsAfterStepsThatTrain) {
  run_as_threads(2, stages(2), [&] {
    DistributedModel<Mlp> model(make_net());
    int calls = 0;
    bool had_gradients = false;
    auto handle = model->register_post_step_hook([&] {
      ++calls;
      had_gradients = model->local_parameters()[0].grad().defined();
    });
    auto train = make_training(model);
    auto evaluate = step([&](torch::Tensor x) { return model(x); });
    train(x_, y_);
    EXPECT_EQ(calls, 1);
    EXPECT_TRUE(had_gradients);
    evaluate(x_);
    EXPECT_EQ(calls, 1);
    train(x_, y_);
    EXPECT_EQ(calls, 2);
    handle.remove();
    handle.remove();
    train(x_, y_);
    EXPECT_EQ(calls, 2);
  });
}

TEST_F(Model, RemovingThroughACopyOfTheHandleIsHarmless) {
  run_as_threads(1, stages(1), [&] {
    DistributedModel<Mlp> model(make_net());
    int first = 0, second = 0;
    auto handle = model->register_post_step_hook([&] { ++first; });
    auto copy = handle;
    copy.remove();
    model->register_post_step_hook([&] { ++second; });
    handle.remove();
    auto train = make_training(model);
    train(x_, y_);
    EXPECT_EQ(first, 0);
    EXPECT_EQ(second, 1);
  });
}

TEST_F(Model, MovingItBeforeTheFirstStepIsIgnored) {
  run_as_threads(2, stages(2), [&] {
    DistributedModel<Mlp> model(make_net());
    model->to(torch::kMeta);
    for (const auto& parameter : model->parameters()) EXPECT_TRUE(parameter.is_cpu());
    expect_equal(make_training(model)(x_, y_).outputs(), plain_losses(prototype_), "loss");
  });
}

TEST_F(Model, TrainAndEvalReachTheModule) {
  run_as_threads(1, stages(1), [&] {
    DistributedModel<Mlp> model(make_net());
    EXPECT_TRUE(model->is_training());
    model->eval();
    EXPECT_FALSE(model->is_training());
    EXPECT_FALSE(model.get_module()->drop->is_training());
    model->train();
    EXPECT_TRUE(model.get_module()->drop->is_training());
    model->train(false);
    EXPECT_FALSE(model->is_training());
  });
}

TEST_F(Model, PartitionReportTellsWhoGotWhat) {
  std::map<int, std::string> reports;
  run_as_threads(2, stages(2), [&] {
    DistributedModel<Mlp> model(make_net());
    auto train = make_training(model);
    train(x_, y_);
    const std::lock_guard<std::mutex> lock(mutex_);
    reports[rank()] = model->partition_report();
  });
  EXPECT_EQ(reports[0].rfind("Partition assignments:", 0), 0u) << reports[0];
  expect_has(reports[0], {"in", "head", "hidden0", "hidden3"});
  EXPECT_EQ(reports[0], reports[1]);
}

TEST_F(Model, CaptureIsInvisibleAndTracingIsVisible) {
  run_as_threads(1, stages(1), [&] {
    DistributedModel<Mlp> model(make_net());
    EXPECT_FALSE(is_tracing());
    std::vector<bool> tracing;
    auto train = step([&](torch::Tensor x, torch::Tensor y) {
      tracing.push_back(is_tracing());
      auto loss = torch::mse_loss(model(x), y);
      model->backward(loss);
      return loss;
    });
    torch::manual_seed(77);
    const auto expected = torch::rand({3});
    torch::manual_seed(77);
    train(x_, y_);
    expect_equal(torch::rand({3}), expected, "the default generator after a capture");
    train(x_, y_);
    EXPECT_EQ(tracing, (std::vector<bool>{true, false}));
    EXPECT_FALSE(is_tracing());
  });
}

TEST_F(Model, ZeroGradMakesGradientsUndefined) {
  run_as_threads(2, stages(2), [&] {
    DistributedModel<Mlp> model(make_net());
    auto train = make_training(model);
    train(x_, y_);
    const auto once = model->local_parameters()[0].grad().clone();
    train(x_, y_);
    expect_equal(model->local_parameters()[0].grad(), once + once, "gradients add up");
    model->zero_grad();
    for (const auto& parameter : model->parameters()) EXPECT_FALSE(parameter.grad().defined());
    train(x_, y_);
    expect_equal(model->local_parameters()[0].grad(), once, "after zero_grad");
  });
}

TEST_F(Model, CpuGathersTheModelAndTrainingGoesOn) {
  run_as_threads(2, stages(2), [&] {
    DistributedModel<Mlp> model(make_net());
    DistributedOptimizer<torch::optim::SGD> optimizer(model->parameters(),
                                                      torch::optim::SGDOptions(0.1));
    auto train = make_training(model);
    for (int i = 0; i < 2; ++i) {
      optimizer.zero_grad();
      train(x_, y_);
      optimizer.step();
      model->cpu();
      const auto state = to_map(model->state_dict());
      expect_equal(state_of(*model.get_module()), state, "gathered value");
      // The plain module computes the losses of the next step.
      const auto expected = plain_losses(model.get_module());
      expect_equal(train(x_, y_).outputs(), expected, "loss of the gathered model");
    }
  });
}

/// Stages keep the tensor that stands for a parameter in a microbatch; it must have the current
/// data.
TEST_F(Model, ParametersMayBeGivenOtherMemoryBetweenSteps) {
  run_as_threads(1, stages(1), [&] {
    DistributedModel<Mlp> model(make_net());
    auto train = make_training(model);
    train(x_, y_);
    for (int i = 0; i < 2; ++i) {
      for (auto& parameter : model->parameters()) parameter.set_data(parameter.detach() * 1.5);
      const auto expected = plain_losses(model.get_module());
      expect_equal(train(x_, y_).outputs(), expected, "loss of the new weights");
    }
  });
}

TEST_F(Model, GradientsMayBeSumsOverMicrobatches) {
  std::map<bool, Named> gradients;
  for (const bool average : {true, false}) {
    run_as_threads(2, stages(2), [&] {
      DistributedModel<Mlp> model(make_net(),
                                  ModelOptions().average_grads_across_microbatches(average));
      auto train = make_training(model);
      train(x_, y_);
      const std::lock_guard<std::mutex> lock(mutex_);
      for (const auto& item : model->local_named_parameters()) {
        gradients[average][item.key()] = item.value().grad().clone();
      }
    });
  }
  ASSERT_EQ(gradients[true].size(), 12u);
  for (auto& [name, gradient] : gradients[true]) gradient = gradient * 2;  // exact
  expect_equal(gradients[false], gradients[true], "summed gradient");
}

}  // namespace
}  // namespace smp::testing
