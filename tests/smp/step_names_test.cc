// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "runtime/step_functions.h"
#include "tests/smp/oracle.h"

namespace smp::testing {
namespace {

using ::testing::HasSubstr;

class StepNames : public ::testing::Test {
 protected:
  void SetUp() override {
    torch::set_num_threads(1);
    const auto* test = ::testing::UnitTest::GetInstance()->current_test_info();
    path_ = ::testing::TempDir() + "smp_step_names_" + test->name();
    std::filesystem::remove_all(path_);
  }
  void TearDown() override { std::filesystem::remove_all(path_); }

  /// A program of one rank that may make other step functions around the one that trains.
  struct Program {
    std::string name;  // name of the function that trains
    std::vector<std::string> before = {};
    std::vector<std::string> after = {};
    bool load = false;
    bool save = false;
    bool load_first = false;  // before the step functions are made
  };

  /// The losses of three steps with dropout, or of those after the one that was saved.
  std::vector<double> run(const Program& program) {
    std::vector<double> losses;
    torch::manual_seed(5);
    run_as_threads(1, Config().microbatches(2), [&] {
      Mlp net(2, /*dropout=*/0.5);
      DistributedModel<Mlp> model(net);
      DistributedOptimizer<torch::optim::SGD> optimizer(model->parameters(), 0.0);
      if (program.load_first) smp::load(path_, model, optimizer);
      const auto forward = [&](torch::Tensor x) { return model(x); };
      using Forward = decltype(step(forward));
      std::vector<Forward> others;
      for (const auto& name : program.before) {
        others.push_back(step(forward, StepOptions().name(name)));
      }
      auto train = step(
          [&](torch::Tensor x) {
            auto loss = model(x).square().mean();
            model->backward(loss);
            return loss;
          },
          StepOptions().name(program.name));
      for (const auto& name : program.after) {
        others.push_back(step(forward, StepOptions().name(name)));
      }
      if (program.load) smp::load(path_, model, optimizer);
      const auto x = torch::linspace(-1, 1, 4 * MlpImpl::kWidth).view({4, MlpImpl::kWidth});
      const bool resumed = program.load || program.load_first;
      for (int i = resumed ? 1 : 0; i < 3; ++i) {
        losses.push_back(train(x).reduce_mean().item<double>());
        if (program.save && i == 0) smp::save(path_, model, optimizer);
      }
    });
    return losses;
  }

  std::string resume_error(Program program) {
    if (!program.load_first) program.load = true;
    try {
      run(program);
    } catch (const CheckpointError& error) {
      return error.what_without_backtrace();
    }
    return "no error";
  }

  std::string path_;
};

TEST_F(StepNames, StreamsHaveTheHashesOfXxhash) {
  EXPECT_EQ(runtime::stream_of(""), 0xef46db3751d8e999u);
  EXPECT_EQ(runtime::stream_of("step 0"), 0x7a88ec1817808a60u);
  EXPECT_EQ(runtime::stream_of("train"), 0xd18f9b6611eb8e16u);
}

TEST_F(StepNames, OtherStepFunctionsDoNotChangeTheMasksOfANamedOne) {
  const auto losses = run({"train"});
  EXPECT_EQ(run({"train", {"evaluate", ""}, {"other"}}), losses);
  EXPECT_NE(run({"fit"}), losses);
  EXPECT_NE(losses[0], losses[1]);  // the masks of each call are others
}

TEST_F(StepNames, ThoseWithoutAreNumberedAmongThemselves) {
  const auto losses = run({""});
  EXPECT_EQ(run({"step 0"}), losses);
  EXPECT_EQ(run({"", {"evaluate"}}), losses);
  EXPECT_NE(run({"", {""}}), losses);
  EXPECT_EQ(run({"", {""}}), run({"step 1"}));
}

TEST_F(StepNames, AResumedRunGoesOnByName) {
  const auto whole = run({"train", {""}, {}, false, /*save=*/true});
  const std::vector<double> rest(whole.begin() + 1, whole.end());
  EXPECT_EQ(run({"train", {""}, {}, /*load=*/true}), rest);
  EXPECT_EQ(run({"train", {"new", ""}, {"newer"}, /*load=*/true}), rest);
  EXPECT_EQ(run({"train", {}, {""}, /*load=*/true}), rest);
  EXPECT_EQ(run({"train", {}, {}, false, false, /*load_first=*/true}), rest);
}

TEST_F(StepNames, OtherStepFunctionsWithoutNamesAreRefused) {
  run({"", {}, {}, false, /*save=*/true});
  EXPECT_EQ(resume_error({"", {""}}),
            "[smp rank 0] checkpoint \"" + path_ +
                "\" does not fit the step functions of the program: \"step 1\" has no name of "
                "its own and is not in the checkpoint, which has \"step 0\" (1 calls). Step "
                "functions without a name are numbered in the order in which they are made, and "
                "draw random numbers by that. Make those of the run that saved, in its order, and "
                "give the others names: StepOptions().name(\"evaluate\")");
  EXPECT_EQ(resume_error({"", {"evaluate"}}), "no error");
}

TEST_F(StepNames, ARenamedStepFunctionIsRefused) {
  run({"train", {}, {}, false, /*save=*/true});
  const std::string expected =
      "[smp rank 0] step function \"fit\" is not in checkpoint \"" + path_ +
      "\", from which this run goes on, and \"train\" of the checkpoint (1 calls) is not in the "
      "program. Give step functions the names that they had when the checkpoint was written, or "
      "make that one before the first step";
  EXPECT_EQ(resume_error({"fit"}), expected);
  EXPECT_EQ(resume_error({"fit", {}, {}, false, false, /*load_first=*/true}), expected);
}

TEST_F(StepNames, AreUniqueAmongThoseThatExist) {
  try {
    run({"train", {"train"}});
    ADD_FAILURE() << "two of one name";
  } catch (const UsageError& error) {
    EXPECT_STREQ(
        error.what_without_backtrace(),
        "[smp rank 0] two step functions are called \"train\", and a step function draws its "
        "random numbers by its name. Give each a name of its own: "
        "StepOptions().name(\"evaluate\")");
  }
  run_as_threads(1, Config(), [] {
    const auto identity = [](torch::Tensor x) { return x; };
    { const auto first = step(identity, StepOptions().name("train")); }
    EXPECT_NO_THROW(step(identity, StepOptions().name("train")));
  });
}

TEST(StepOptionsType, AxesCanBeNamed) {
  StepOptions::Axes axes;
  axes[1] = -1;
  EXPECT_EQ(StepOptions().input_split_axes(axes).input_split_axes().at(1), -1);
}

}  // namespace
}  // namespace smp::testing
