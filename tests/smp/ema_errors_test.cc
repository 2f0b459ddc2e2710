// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include "checkpoint/reader.h"
#include "checkpoint/writer.h"
#include "tests/smp/ema_program.h"
#include "tests/temp_folder.h"

// smp::Ema: refusals, and its effect on other calls.
namespace smp {
namespace {

using namespace testing;
using namespace testing::precision;

/// One rank, or two stages, with a folder.
class EmaErrors : public ::testing::Test {
 protected:
  EmaErrors() { torch::set_num_threads(1); }

  std::string path(const std::string& name) const { return folder_.file(name); }

 private:
  const TempFolder folder_;
};

TEST_F(EmaErrors, ACheckpointWithoutOne) {
  const Recipe recipe = recipe_of(kFloat32);
  run_as_threads(1, stages(1), [&] {
    DistributedModel<Net> model(make_net());
    const auto plain = recipe.optimizer(model->parameters());
    const auto optimizer = distributed(*plain);
    auto train = make_training(model);
    const auto [x, y] = batch_of(0);
    train(x, y);
    optimizer.step();
    smp::save(path("a"), model, optimizer);
  });
  const auto none = "checkpoint \"" + path("a") + "\" holds no average \"ema\" of the model's ";
  ::testing::internal::CaptureStderr();
  run({2, 1}, kFloat32, [&](Program& program) {
    const auto text = error_of<CheckpointError>([&] { program.load(path("a")); });
    expect_has(
        text, {none + "parameters: the program that wrote it had no smp::Ema of that name then, or "
                      "it is a full checkpoint, which has the model alone. Load with strict = "
                      "false for an average to begin anew, or give the name that was saved"});
    program.train(0);
    program.load(path("a"), LoadOptions().strict(false).load_optimizer(false));
    EXPECT_EQ(program.ema().updates(), 0);
    program.train(0);
    EXPECT_EQ(program.ema().updates(), 1);
    expect_equal(program.averaged_state(), program.state(), "average of one update");
  });
  expect_has(::testing::internal::GetCapturedStderr(),
             {none + "parameters after step 1, so it begins anew with the next ema.update()"});
  Net plain = make_net();
  expect_has(error_of<CheckpointError>(
                 [&] { load_into_module(path("a"), *plain, LoadOptions().average("other")); }),
             {"holds no average \"other\" of the model's parameters"});
}

TEST_F(EmaErrors, BeforeTheFirstStep) {
  run({2, 1}, kFloat32, [&](Program& program) {
    expect_has(error_of<UsageError>([&] { program.ema().update(); }),
               {"ema.update() was called before the first step, which divides the parameters among "
                "the ranks. Call it later; smp::load with LoadOptions().average(\"ema\") gives a "
                "model averaged values before"});
    program.save(path("untrained"));
    program.train(0);
    EXPECT_EQ(program.ema().updates(), 1);
    program.load(path("untrained"));
    EXPECT_EQ(program.ema().updates(), 0);
    const Named own = program.state();
    expect_equal(program.averaged_state(), own, "without an update");
  });
}

TEST_F(EmaErrors, WhileTheAverageIsInUse) {
  run({2, 1}, kFloat32, [&](Program& program) {
    program.train(0);
    program.save(path("a"));
    {
      const auto averaged = program.ema().averaged();
      const auto refused = [](const std::string& call) {
        return call +
               " was called while the parameters have the values of average \"ema\". End "
               "the block of ema.averaged() first";
      };
      expect_has(error_of<UsageError>([&] { program.ema().update(); }), {refused("ema.update()")});
      expect_has(error_of<UsageError>([&] { (void)program.ema().averaged(); }),
                 {refused("ema.averaged()")});
      expect_has(error_of<UsageError>([&] { program.load(path("a")); }), {refused("smp::load")});
      expect_has(error_of<UsageError>([&] { program.save(path("b")); }), {refused("smp::save")});
      auto& model = program.model();
      auto& optimizer = program.optimizer();
      expect_has(error_of<UsageError>([&] { smp::load_pretrained(path("none"), model); }),
                 {refused("smp::load_pretrained")});
      const auto state = model->state_dict();
      expect_has(error_of<UsageError>([&] { model->load_state_dict(state); }),
                 {refused("load_state_dict")});
      expect_has(error_of<UsageError>([&] { model->cpu(); }), {refused("cpu")});
      expect_has(error_of<UsageError>([&] { optimizer.step(); }), {refused("optimizer.step()")});
      expect_has(error_of<UsageError>([&] { optimizer.reload_model_params(); }),
                 {refused("optimizer.reload_model_params()")});
      expect_has(error_of<UsageError>([&] { optimizer.load_state_dict({}); }),
                 {refused("optimizer.load_state_dict()")});
    }
    program.load(path("a"));
  });
}

TEST_F(EmaErrors, OptionsThatAreNone) {
  run({1, 1}, kFloat32, [&](Program& program) {
    const auto refused = [&](const EmaOptions& options) {
      return error_of<UsageError>([&] { const Ema ema(program.model(), options); });
    };
    expect_has(refused(EmaOptions().name("b").decay(1)),
               {"smp::Ema: expected a decay of at least 0 and below 1, got 1. It is the share of "
                "the average that an update leaves"});
    expect_has(refused(EmaOptions().name("b").decay(-0.1)), {"below 1, got -0.1"});
    expect_has(
        refused(EmaOptions().name("a/b")),
        {"smp::Ema: expected a name without \"/\" and control characters, of at most 65536 bytes "
         "of UTF-8, got \"a/b\". Checkpoints have its tensors as \"parameter/average.name\""});
    expect_has(refused(EmaOptions().name("")), {"bytes of UTF-8, got \"\"."});
    expect_has(refused(EmaOptions().name("a\xff")), {"bytes of UTF-8, got \"a\\xff\"."});
    expect_has(refused(EmaOptions().name(std::string(65537, 'a'))), {"aaa... (65537 bytes)\"."});
    expect_has(refused(EmaOptions()), {"smp::Ema: the model has an average \"ema\" already. Give "
                                       "each a name of its own: smp::EmaOptions().name(...)"});
  });
}

/// Two of a model, and averages without an optimizer: of the parameters.
TEST_F(EmaErrors, SeveralHaveNames) {
  run({2, 1}, kFloat32, [&](Program& program) {
    const Ema last(program.model(), EmaOptions().name("last").decay(0));
    for (int i = 0; i < 3; ++i) {
      program.train(i);
      last.update();
    }
    const Named own = program.state();
    program.save(path("a"));
    program.train(3);
    last.update();
    program.load(path("a"));
    EXPECT_EQ(last.updates(), 3);
    EXPECT_EQ(program.ema().updates(), 3);
    program.train(4);
    const auto averaged = last.averaged();
    expect_equal(program.state(), own, "last weight");
  });
  EXPECT_EQ(averages_in(path("a")).at("last"), 3);
}

/// Weights were replaced, and the masters of those before are there until the next step.
TEST_F(EmaErrors, AveragesWeightsThatWereLoadedWithoutTheOptimizer) {
  run({2, 1}, kBf16, [&](Program& program) {
    for (int i = 0; i < 3; ++i) program.train(i);
    program.save(path("a"));
  });
  run(
      {2, 1}, kBf16,
      [&](Program& program) {
        program.train(0);
        smp::load(path("a"), program.model());
        const Ema last(program.model(), program.optimizer(), EmaOptions().name("last"));
        last.update();
        const Named own = program.state();
        const auto averaged = last.averaged();
        expect_equal(program.state(), own, "average of what was loaded");
      },
      /*seed=*/6);
}

/// A copy of the values of this rank's parameters.
torch::Tensor local_values(Program& program) {
  const torch::NoGradGuard no_grad;
  return torch::nn::utils::parameters_to_vector(program.model()->local_parameters()).clone();
}

/// An exception leaves the block, and an error occurs while the values are gathered, since the
/// other replica has ended.
TEST_F(EmaErrors, ParametersGetTheirOwnValuesBack) {
  std::string error;
  const std::string ended = error_of<std::runtime_error>([&] {
    run({1, 2, "simple", true}, kFloat32, [&](Program& program) {
      for (int i = 0; i < 2; ++i) program.train(i);
      const auto own = local_values(program);
      try {
        const auto averaged = program.ema().averaged();
        EXPECT_FALSE(torch::equal(local_values(program), own));
        throw std::logic_error("no validation");
      } catch (const std::logic_error&) {
      }
      expect_equal(local_values(program), own, "after an exception");
      if (rank() == 1) throw std::runtime_error("no more data");
      error = error_of<CommError>([&] { (void)program.ema().averaged(); });
      expect_equal(local_values(program), own, "after an error");
    });
  });
  expect_has(ended, {"no more data"});
  expect_has(error, {"no more data"});
}

/// The end of a block throws nothing: values that cannot be given back are the rank's failure.
TEST_F(EmaErrors, ValuesThatCannotBeGivenBackEndTheJob) {
  const std::string error = error_of<CommError>([&] {
    run({2, 1}, kFloat32, [&](Program& program) {
      program.train(0);
      {
        const auto averaged = program.ema().averaged();
        if (rank() == 0) program.model()->local_parameters()[0].set_data(torch::zeros({3}));
      }
      program.train(1);
    });
  });
  expect_has(error, {"rank 0 failed: "});
}

/// A checkpoint of all has one count.
TEST_F(EmaErrors, RanksUpdateThemAlike) {
  run({2, 2, "1f1b", true}, kFloat32, [&](Program& program) {
    program.train(0);
    if (rank() == 1) program.ema().update();
    expect_has(error_of<UsageError>([&] { program.save(path("a")); }),
               {"ranks save different checkpoints: rank 0 calls ",
                ", average \"ema\" of 1 updates, rank 1 calls ",
                ", average \"ema\" of 2 updates. Give the same arguments on every rank, and make "
                "and update the same averages (smp::Ema)"});
  });
}

/// The second replica has two batches more.
TEST_F(EmaErrors, ReplicasThatRanOutHaveThatOfOthers) {
  const auto recipe = testing::precision::recipe<to::SGD>(kFloat32, to::SGDOptions(0.1));
  std::vector<Net> nets = {make_net(), make_net()};
  std::vector<Named> averages(2), later(2);
  run_as_threads(2, Config().microbatches(2).ddp(true).timeout_seconds(60), [&] {
    Program program(nets[rank()], recipe);
    {
      const auto guard = program.model()->join();
      for (int i = 0; i < 1 + 2 * rank(); ++i) program.train(i);
    }
    EXPECT_EQ(program.ema().updates(), 3);
    averages[rank()] = program.averaged_state();
    program.train(3);
    later[rank()] = program.averaged_state();
  });
  expect_equal(averages[0], averages[1], "average after the join");
  expect_equal(later[0], later[1], "average one step later");
  EXPECT_FALSE(torch::equal(averages[0].at("in.weight"), later[0].at("in.weight")));
}

/// A model without a name has no prefix that tells its tensors from those of others.
TEST_F(EmaErrors, OtherModelsStayAsTheyAre) {
  const Recipe recipe = recipe_of(kFloat32);
  run_as_threads(1, stages(1), [&] {
    DistributedModel<Net> model(make_net());
    DistributedModel<Net> other(make_net(), ModelOptions().name("d"));
    auto parameters = model->parameters();
    for (const auto& parameter : other->parameters()) parameters.push_back(parameter);
    const auto plain = recipe.optimizer(parameters);
    const auto optimizer = distributed(*plain);
    const Ema ema(model, EmaOptions().decay(0));
    auto train = step([&](torch::Tensor x, torch::Tensor y) {
      model->backward(loss_of(model(x) + other(x), y));
    });
    for (int i = 0; i < 2; ++i) {
      if (i == 1) ema.update();
      const auto [x, y] = batch_of(i);
      optimizer.zero_grad();
      train(x, y);
      optimizer.step();
    }
    const Named own = to_map(model->state_dict()), others = to_map(other->state_dict());
    const auto averaged = ema.averaged();
    EXPECT_FALSE(torch::equal(to_map(model->state_dict()).at("in.weight"), own.at("in.weight")));
    expect_equal(to_map(other->state_dict()), others, "weight of the other model");
    smp::save(path("a"), model);
  });
  const checkpoint::Reader reader(path("a"));
  EXPECT_EQ(reader.index().model.size(), state_of(*make_net()).size());
  EXPECT_EQ(reader.index().optimizer_tensors.size(), make_net()->parameters().size());
  for (const auto& [name, entry] : reader.index().model) EXPECT_NE(name.rfind("d.", 0), 0u) << name;
}

/// The average of a rank that made it and of one that did not, or of another model.
TEST_F(EmaErrors, OfOtherParameters) {
  torch::nn::Linear net(3, 2);
  const auto refused = [&](const std::map<std::string, torch::Tensor>& averages) {
    checkpoint::Shard shard;
    for (const auto& item : net->named_parameters()) {
      shard.model.push_back({item.key(), item.value().detach(), {}});
    }
    shard.optimizer["averages"]["ema"] = uint64_t{3};
    shard.optimizer_tensors = averages;
    const checkpoint::Writer writer(path("a"));
    writer.begin();
    writer.commit({writer.write_shard(0, 1, shard)}, {});
    return error_of<CheckpointError>(
        [&] { load_into_module(path("a"), *net, LoadOptions().average("ema")); });
  };
  const auto weight = torch::zeros({2, 3});
  const std::string begin = "checkpoint \"" + path("a") +
                            "\" holds an average \"ema\" that does not fit the model's "
                            "parameters:\n  bias: expected F32 [2], got ";
  const std::string end =
      "\nBuild the model, and make the smp::Ema on all ranks, as when the checkpoint was written, "
      "or load with strict = false for an average to begin anew";
  expect_has(refused({{"weight/average.ema", weight}}), {begin + "none" + end});
  expect_has(refused({{"weight/average.ema", weight}, {"bias/average.ema", torch::zeros({4})}}),
             {begin + "F32 [4]" + end});
}

/// Averages of each rank's part of the masters.
TEST_F(EmaErrors, MastersOfDividedLayers) {
  const Recipe recipe = recipe_of(kBf16);
  std::vector<Net> nets = {make_net(), make_net()};
  const auto config = stages(1).tensor_parallel_degree(2).ddp(true).gradient_shards(2);
  run_as_threads(2, with_precision(config, kBf16), [&] {
    set_tensor_parallelism(*nets[rank()]);
    Program program(nets[rank()], recipe);
    Named averages;
    for (int i = 0; i < 3; ++i) {
      program.train(i);
      const auto state = program.optimizer().state_dict();
      for (const auto& [name, param] : state.params) {
        const auto master = param.tensors.find("master");
        if (master == param.tensors.end()) continue;
        torch::Tensor& average = averages[name];
        average =
            average.defined() ? average.lerp(master->second, 1 - kDecay) : master->second.clone();
      }
    }
    EXPECT_EQ(averages.count("middle.weight"), 1u);
    const Named got = program.averaged_state();
    for (const auto& [name, average] : averages) {
      expect_equal(got.at(name), average.to(torch::kBFloat16), "average of " + name);
    }
  });
}

TEST_F(EmaErrors, ProgramsWithoutOneLoadWhatHasOne) {
  run({2, 1}, kBf16, [&](Program& program) {
    program.train(0);
    program.save(path("a"));
  });
  const Recipe recipe = recipe_of(kBf16);
  run_as_threads(1, with_precision(config_of({1, 1}), kBf16), [&] {
    DistributedModel<Net> model(make_net());
    const auto plain = recipe.optimizer(model->parameters());
    const auto optimizer = distributed(*plain);
    smp::load(path("a"), model, optimizer);
    smp::save(path("b"), model, optimizer);
  });
  const checkpoint::Reader with(path("a")), without(path("b"));
  EXPECT_FALSE(without.index().optimizer.contains("averages"));
  const auto& expected = with.index().optimizer_tensors;
  for (const auto& [name, entry] : without.index().optimizer_tensors) {
    ASSERT_EQ(expected.count(name), 1u) << name;
    EXPECT_EQ(entry.hash, expected.at(name).hash) << name;
  }
  const size_t averages = make_net()->parameters().size();
  EXPECT_EQ(without.index().optimizer_tensors.size() + averages, expected.size());
}

}  // namespace
}  // namespace smp
