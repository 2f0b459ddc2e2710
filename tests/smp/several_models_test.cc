// SPDX-License-Identifier: Apache-2.0
// Programs with several models, each with an optimizer and a step function of its own: a load and a
// save change nothing, whichever of the models have had their first step.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <mutex>
#include <nlohmann/json.hpp>
#include <string>

#include "tests/checkpoint/content.h"
#include "tests/smp/precision.h"
#include "tests/temp_folder.h"

namespace smp::testing::precision {
namespace {

using nlohmann::json;
namespace to = torch::optim;

Net net_of_seed(uint64_t seed) {
  static std::mutex mutex;  // rank threads share the default generator
  const std::lock_guard lock(mutex);
  torch::manual_seed(seed);
  return Net();
}

/// A model that is trained by a step function and an optimizer of its own.
template <class Optimizer, class Options>
class TrainedApart {
 public:
  TrainedApart(const std::string& name, uint64_t seed, const Options& options)
      : model(net_of_seed(seed), ModelOptions().name(name)),
        optimizer(model->parameters(), options),
        train_(step(Train([this](torch::Tensor x, torch::Tensor y) {
                      auto loss = loss_of(model(x), y);
                      model->backward(loss);
                      return loss;
                    }),
                    StepOptions().name("train " + name))) {}

  void train_only(int number) {
    const auto [x, y] = batch_of(number);
    train_(own(x), own(y));
  }
  void train(int number) {
    optimizer.zero_grad();
    train_only(number);
    optimizer.step();
  }
  void load(const std::string& path) { smp::load(path, model, optimizer); }
  void save(const std::string& path) { smp::save(path, model, optimizer); }

  DistributedModel<Net> model;
  DistributedOptimizer<Optimizer> optimizer;

 private:
  using Train = std::function<torch::Tensor(torch::Tensor, torch::Tensor)>;
  Step<Train> train_;
};

/// A rank of a program with two of them, and an average of the first.
struct TwoModels {
  explicit TwoModels(uint64_t seed)
      : first("first", seed, to::AdamOptions(1e-2)),
        second("second", seed + 1, to::SGDOptions(0.1).momentum(0.9)),
        average(first.model, EmaOptions().decay(0.5)) {}

  void train_first(int number) {
    first.train(number);
    average.update();
  }
  void train(int number) {
    second.train(number);
    train_first(number);
  }
  CheckpointParts parts() const {
    return CheckpointParts().add(first.model, first.optimizer).add(second.model, second.optimizer);
  }

  TrainedApart<to::Adam, to::AdamOptions> first;
  TrainedApart<to::SGD, to::SGDOptions> second;
  Ema average;
};

class SeveralModels : public ::testing::TestWithParam<Layout> {
 protected:
  SeveralModels() { torch::set_num_threads(1); }

  std::string path(const std::string& name) const { return folder_.file(name); }

  /// Runs the program on ranks that begin with the weights of a seed.
  static void run(const Layout& layout, uint64_t seed,
                  const std::function<void(TwoModels&)>& body) {
    run_as_threads(layout.ranks(), config_of(layout), [&] {
      TwoModels models(seed);
      body(models);
    });
  }

  /// Trains in one process, and saves the models together as "all", apart as "first" and "second".
  void train_alone() const {
    run({1, 1}, 5, [&](TwoModels& models) {
      for (int i = 0; i < 3; ++i) models.train(i);
      save_both_ways(models, "");
    });
    const json all = content_of(path("all"));
    EXPECT_EQ(all["step"], 6);
    EXPECT_EQ(all["model"].size(), content_of(path("first"))["model"].size() +
                                       content_of(path("second"))["model"].size());
  }

  void save_both_ways(TwoModels& models, const std::string& point) const {
    smp::save(path(point + "all"), models.parts());
    models.first.save(path(point + "first"));
    models.second.save(path(point + "second"));
  }
  void expect_unchanged(const std::string& point) const {
    if (rank() != 0) return;
    for (const char* part : {"all", "first", "second"}) {
      EXPECT_EQ(content_of(path(point + part)), content_of(path(part))) << point << part;
    }
  }

 private:
  TempFolder folder_;
};

TEST_P(SeveralModels, AreSavedAsTheyWereLoaded) {
  train_alone();
  run(GetParam(), 77, [&](TwoModels& models) {
    const auto loads_and_saves = [&](const std::string& point) {
      smp::load(path("all"), models.parts());
      save_both_ways(models, point + ", together, ");
      expect_unchanged(point + ", together, ");
      models.first.load(path("first"));
      models.second.load(path("second"));
      save_both_ways(models, point + ", apart, ");
      expect_unchanged(point + ", apart, ");
    };
    loads_and_saves("before the first step");
    models.second.train_only(3);
    loads_and_saves("with gradients of one");
    models.second.optimizer.step();
    loads_and_saves("with one updated");
    models.train_first(3);
    loads_and_saves("with both trained");
    models.train(4);
    loads_and_saves("trained on");
  });
}

/// A state that waits for one model's first step is saved beside that of another, which has trained
/// meanwhile.
TEST_P(SeveralModels, GoOnWhereOneHasHadNoStepYet) {
  train_alone();
  run(GetParam(), 77, [&](TwoModels& models) {
    smp::load(path("all"), models.parts());
    models.second.train(3);
    smp::save(path("half of a step"), models.parts());
  });
  run({2, 1, "1f1b"}, 99, [&](TwoModels& models) {
    smp::load(path("half of a step"), models.parts());
    models.train_first(3);
    smp::save(path("a step"), models.parts());
  });
  run(GetParam(), 111, [&](TwoModels& models) {
    smp::load(path("a step"), models.parts());
    models.train(4);
    smp::save(path("end"), models.parts());
  });
  run({1, 1}, 5, [&](TwoModels& models) {
    for (int i = 0; i < 5; ++i) models.train(i);
    smp::save(path("uninterrupted"), models.parts());
  });
  EXPECT_EQ(content_of(path("end")), content_of(path("uninterrupted")));
}

INSTANTIATE_TEST_SUITE_P(Layouts, SeveralModels,
                         ::testing::Values(Layout{1, 1}, Layout{2, 1, "interleaved"},
                                           Layout{4, 1, "1f1b"}, Layout{2, 2, "1f1b", true},
                                           Layout{1, 2, "interleaved", true},
                                           Layout{1, 2, "simple", false, 2}));

}  // namespace
}  // namespace smp::testing::precision
