// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <filesystem>
#include <ostream>
#include <string>
#include <vector>

#include "smp/optim/adadelta.h"
#include "smp/optim/lamb.h"
#include "smp/optim/novograd.h"
#include "tests/covering_array.h"
#include "tests/smp/recipe.h"

// N steps are N/2, a checkpoint, another layout of ranks and N/2, bit for bit: for each optimizer
// and each precision, and from one precision to another.
namespace smp {
namespace {

using namespace testing;
using namespace testing::precision;
namespace to = torch::optim;

/// A checkpoint of the test's own.
std::string checkpoint_path() {
  const auto* test = ::testing::UnitTest::GetInstance()->current_test_info();
  std::string name = std::string(test->test_suite_name()) + "." + test->name();
  for (char& c : name) c = c == '/' ? '_' : c;
  return (std::filesystem::path(::testing::TempDir()) / name).string();
}

template <class Optimizer, class Options>
Recipe with(const Options& options) {
  return recipe<Optimizer>(kFloat32, options);
}

struct NamedRecipe {
  friend std::ostream& operator<<(std::ostream& out, const NamedRecipe& one) {
    return out << one.name;
  }
  const char* name;
  Recipe recipe;
};

std::vector<NamedRecipe> optimizers() {
  return {{"SGD", with<to::SGD>(to::SGDOptions(0.1).momentum(0.9).weight_decay(0.01))},
          {"Adam", with<to::Adam>(to::AdamOptions(0.01).amsgrad(true))},
          {"AdamW", with<to::AdamW>(to::AdamWOptions(0.01))},
          {"Adagrad", with<to::Adagrad>(to::AdagradOptions(0.1).lr_decay(0.01))},
          {"RMSprop", with<to::RMSprop>(to::RMSpropOptions(0.01).momentum(0.9).centered(true))},
          {"Adadelta", with<optim::Adadelta>(optim::AdadeltaOptions(0.5))},
          {"Lamb", with<optim::Lamb>(optim::LambOptions(0.02).max_grad_norm(0.01))},
          {"NovoGrad", with<optim::NovoGrad>(optim::NovoGradOptions(0.02))}};
}

struct NamedPrecision {
  friend std::ostream& operator<<(std::ostream& out, const NamedPrecision& one) {
    return out << one.name;
  }
  const char* name;
  Precision precision;
  LossScaleOptions scale = {};
  bool overflows = false;
};

std::vector<NamedPrecision> precisions() {
  return {{"Float32", kFloat32}, {"Bf16", kBf16}, {"Fp16", kFp16, lively(), true}};
}

/// Layouts of ranks before and after the checkpoint.
struct Change {
  const char* name;
  Layout from, to;
};

std::vector<Change> changes() {
  return {{"OneToTwoByTwo", {1, 1}, {2, 2, "1f1b"}},
          {"OneToTwoByTwoSharded", {1, 1}, {2, 2, "1f1b", true}},
          {"StagesToReplicas", {2, 1, "1f1b"}, {1, 2}},
          {"StagesToReplicasSharded", {2, 1, "1f1b"}, {1, 2, "interleaved", true}},
          {"ShardedReplicasToStages", {1, 2, "interleaved", true}, {2, 1, "1f1b"}},
          {"OneToShardedParameters", {1, 1}, {2, 2, "1f1b", false, 2}},
          {"ShardedParametersToReplicas", {2, 2, "zb_h1", false, 2}, {1, 2, "simple", true}},
          {"ShardedParametersFlattened", {2, 2, "1f1b", false, 2}, {1, 2, "simple", false, 2}}};
}

struct ResumeCase {
  friend std::ostream& operator<<(std::ostream& out, const ResumeCase& one) {
    return out << one.optimizer << ", " << one.precision << ", " << one.change.name;
  }
  NamedRecipe optimizer;
  NamedPrecision precision;
  Change change;
};

class Resume : public ::testing::TestWithParam<ResumeCase> {};

TEST_P(Resume, IsAsWithoutAnInterruption) {
  torch::set_num_threads(1);
  const auto& [optimizer, precision, change] = GetParam();
  Recipe recipe = optimizer.recipe;
  recipe.precision = precision.precision;
  recipe.scale = precision.scale;
  recipe.overflows = precision.overflows;
  const std::string path = checkpoint_path();
  const Trace plain = train_plain(recipe);
  EXPECT_EQ(count_skipped(plain), precision.overflows ? 3 : 0);
  const Trace first = train_ranks(change.from, recipe, {0, kHalfWay, "", path});
  expect_same(joined(first, train_ranks(change.to, recipe, {kHalfWay, kSteps, path, ""})), plain);
}

std::vector<ResumeCase> resume_cases() {
  std::vector<ResumeCase> product;
  for (const NamedRecipe& optimizer : optimizers()) {
    for (const NamedPrecision& precision : precisions()) {
      for (const Change& change : changes()) {
        product.push_back({optimizer, precision, change});
      }
    }
  }
  return cases_of(product, [](const ResumeCase& one) {
    return Factors{one.optimizer.name, one.precision.name, one.change.name};
  });
}

INSTANTIATE_TEST_SUITE_P(Each, Resume, ::testing::ValuesIn(resume_cases()), [](const auto& info) {
  return std::string(info.param.optimizer.name) + "In" + info.param.precision.name + "_" +
         info.param.change.name;
});

/// Weights stored in float32 become masters, and masters become weights, without rounding; the
/// optimizer's state goes on.
TEST(ResumeInAnotherPrecision, IsAsInOneProcess) {
  torch::set_num_threads(1);
  const std::string path = checkpoint_path();
  const std::vector<Layout> layouts{{2, 1, "1f1b"}, {1, 2, "interleaved", true}};
  for (const auto& from : precisions()) {
    const auto with_precision = [](const NamedPrecision& precision) {
      return recipe<to::AdamW>(precision.precision, to::AdamWOptions(0.01), precision.scale);
    };
    train_ranks({1, 1}, with_precision(from), {0, kHalfWay, "", path});
    for (const auto& to : precisions()) {
      if (to.precision.type == from.precision.type) continue;
      PlainTraining plain(with_precision(from));
      for (int i = 0; i < kHalfWay; ++i) plain.step(i);
      plain.change(to.precision, to.scale);
      for (int i = kHalfWay; i < kSteps; ++i) plain.step(i);
      const Trace expected = plain.finish();
      for (const Layout& layout : layouts) {
        SCOPED_TRACE(::testing::Message() << from.name << " to " << to.name << ", " << layout);
        const Trace got = train_ranks(layout, with_precision(to), {kHalfWay, kSteps, path, ""});
        for (size_t i = kHalfWay * Layout::kMicrobatches; i < expected.losses.size(); ++i) {
          expect_equal(got.losses[i], expected.losses[i], "loss");
        }
        expect_equal(got.weights, expected.weights, "weight");
        expect_equal(got.masters, expected.masters, "master");
      }
    }
  }
}

/// It has one state for all parameters together, and one direction.
TEST(ResumeErrors, Lbfgs) {
  const auto save_with = [](const Config& config) {
    return error_of_run<UsageError>(static_cast<int>(config.partitions()), config, [] {
      Mlp net(1);
      DistributedModel<Mlp> model(net);
      DistributedOptimizer<to::LBFGS> optimizer(model->parameters(), to::LBFGSOptions(0.1));
      smp::save(checkpoint_path(), model, optimizer);
    });
  };
  expect_has(save_with(stages(1)),
             {"cannot save or restore the state of torch::optim::LBFGS by parameter name"});
  expect_has(save_with(stages(2)),
             {"torch::optim::LBFGS finds one direction for all parameters together, and with "
              "\"partitions\" 2 each rank has the gradients of some of them only"});
}

}  // namespace
}  // namespace smp
