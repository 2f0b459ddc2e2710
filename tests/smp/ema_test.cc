// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdint>
#include <ostream>
#include <string>
#include <vector>

#include "tests/smp/ema_program.h"
#include "tests/temp_folder.h"

// smp::Ema: averages equal those of a plain loop in one process, in every layout and across
// checkpoints.
namespace smp {
namespace {

using namespace testing;
using namespace testing::precision;

struct Case {
  Layout layout;
  Precision precision;
};

std::ostream& operator<<(std::ostream& out, const Case& value) {
  return out << value.layout << ", " << torch::toString(value.precision.type);
}

class EmaOnRanks : public ::testing::TestWithParam<Case> {
 protected:
  EmaOnRanks() { torch::set_num_threads(1); }

  std::string path(const std::string& name) const { return folder_.file(name); }
  const Layout& layout() const { return GetParam().layout; }
  const Precision& precision() const { return GetParam().precision; }

 private:
  const TempFolder folder_;
};

TEST_P(EmaOnRanks, EqualsThePlainLoop) {
  const Plain plain(precision());
  const Plain half_way(precision(), kHalfWay);
  run(layout(), precision(), [&](Program& program) {
    for (int i = 0; i < kSteps; ++i) {
      if (i == kHalfWay) {  // which leaves no trace
        expect_equal(program.averaged_state(), state_of(*half_way.net), "averaged weight");
      }
      program.train(i);
    }
    EXPECT_EQ(program.ema().updates(), kSteps);
    expect_equal(program.averaged_state(), state_of(*plain.net), "averaged weight");
    expect_equal(program.state(), plain.weights, "weight");
  });
}

TEST_P(EmaOnRanks, EvaluatesAsAPlainModuleWithAveragedWeights) {
  const Plain plain(precision(), 3);
  std::vector<Net> nets;  // one for each rank
  for (int i = 0; i < layout().ranks(); ++i) {
    nets.push_back(make_net());
    nets.back()->to(precision().type);
    copy_values(*plain.net, *nets.back());
    nets.back()->eval();
  }
  run(layout(), precision(), [&](Program& program) {
    for (int i = 0; i < 3; ++i) program.train(i);
    const auto averaged = program.ema().averaged();
    program.expect_evaluates_as(nets[rank()], precision());
  });
}

TEST_P(EmaOnRanks, GoesOnFromACheckpointOfAnotherLayout) {
  const Plain plain(precision()), third(precision(), 3);
  run({2, 2, "1f1b", true}, precision(), [&](Program& program) {
    for (int i = 0; i < 3; ++i) program.train(i);
    program.save(path("a"));
  });
  const auto expected = averages_in(path("a"));
  EXPECT_EQ(expected.at("ema"), 3);
  EXPECT_EQ(expected.at("tensors").size(), third.averages.size());
  const auto saves_the_same = [&](Program& program, const std::string& name) {
    program.save(path(name));
    if (rank() == 0) {
      EXPECT_EQ(averages_in(path(name)), expected) << name;
    }
  };
  run(
      layout(), precision(),
      [&](Program& program) {
        program.load(path("a"));
        EXPECT_EQ(program.ema().updates(), 3);
        saves_the_same(program, "before the first step");
        smp::save(path("alone"), program.model());
        if (rank() == 0) {
          EXPECT_EQ(averages_in(path("alone")), expected);
        }
        program.train(3);
        program.load(path("before the first step"));
        saves_the_same(program, "after the first step");
        save_async(path("asynchronous"), program.model(), program.optimizer()).wait();
        if (rank() == 0) {
          EXPECT_EQ(averages_in(path("asynchronous")), expected);
        }
        expect_equal(program.averaged_state(), state_of(*third.net), "loaded average");
      },
      /*seed=*/6);
  run(
      layout(), precision(),
      [&](Program& program) {
        program.load(path("alone"), LoadOptions().load_optimizer(false));
        program.load(path("a"));
        for (int i = 3; i < kSteps; ++i) program.train(i);
        expect_equal(program.averaged_state(), state_of(*plain.net), "averaged weight");
        expect_equal(program.state(), plain.weights, "weight");
      },
      /*seed=*/6);
}

TEST_P(EmaOnRanks, LoadsIntoModelsWithoutOne) {
  const Plain third(precision(), 3);
  run(layout(), precision(), [&](Program& program) {
    for (int i = 0; i < 3; ++i) program.train(i);
    program.save(path("a"));
    const auto averaged = program.ema().averaged();
    smp::save_checkpoint(path("tags"), "averaged", program.model(),
                         SaveCheckpointOptions().partial(false));
  });
  Net plain = make_net();
  plain->to(precision().type);
  load_into_module(path("a"), *plain, LoadOptions().average("ema"));
  expect_equal(state_of(*plain), state_of(*third.net), "average in a plain module");
  load_into_module(path("a"), *plain);
  expect_equal(state_of(*plain), third.weights, "weight in a plain module");
  load_into_module(path("tags/averaged"), *plain);
  expect_equal(state_of(*plain), state_of(*third.net), "average saved as the model");
  run(
      layout(), precision(),
      [&](Program& program) {
        smp::load(path("a"), program.model(), LoadOptions().average("ema"));
        expect_equal(program.state(), state_of(*third.net), "average as the model's weights");
      },
      /*seed=*/6);
}

std::vector<Case> cases() {
  std::vector<Case> cases;
  for (size_t i = 0; i < layouts().size(); ++i) {
    cases.push_back({layouts()[i], i % 2 == 0 ? kFloat32 : kBf16});
  }
  cases.push_back({{2, 2, "1f1b", true}, kBf16});
  cases.push_back({{1, 2, "simple", false, 2}, kBf16});
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Layouts, EmaOnRanks, ::testing::ValuesIn(cases()));

}  // namespace
}  // namespace smp
