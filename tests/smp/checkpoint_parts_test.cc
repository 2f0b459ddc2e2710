// SPDX-License-Identifier: Apache-2.0
// Checkpoints of programs with several models and optimizers: smp::CheckpointParts.

#include <gmock/gmock.h>

#include <cstdlib>
#include <memory>
#include <mutex>
#include <optional>

#include "checkpoint/reader.h"
#include "core/config_file.h"
#include "core/restart.h"
#include "tests/smp/oracle.h"
#include "tests/temp_folder.h"

namespace smp::testing {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr int kSteps = 6, kSavedAfter = 3;

auto critic_step(const DistributedModel<Mlp>& generator, const DistributedModel<Mlp>& critic) {
  return step([generator, critic](torch::Tensor real, torch::Tensor noise) {
    auto loss = torch::softplus(-critic(real)).mean() +
                torch::softplus(critic(generator(noise).detach())).mean();
    critic->backward(loss);
    return loss;
  });
}

auto generator_step(const DistributedModel<Mlp>& generator, const DistributedModel<Mlp>& critic) {
  return step([generator, critic](torch::Tensor noise) {
    auto loss = torch::softplus(-critic(generator(noise))).mean();
    generator->backward(loss);
    return loss;
  });
}

/// A rank of a GAN: two models with an optimizer each, an average of one, and tensors of its own
/// that follow the other.
struct Gan {
  using TensorDict = torch::OrderedDict<std::string, torch::Tensor>;

  static Mlp make(int64_t seed, int64_t inputs) {
    static std::mutex mutex;  // rank threads share the default generator
    const std::lock_guard<std::mutex> lock(mutex);
    torch::manual_seed(seed);
    return Mlp(2, /*dropout=*/0.25, inputs);
  }

  /// Begins with the weights of that seed.
  explicit Gan(int64_t seed)
      : generator(make(seed, MlpImpl::kWidth), ModelOptions().name("generator")),
        critic(make(seed + 1, 1), ModelOptions().name("critic")),
        generator_optimizer(generator->parameters(), 0.01),
        critic_optimizer(critic->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9)),
        ema(generator, EmaOptions().decay(0.5)) {
    register_checkpoint_tensors(
        "slow", critic, [this] { return slow; }, [this](const auto& saved) { slow = saved; });
  }

  void train_step(int number) {
    torch::Tensor real, noise;
    {
      static std::mutex mutex;
      const std::lock_guard<std::mutex> lock(mutex);
      torch::manual_seed(100 + number);
      real = torch::randn({8, 1});
      noise = torch::randn({8, MlpImpl::kWidth});
    }
    critic_optimizer.zero_grad();
    train_critic(shard(real), shard(noise));
    critic_optimizer.step();
    generator_optimizer.zero_grad();
    train_generator(shard(noise));
    generator_optimizer.step();
    ema.update();
    follow();
  }

  CheckpointParts parts() const {
    return CheckpointParts().add(generator, generator_optimizer).add(critic, critic_optimizer);
  }

  /// All that it has learned. Collective.
  Named everything() {
    Named all;
    for (const auto& [name, tensor] : to_map(generator->state_dict())) all["g." + name] = tensor;
    for (const auto& [name, tensor] : to_map(critic->state_dict())) all["c." + name] = tensor;
    for (const OptimizerCore* optimizer : {static_cast<const OptimizerCore*>(&generator_optimizer),
                                           static_cast<const OptimizerCore*>(&critic_optimizer)}) {
      for (const auto& [name, param] : optimizer->state_dict().params) {
        for (const auto& [field, tensor] : param.tensors) all[name + "/" + field] = tensor;
      }
    }
    for (const auto& part : allgather(to_map(slow), CommGroup::kMp)) {
      for (const auto& [name, tensor] : part) all["slow." + name] = tensor;
    }
    const auto averaged = ema.averaged();
    for (const auto& [name, tensor] : to_map(generator->state_dict())) all["ema." + name] = tensor;
    return all;
  }

  DistributedModel<Mlp> generator, critic;
  DistributedOptimizer<torch::optim::Adam> generator_optimizer;
  DistributedOptimizer<torch::optim::SGD> critic_optimizer;
  Ema ema;
  TensorDict slow;  // follows the critic's parameters that this rank owns

 private:
  void follow() {
    const torch::NoGradGuard no_grad;
    for (const auto& item : critic->local_named_parameters()) {
      const auto& value = item.value();
      if (slow.contains(item.key())) {
        slow[item.key()].mul_(0.5).add_(value);
      } else {
        slow.insert(item.key(), value.clone());
      }
    }
  }

  decltype(critic_step(generator, critic)) train_critic = critic_step(generator, critic);
  decltype(generator_step(generator, critic)) train_generator = generator_step(generator, critic);
};

struct Layout {
  std::string name;
  int ranks;
  Config config;
};

Config cut(int64_t stages, int64_t microbatches) {
  return testing::stages(stages).microbatches(microbatches).gradient_shards(2);
}

const Layout kAlone{"Alone", 1, cut(1, 4)}, kStages{"Stages", 2, cut(2, 4)},
    kBoth{"StagesAndReplicas", 4, cut(2, 2).ddp(true)},
    kDividedState{"DividedState", 4, cut(2, 2).ddp(true).shard_optimizer_state(true)};

class CheckpointPartsTest : public ::testing::Test {
 protected:
  CheckpointPartsTest() { torch::set_num_threads(1); }

  /// Runs a GAN and returns its final state, as rank 0 sees it.
  static Named run(const Layout& layout, int64_t seed, const std::function<void(Gan&)>& program) {
    Named result;
    run_as_threads(layout.ranks, layout.config, [&] {
      Gan gan(seed);
      program(gan);
      const auto all = gan.everything();
      if (rank() == 0) result = all;
    });
    return result;
  }
  static Named whole_run() {
    return run(kAlone, 5, [](Gan& gan) {
      for (int i = 0; i < kSteps; ++i) gan.train_step(i);
    });
  }

  TempFolder folder_;
};

/// The oracle is the run that nothing interrupted.
TEST_F(CheckpointPartsTest, AGanContinuesBitForBitInAnyLayout) {
  const Named expected = whole_run();
  for (const auto& [saving, loading] :
       {std::pair{kStages, kStages}, std::pair{kStages, kAlone}, std::pair{kAlone, kBoth},
        std::pair{kDividedState, kStages}, std::pair{kStages, kDividedState}}) {
    const auto path = folder_.file(saving.name + loading.name);
    run(saving, 5, [&](Gan& gan) {
      const auto resumed =
          resume_from_checkpoint(path, std::nullopt, gan.parts(), LoadOptions().begin_anew(true));
      EXPECT_FALSE(resumed.found);
      for (int i = 0; i < kSavedAfter; ++i) gan.train_step(i);
      save_checkpoint(path, "half", gan.parts(), SaveCheckpointOptions().user_content("7"));
    });
    const Named got = run(loading, 77, [&](Gan& gan) {
      const auto resumed = resume_from_checkpoint(path, std::nullopt, gan.parts());
      EXPECT_EQ(resumed.step, 2 * kSavedAfter);
      EXPECT_EQ(resumed.user_content, "7");
      for (int i = kSavedAfter; i < kSteps; ++i) gan.train_step(i);
    });
    expect_equal(got, expected, saving.name + " to " + loading.name);
  }
}

/// In a run that has begun, from a save in the background.
TEST_F(CheckpointPartsTest, AGanGoesBackToWhatItSaved) {
  const auto path = folder_.file("gan");
  const Named got = run(kStages, 5, [&](Gan& gan) {
    for (int i = 0; i < kSavedAfter; ++i) gan.train_step(i);
    const auto handle = save_async(path, gan.parts());
    gan.train_step(50);
    handle.wait();
    load(path, gan.parts());
    for (int i = kSavedAfter; i < kSteps; ++i) gan.train_step(i);
  });
  expect_equal(got, whole_run(), "all");
}

/// One optimizer with the groups of both, the tensors of both models.
TEST_F(CheckpointPartsTest, TheFolderIsThatOfOneModel) {
  run(kStages, 5, [&](Gan& gan) {
    gan.train_step(0);
    save(folder_.file("gan"), gan.parts());
    save_checkpoint(folder_.path(), "full", gan.parts(), SaveCheckpointOptions().partial(false));
  });
  const checkpoint::Reader partial(folder_.file("gan")), full(folder_.file("full"));
  std::vector<std::string> types;
  for (const auto& group : partial.index().optimizer.at("param_groups")) {
    types.push_back(group.at("type").get<std::string>());
  }
  EXPECT_THAT(types, ElementsAre("torch::optim::AdamOptions", "torch::optim::SGDOptions"));
  EXPECT_EQ(partial.index().model.count("generator.in.weight"), 1u);
  EXPECT_EQ(partial.index().model.count("critic.in.weight"), 1u);
  EXPECT_EQ(full.index().model.size(), partial.index().model.size());
  EXPECT_TRUE(full.index().optimizer_tensors.empty());
}

/// A model of it can be had alone.
TEST_F(CheckpointPartsTest, AModelOfItLoadsAlone) {
  const Named all = run(kStages, 5, [&](Gan& gan) {
    gan.train_step(0);
    save(folder_.file("gan"), gan.parts());
  });
  run_as_threads(1, cut(1, 4), [&] {
    DistributedModel<Mlp> model(Gan::make(9, MlpImpl::kWidth), ModelOptions().name("generator"));
    EXPECT_THROW(load(folder_.file("gan"), model), CheckpointError);
    load(folder_.file("gan"), model, LoadOptions().strict(false));
    for (const auto& [name, tensor] : to_map(model->state_dict())) {
      expect_equal(tensor, all.at("g." + name), name);
    }
  });
}

/// So it can in a plain module, by the name of the model.
TEST_F(CheckpointPartsTest, AModelOfItLoadsIntoAPlainModule) {
  const Named all = run(kStages, 5, [&](Gan& gan) {
    gan.train_step(0);
    save(folder_.file("gan"), gan.parts());
  });
  Mlp net = Gan::make(9, MlpImpl::kWidth);
  load_into_module(folder_.file("gan"), *net, LoadOptions().model("generator"));
  for (const auto& [name, tensor] : state_of(*net)) expect_equal(tensor, all.at("g." + name), name);
  expect_has(error_of<CheckpointError>(
                 [&] { load_into_module(folder_.file("gan"), *net, LoadOptions().strict(false)); }),
             {"in.weight: missing", "generator.in.weight: not in the model", "\n  generator\n",
              "LoadOptions().model(\"generator\")"});
  run_as_threads(1, cut(1, 4), [&] {
    DistributedModel<Mlp> model(net, ModelOptions().name("generator"));
    expect_has(error_of<UsageError>(
                   [&] { load(folder_.file("gan"), model, LoadOptions().model("generator")); }),
               "smp::load: LoadOptions().model(\"generator\") is for smp::load_into_module. A "
               "DistributedModel takes the tensors of the model of its own name");
  });
}

/// A job that is started again has all of them back.
TEST_F(CheckpointPartsTest, ARestartGoesOnFromACopyOfAll) {
  setenv(core::kRecoveryDirVariable, folder_.path().c_str(), 1);
  setenv(core::kParametersVariable, R"({"recovery": "restart", "recovery_interval": 1})", 1);
  run(kStages, 5, [&](Gan& gan) {
    EXPECT_FALSE(resume_after_restart(gan.parts())) << "the first start";
    for (int i = 0; i < kSavedAfter; ++i) {
      gan.train_step(i);
      keep_copy(gan.parts(), std::to_string(i));
    }
    gan.train_step(50);  // is lost
  });
  setenv("TORCHELASTIC_RESTART_COUNT", "1", 1);
  const Named got = run(kStages, 77, [&](Gan& gan) {
    const auto resumed = resume_after_restart(gan.parts());
    ASSERT_TRUE(resumed);
    EXPECT_EQ(resumed->user_content, "2");
    for (int i = kSavedAfter; i < kSteps; ++i) gan.train_step(i);
  });
  for (const char* name :
       {core::kRecoveryDirVariable, core::kParametersVariable, "TORCHELASTIC_RESTART_COUNT"}) {
    unsetenv(name);
  }
  expect_equal(got, whole_run(), "all");
}

TEST_F(CheckpointPartsTest, OptimizersWithACommonParameterAreRefused) {
  const auto text = error_of_run<UsageError>(1, cut(1, 4), [&] {
    Gan gan(5);
    DistributedOptimizer<torch::optim::SGD> other(gan.critic->parameters(), 0.1);
    save(folder_.file("gan"), gan.parts().add(other));
  });
  EXPECT_THAT(text,
              HasSubstr("smp::save: two optimizers have parameter \"critic.head.bias\", and a "
                        "checkpoint has one state of it. Save them under two paths, or give "
                        "each optimizer parameters of its own"));
}

TEST_F(CheckpointPartsTest, AveragesOfOneNameWithOtherNumbersOfUpdatesAreRefused) {
  const auto text = error_of_run<UsageError>(1, cut(1, 4), [&] {
    Gan gan(5);
    Ema other(gan.critic);
    gan.train_step(0);
    save(folder_.file("gan"), gan.parts());
  });
  EXPECT_THAT(text, HasSubstr("smp::save: two models have averages \"ema\", updated 1 and 0 times, "
                              "and a checkpoint has one number of updates for a name. Update them "
                              "together, or name one: smp::EmaOptions().name(...)"));
}

/// A program with a linear layer and tensors of its own for its parameters.
struct WithTensors {
  using TensorDict = torch::OrderedDict<std::string, torch::Tensor>;

  WithTensors() : model(make()) {
    handle = register_checkpoint_tensors(
        "mine", model, [this] { return mine; }, [this](const auto& saved) { mine = saved; });
  }

  static torch::nn::Linear make() {
    static std::mutex mutex;
    const std::lock_guard<std::mutex> lock(mutex);
    torch::manual_seed(5);
    torch::nn::Linear net(8, 8);
    set_tensor_parallelism(*net);
    return net;
  }
  void evaluate() {
    step([&](torch::Tensor x) { return model(x); })(torch::ones({4, 8}));
  }

  DistributedModel<torch::nn::Linear> model;
  TensorDict mine;
  RemovableHandle handle{nullptr};
};

/// Models that follow each other, often at one address.
TEST_F(CheckpointPartsTest, TensorsEndWithTheirModel) {
  run_as_threads(1, cut(1, 2), [&] {
    std::weak_ptr<int> before;
    for (int i = 0; i < 8; ++i) {
      const DistributedModel<torch::nn::Linear> model(torch::nn::Linear(2, 2),
                                                      ModelOptions().name(c10::str("model", i)));
      const auto used = std::make_shared<int>(i);
      register_checkpoint_tensors(
          "mine", model, [used] { return WithTensors::TensorDict(); }, [used](const auto&) {});
      EXPECT_TRUE(before.expired()) << "functions of a model that is gone";
      before = used;
    }
  });
}

/// Each rank of a tensor-parallel group gives, and gets, its part.
TEST_F(CheckpointPartsTest, TensorsAreDividedAsTheParametersAre) {
  const auto divided = cut(1, 2).ddp(true).tensor_parallel_degree(2);
  run_as_threads(2, divided, [&] {
    WithTensors program;
    program.evaluate();
    const auto& weight = program.model->local_named_parameters()["weight"];
    EXPECT_EQ(weight.numel(), 32) << "the layer is divided";
    for (const auto& item : program.model->local_named_parameters()) {
      program.mine.insert(item.key(), (item.value() * 2).detach());
    }
    save(folder_.file("divided"), program.model);
  });
  for (const bool before_the_first_step : {true, false}) {
    run_as_threads(2, divided, [&] {
      WithTensors program;
      if (!before_the_first_step) program.evaluate();
      load(folder_.file("divided"), program.model);
      EXPECT_EQ(program.mine.size(), before_the_first_step ? 0u : 2u);
      if (before_the_first_step) program.evaluate();
      for (const auto& item : program.model->local_named_parameters()) {
        expect_equal(program.mine[item.key()], (item.value() * 2).detach(), item.key());
      }
    });
  }
  run_as_threads(1, cut(1, 2), [&] {
    WithTensors program;
    load(folder_.file("divided"), program.model);
    program.evaluate();
    for (const auto& item : program.model->local_named_parameters()) {
      expect_equal(program.mine[item.key()], (item.value() * 2).detach(), item.key());
    }
  });
}

TEST_F(CheckpointPartsTest, TensorsThatDoNotFitAreRefused) {
  const auto text_of = [&](const std::function<void(WithTensors&)>& program) {
    std::string text;
    run_as_threads(1, cut(1, 2), [&] {
      WithTensors with_tensors;
      text = testing::error_of<Error>([&] { program(with_tensors); });
    });
    return text;
  };
  const auto path = folder_.file("mine");
  EXPECT_THAT(
      text_of([&](WithTensors& program) {
        program.mine.insert("wieght", torch::ones({8, 8}));
        save(path, program.model);
      }),
      HasSubstr("the tensors \"mine\" of a checkpoint: \"wieght\" is no parameter that this "
                "rank owns. Give tensors by the names of model->local_named_parameters()"));
  EXPECT_THAT(text_of([&](WithTensors& program) {
                program.mine.insert("bias", torch::ones({3}));
                save(path, program.model);
              }),
              HasSubstr("the tensors \"mine\" of a checkpoint: expected for \"bias\" one of the "
                        "sizes [8] of the parameter, got [3]. They are divided as the parameters"));
  run_as_threads(1, cut(1, 2), [&] {
    WithTensors program;
    program.handle.remove();
    save(path, program.model);
  });
  EXPECT_THAT(text_of([&](WithTensors& program) { load(path, program.model); }),
              HasSubstr("holds no tensors \"mine\" that fit the model's parameters: they were not "
                        "registered when it was written, or it is a full checkpoint, which has the "
                        "model alone. Load with strict = false to go on without"));
  run_as_threads(1, cut(1, 2), [&] {
    WithTensors program;
    load(path, program.model, LoadOptions().strict(false));
    EXPECT_EQ(program.mine.size(), 0u);
  });
}

TEST_F(CheckpointPartsTest, NamesOfTensorsAreChecked) {
  const auto text_of = [&](const std::string& name) {
    return error_of_run<UsageError>(1, cut(1, 2), [&] {
      WithTensors program;
      register_checkpoint_tensors(
          name, program.model, [&] { return program.mine; }, [](const auto&) {});
    });
  };
  EXPECT_THAT(text_of("a/b"),
              AllOf(HasSubstr("smp::register_checkpoint_tensors: expected a name without \"/\" and "
                              "control characters"),
                    HasSubstr("got \"a/b\". Checkpoints have its tensors as "
                              "\"parameter/tensors.name\"")));
  EXPECT_THAT(
      text_of("mine"),
      HasSubstr("smp::register_checkpoint_tensors was called twice for \"mine\" of a model: "
                "give each set of tensors a name of its own"));
}

}  // namespace
}  // namespace smp::testing
