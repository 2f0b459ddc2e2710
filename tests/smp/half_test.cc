// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <filesystem>
#include <functional>
#include <mutex>
#include <string>

#include "checkpoint/reader.h"
#include "smp/optim/adadelta.h"
#include "smp/optim/lamb.h"
#include "smp/optim/novograd.h"
#include "tests/smp/models.h"
#include "tests/smp/recipe.h"

// The configuration's `fp16` and `bf16`: half-precision parameters, master weights, loss scales.
namespace smp {
namespace {

using namespace testing;
using namespace testing::precision;
namespace to = torch::optim;

void check(const Recipe& recipe, const std::vector<Layout>& all = layouts(), int skipped = 0) {
  torch::set_num_threads(1);
  const Trace plain = train_plain(recipe);
  EXPECT_EQ(count_skipped(plain), skipped);
  EXPECT_FALSE(plain.masters.empty());
  for (const auto& [name, weight] : plain.weights) {
    EXPECT_EQ(weight.scalar_type(), recipe.precision.type) << name;
  }
  for (const Layout& layout : all) {
    SCOPED_TRACE(::testing::Message() << layout << ", " << recipe.precision.type);
    expect_same(train_ranks(layout, recipe), plain);
  }
}

TEST(Half, TrainsAsInOneProcess) {
  check(recipe<to::AdamW>(kBf16, to::AdamWOptions(0.01)));
  check(recipe<to::AdamW>(kFp16, to::AdamWOptions(0.01)));
}

TEST(Half, TrainsWithAnyOptimizer) {
  const std::vector<Layout> some{{2, 2, "1f1b", true}, {2, 1}, {1, 2, "simple", false, 2}};
  check(recipe<to::SGD>(kBf16, to::SGDOptions(0.1)), some);
  check(recipe<to::SGD>(kBf16, to::SGDOptions(0.1).momentum(0.9)), some);
  // Makes its state in its constructor, of the parameters' type.
  check(recipe<to::Adagrad>(kBf16, to::AdagradOptions(0.1)), some);
  check(recipe<to::RMSprop>(kFp16, to::RMSpropOptions(0.01)), some);
  check(recipe<optim::Adadelta>(kBf16, optim::AdadeltaOptions(0.5)), some);
  // These take norms of whole parameters, and the first that of all gradients.
  const auto lamb = optim::LambOptions(0.02).max_grad_norm(0.01);
  check(recipe<optim::Lamb>(kBf16, lamb), some);
  check(recipe<optim::Lamb>(kFp16, lamb, LossScaleOptions().static_loss_scale(1024)), some);
  check(recipe<optim::NovoGrad>(kBf16, optim::NovoGradOptions(0.02)), some);
}

TEST(Half, ScalesTheLoss) {
  check(
      recipe<to::AdamW>(kFp16, to::AdamWOptions(0.01), LossScaleOptions().static_loss_scale(1024)));
  check(recipe<to::SGD>(kFp16, to::SGDOptions(0.1).momentum(0.9), lively()));
}

/// One microbatch of one replica overflows: no rank steps, and all divide the scale.
TEST(Half, SkipsStepsThatOverflowOnSomeRank) {
  check(recipe<to::AdamW>(kFp16, to::AdamWOptions(0.01), lively(), true), layouts(), 3);
  check(recipe<to::AdamW>(kBf16, to::AdamWOptions(0.01), lively(), true), layouts(), 3);
  // Overflows are looked for with fp16 in any case.
  check(recipe<to::SGD>(kFp16, to::SGDOptions(0.1), {}, true), {{2, 2}}, 3);
}

/// Held by a rank that seeds libtorch's generator, which all threads share, and makes a model.
std::mutex making;

/// Whatever `loop` does on two ranks of a pipeline, of bf16.
Named train_loop(const std::function<void(DistributedModel<Mlp>&, DistributedOptimizer<to::SGD>&,
                                          const std::function<void()>& train)>& loop,
                 const Config& config = stages(2).bf16(true)) {
  Named result;
  std::mutex mutex;
  torch::set_num_threads(1);
  run_as_threads(2, config, [&] {
    const Mlp net = [] {
      const std::lock_guard lock(making);
      torch::manual_seed(3);
      return Mlp(2);
    }();
    DistributedModel<Mlp> model(net);
    DistributedOptimizer<to::SGD> optimizer(model->parameters(), to::SGDOptions(0.1));
    auto train = step([&](torch::Tensor x) {
      auto loss = model(x).square().mean();
      EXPECT_EQ(loss.scalar_type(), torch::kFloat);
      model->backward(loss);
      return loss;
    });
    loop(model, optimizer, [&] {
      optimizer.zero_grad();
      train(torch::ones({4, MlpImpl::kWidth}));
    });
    const auto state = to_map(model->state_dict());
    const std::lock_guard lock(mutex);
    result = state;
  });
  return result;
}

/// In all layouts by the norm over all ranks; -1 where some gradient is not finite.
TEST(Half, ClipsMasterGradients) {
  for (const double norm_type : {2.0, HUGE_VAL}) {
    auto clipped = recipe<to::AdamW>(kFp16, to::AdamWOptions(0.01), lively(), true);
    clipped.max_norm = 0.01;
    clipped.norm_type = norm_type;
    check(clipped, layouts(), 3);
  }
}

/// Half of the steps in one layout, a checkpoint, and the rest in another.
TEST(Half, GoesThroughCheckpoints) {
  torch::set_num_threads(1);
  const auto path = std::filesystem::path(::testing::TempDir()) / "half_checkpoint";
  const auto training = recipe<to::AdamW>(kFp16, to::AdamWOptions(0.01), lively(), true);
  const Trace plain = train_plain(training);
  const std::vector<Layout> all{{1, 1},
                                {4, 1, "1f1b"},
                                {2, 2, "1f1b", true},
                                {1, 2, "interleaved", true},
                                {1, 2, "simple", false, 2}};
  for (size_t i = 0; i < all.size(); ++i) {
    const Layout& from = all[i];
    const Layout& to = all[(i + 1) % all.size()];
    SCOPED_TRACE(::testing::Message() << from << " to " << to);
    const Trace first = train_ranks(from, training, {0, kHalfWay, "", path});
    const Trace second = train_ranks(to, training, {kHalfWay, kSteps, path, ""});
    expect_same(joined(first, second), plain);
  }
}

/// The change that bfloat16 would lose: a 512th of the last digit, 512 times. Adagrad makes its
/// sums when it is made, of the parameters that there are. Steps that overflow make no masters.
TEST(Half, StatesAreOfMastersBeforeThereAreAny) {
  const auto path = ::testing::TempDir() + "half_states";
  for (const bool sharded : {false, true}) {
    train_ranks(sharded ? Layout{1, 2, "simple", true} : Layout{1, 1},
                recipe<torch::optim::Adagrad>(kFp16, torch::optim::AdagradOptions(0.1),
                                              dynamic(DynamicLossArgs().init_scale(1e30))),
                {0, 1, "", path});
    const auto index = checkpoint::Reader(path).index();
    EXPECT_EQ(index.optimizer_tensors.at("head.weight/sum").spec.dtype, at::kFloat) << sharded;
  }
}

TEST(Half, AddsUpSmallUpdates) {
  const auto state = train_loop([](auto& model, auto& optimizer, const auto& train) {
    train();
    {
      torch::NoGradGuard no_grad;
      for (auto& parameter : model->local_parameters()) parameter.fill_(1);
    }
    optimizer.reload_model_params();
    const double last_digit = 1.0 / 128;
    for (int i = 0; i < 512; ++i) {
      for (auto& parameter : model->local_parameters()) {
        parameter.mutable_grad() = torch::full(parameter.sizes(), -last_digit / 512 / 0.1);
      }
      optimizer.step();
    }
  });
  for (const auto& [name, tensor] : state) {
    expect_equal(tensor, torch::full_like(tensor, 1 + 1.0 / 128), name);
  }
}

TEST(Half, MastersFollowWhatIsLoaded) {
  const auto ones = [](const DistributedModel<Mlp>& model) {
    ModelCore::TensorDict state;
    for (const auto& item : model->named_parameters()) {
      state.insert(item.key(), torch::ones(item.value().sizes()));  // tensors of float32
    }
    return state;
  };
  const auto expected = train_loop([&](auto& model, auto& optimizer, const auto& train) {
    model->load_state_dict(ones(model));
    train();
    optimizer.step();
  });
  const auto loaded = train_loop([&](auto& model, auto& optimizer, const auto& train) {
    for (int i = 0; i < 2; ++i) {
      train();
      optimizer.step();
    }
    model->load_state_dict(ones(model));
    train();
    optimizer.step();
  });
  expect_equal(loaded, expected, "weight");
  // Weights that the program writes itself, it announces.
  const auto written = train_loop([&](auto& model, auto& optimizer, const auto& train) {
    train();
    optimizer.step();
    {
      torch::NoGradGuard no_grad;
      for (auto& parameter : model->local_parameters()) parameter.fill_(1);
    }
    optimizer.reload_model_params();
    train();
    optimizer.step();
  });
  expect_equal(written, expected, "weight");
}

/// Back to an earlier step, with the optimizer first or last: masters are not rounded.
TEST(Half, LoadsModelAndOptimizerInAnyOrder) {
  std::vector<Named> ends;
  for (const int order : {0, 1, 2}) {
    const auto train_steps = [](auto& optimizer, const auto& train, int count) {
      for (int i = 0; i < count; ++i) {
        train();
        optimizer.step();
      }
    };
    ends.push_back(train_loop([&](auto& model, auto& optimizer, const auto& train) {
      train_steps(optimizer, train, 3);
      const auto weights = model->state_dict();
      const auto state = optimizer.state_dict();
      if (order > 0) train_steps(optimizer, train, 2);
      if (order == 1) model->load_state_dict(weights);
      if (order > 0) optimizer.load_state_dict(state);
      if (order == 2) model->load_state_dict(weights);
      train_steps(optimizer, train, 20);
    }));
  }
  expect_equal(ends[1], ends[0], "model first");
  expect_equal(ends[2], ends[0], "optimizer first");
}

/// Integer buffers and arguments stay; the module's results are of float32.
TEST(Half, ConvertsFloatingPointOnly) {
  struct CounterImpl : torch::nn::Module {
    CounterImpl() {
      weight = register_parameter("weight", torch::ones({3}, torch::kDouble));
      count = register_buffer("count", torch::zeros({3}, torch::kLong));
    }
    std::pair<torch::Tensor, torch::Tensor> forward(torch::Tensor x, torch::Tensor index) {
      EXPECT_EQ(x.scalar_type(), torch::kHalf);
      EXPECT_EQ(index.scalar_type(), torch::kLong);
      return {weight * x, index + count};
    }
    torch::Tensor weight, count;
  };
  run_as_threads(1, stages(1).fp16(true), [] {
    DistributedModel<std::shared_ptr<CounterImpl>> model(std::make_shared<CounterImpl>());
    const auto& module = *model.get_module();
    EXPECT_EQ(module.weight.scalar_type(), torch::kHalf);
    EXPECT_EQ(module.count.scalar_type(), torch::kLong);
    auto train = step([&](torch::Tensor x, torch::Tensor index) {
      const auto [scaled, sum] = model(x, index);
      EXPECT_EQ(scaled.scalar_type(), torch::kFloat);
      EXPECT_EQ(sum.scalar_type(), torch::kLong);
      model->backward(scaled.sum());
      return scaled;
    });
    const auto result = train(torch::full({2, 3}, 0.1), torch::arange(2));
    EXPECT_TRUE(torch::equal(result.outputs()[0],
                             torch::full({1, 3}, 0.1).to(torch::kHalf).to(torch::kFloat)));
  });
}

/// A GPT with tied embeddings, in each way to make it in half precision: converted when it is
/// wrapped, made without data first, and made of that type.
TEST(Half, MakesModelsOfThatType) {
  torch::set_num_threads(1);
  const auto batch = [] {
    torch::manual_seed(4);
    return TinyGptImpl::batch(8);
  }();
  const auto train = [&](int ranks, const std::function<TinyGpt()>& make, torch::Dtype type) {
    Named result;
    std::mutex mutex;
    run_as_threads(ranks, stages(ranks).bf16(true), [&] {
      TinyGpt net = make();
      DistributedModel<TinyGpt> model(net);
      DistributedOptimizer<to::AdamW> optimizer(model->parameters(), to::AdamWOptions(0.01));
      auto train = step([&](torch::Tensor ids, torch::Tensor targets) {
        auto loss =
            torch::nn::functional::cross_entropy(model(ids).flatten(0, 1), targets.flatten());
        model->backward(loss);
        return loss;
      });
      for (int i = 0; i < 3; ++i) {
        optimizer.zero_grad();
        train(batch[0], batch[1]);
        optimizer.step();
      }
      const auto state = to_map(model->state_dict());
      const std::lock_guard lock(mutex);
      result = state;
    });
    for (const auto& [name, tensor] : result) EXPECT_EQ(tensor.scalar_type(), type) << name;
    return result;
  };
  const auto plain = [] {
    const std::lock_guard lock(making);
    torch::manual_seed(5);
    return TinyGpt(true);
  };
  const auto without_data = [&] {
    const auto scope = model_creation(ModelCreationOptions().eager_bytes(0));
    return plain();
  };
  const auto of_type = [&] {
    const auto scope =
        model_creation(ModelCreationOptions().dtype(torch::kBFloat16).delayed(false));
    return plain();
  };
  const auto of_type_without_data = [&] {
    const auto scope =
        model_creation(ModelCreationOptions().dtype(torch::kBFloat16).eager_bytes(0));
    return plain();
  };
  const auto converted = train(1, plain, torch::kBFloat16);
  expect_equal(train(2, plain, torch::kBFloat16), converted, "converted");
  expect_equal(train(2, without_data, torch::kBFloat16), converted, "without data");
  const auto made = train(1, of_type, torch::kBFloat16);
  expect_equal(train(2, of_type_without_data, torch::kBFloat16), made, "of that type");
  EXPECT_FALSE(torch::equal(made.at("tokens.weight"), converted.at("tokens.weight")));
}

/// The error that ends a program on two ranks.
std::string error_of_loop(
    const std::function<void(DistributedModel<Mlp>&, DistributedOptimizer<to::SGD>&,
                             const std::function<void()>& train)>& loop) {
  return error_of<UsageError>([&] { train_loop(loop, stages(2).fp16(true)); });
}

TEST(HalfErrors, OneOptimizerScalesTheLoss) {
  const char* text = "the loss is multiplied by the loss scale of another DistributedOptimizer";
  expect_has(error_of_loop([](auto& model, auto& optimizer, const auto&) {
               optimizer.scale_loss(LossScaleOptions().static_loss_scale(8));
               DistributedOptimizer<to::SGD> other(model->parameters(), to::SGDOptions(0.1));
               other.scale_loss(LossScaleOptions().static_loss_scale(8));
             }),
             {text, "For several optimizers use smp::amp::GradScaler"});
  expect_has(error_of_loop([](auto& model, auto& optimizer, const auto& train) {
               optimizer.scale_loss(LossScaleOptions().static_loss_scale(8));
               DistributedOptimizer<to::SGD> other(model->parameters(), to::SGDOptions(0.1));
               train();
               other.step();
             }),
             {text});
}

TEST(HalfErrors, ClosuresAndLossScaling) {
  expect_has(error_of_loop([](auto&, auto& optimizer, const auto& train) {
               optimizer.step([&] {
                 train();
                 return torch::Tensor();
               });
             }),
             {"optimizer.step(closure) cannot be combined with loss scaling or \"fp16\""});
}

TEST(HalfErrors, StepsAfterClipping) {
  for (const bool dropped : {false, true}) {
    expect_has(error_of_loop([&](auto& model, auto& optimizer, const auto& train) {
                 optimizer.scale_loss(LossScaleOptions().static_loss_scale(8));
                 train();
                 optimizer.clip_master_grads(1);
                 if (dropped) static_cast<torch::optim::Optimizer&>(optimizer).zero_grad();
                 auto more = step([&](torch::Tensor x) {
                   auto loss = model(x).sum();
                   model->backward(loss);
                   return loss;
                 });
                 more(torch::ones({4, MlpImpl::kWidth}));
                 optimizer.step();
               }),
               {"clip_master_grads() has divided the gradients by the loss scale, and a step has "
                "added gradients that are not divided",
                "(not that of torch::optim::Optimizer, which knows no scale)"});
  }
}

TEST(HalfErrors, ScaleLossInsideTheStep) {
  expect_has(
      error_of_run<UsageError>(1, stages(1),
                               [] {
                                 Mlp net(1);
                                 DistributedModel<Mlp> model(net);
                                 DistributedOptimizer<to::SGD> optimizer(model->parameters(),
                                                                         to::SGDOptions(0.1));
                                 auto train = step([&](torch::Tensor x) {
                                   optimizer.scale_loss(LossScaleOptions().static_loss_scale(8));
                                   return model(x);
                                 });
                                 train(torch::ones({2, MlpImpl::kWidth}));
                               }),
      {"optimizer.scale_loss() was called inside a step function; call it before the"});
}

}  // namespace
}  // namespace smp
