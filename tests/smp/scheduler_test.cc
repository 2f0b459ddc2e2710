// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tests/smp/oracle.h"

// Learning-rate schedulers of runs that go on from a checkpoint, against the uninterrupted run in
// plain libtorch.
namespace smp {
namespace {

using namespace testing;
namespace to = torch::optim;

constexpr int kEpochs = 9;

/// A schedule of a program's own: the rate falls by a factor that falls, too.
class Sinking : public to::LRScheduler {
 public:
  explicit Sinking(to::Optimizer& optimizer) : LRScheduler(optimizer) {}

  SchedulerState state() {
    return {[this] { return std::to_string(factor_); },
            [this](const std::string& text) { factor_ = std::stod(text); }};
  }

 private:
  std::vector<double> get_lrs() override {
    auto rates = get_current_lrs();
    if (step_count_ % 3 != 0) return rates;
    for (double& rate : rates) rate *= factor_;
    factor_ /= 2;
    return rates;
  }

  double factor_ = 1;
};

/// A scheduler of some class: how it steps, and how it is registered.
struct Schedule {
  std::function<void(float loss)> step;
  std::function<void()> registered;
};
using MakeSchedule = std::function<Schedule(to::Optimizer& optimizer)>;

Schedule step_lr(to::Optimizer& optimizer) {
  auto scheduler = std::make_shared<to::StepLR>(optimizer, 2, 0.5);
  return {[=](float) { scheduler->step(); }, [=] { register_scheduler("lr", *scheduler); }};
}

Schedule plateau(to::Optimizer& optimizer) {
  auto scheduler = std::make_shared<to::ReduceLROnPlateauScheduler>(
      optimizer, to::ReduceLROnPlateauScheduler::min, 0.5f, /*patience=*/1, /*threshold=*/0.2,
      to::ReduceLROnPlateauScheduler::rel, /*cooldown=*/1);
  return {[=](float loss) { scheduler->step(loss); },
          [=] { register_scheduler("lr", *scheduler); }};
}

Schedule sinking(to::Optimizer& optimizer) {
  auto scheduler = std::make_shared<Sinking>(optimizer);
  return {[=](float) { scheduler->step(); },
          [=] { register_scheduler("lr", *scheduler, scheduler->state()); }};
}

const to::SGDOptions kOptions = to::SGDOptions(0.2).momentum(0.9);

double rate_of(const to::Optimizer& optimizer) {
  return optimizer.param_groups()[0].options().get_lr();
}

struct Outcome {
  std::vector<double> rates;  // after each epoch
  Named weights;
};

Outcome train_plain(const MakeSchedule& make) {
  Outcome outcome;
  auto net = make_mlp();
  const auto parameters = unique_parameters(*net);
  to::SGD optimizer(parameters, kOptions);
  const auto schedule = make(optimizer);
  for (int epoch = 0; epoch < kEpochs; ++epoch) {
    optimizer.zero_grad();
    const auto x = mlp_input(epoch);
    const auto losses =
        plain_backward(parameters, 1, 2, [&](int m) { return net(part(x, 2, m)).square().mean(); });
    optimizer.step();
    schedule.step(((losses[0] + losses[1]) / 2).item<float>());
    outcome.rates.push_back(rate_of(optimizer));
  }
  outcome.weights = state_of(*net);
  return outcome;
}

class Schedulers : public ::testing::Test {
 protected:
  Schedulers() {
    torch::set_num_threads(1);
    std::filesystem::remove_all(path_);
  }
  ~Schedulers() override { std::filesystem::remove_all(path_); }

  /// Which ranks, and which epochs: from the first, or from a checkpoint.
  struct Span {
    int stages = 2;
    int first = 0, last = kEpochs;
    bool registers_before_load = true;
  };

  /// Trains, and saves at the end unless that is the last epoch.
  Outcome train(const MakeSchedule& make, const Span& span) const {
    Outcome outcome;
    std::vector<Mlp> nets;
    for (int i = 0; i < span.stages; ++i) nets.push_back(make_mlp());
    std::vector<torch::Tensor> inputs;
    for (int epoch = 0; epoch < kEpochs; ++epoch) inputs.push_back(mlp_input(epoch));
    run_as_threads(span.stages, stages(span.stages), [&] {
      DistributedModel<Mlp> model(nets[rank()]);
      DistributedOptimizer<to::SGD> optimizer(model->parameters(), kOptions);
      const auto schedule = make(optimizer);
      if (span.registers_before_load) schedule.registered();
      if (span.first > 0) load(path_, model, optimizer);
      if (!span.registers_before_load) schedule.registered();
      auto train = step([&](torch::Tensor x) {
        auto loss = model(x).square().mean();
        model->backward(loss);
        return loss;
      });
      std::vector<double> rates;
      for (int epoch = span.first; epoch < span.last; ++epoch) {
        optimizer.zero_grad();
        const auto loss = train(inputs[epoch].clone()).reduce_mean();
        optimizer.step();
        schedule.step(loss.template item<float>());
        rates.push_back(rate_of(optimizer));
      }
      if (span.last < kEpochs) save(path_, model, optimizer);
      const auto weights = to_map(model->state_dict());
      if (rank() == 0) outcome = {rates, weights};
    });
    return outcome;
  }

  /// Whatever the epoch after which a run is saved, and the ranks that go on.
  void expect_undisturbed(const MakeSchedule& make) const {
    const auto plain = train_plain(make);
    EXPECT_LT(plain.rates.back(), kOptions.lr() / 2);
    for (int saved = 1; saved < kEpochs; ++saved) {
      train(make, {2, 0, saved});
      for (const bool before : {true, false}) {
        SCOPED_TRACE(c10::str("saved after ", saved, ", registered before load: ", before));
        const auto rest = train(make, {before ? 2 : 1, saved, kEpochs, before});
        EXPECT_EQ(rest.rates, std::vector<double>(plain.rates.begin() + saved, plain.rates.end()));
        expect_equal(rest.weights, plain.weights, "value");
      }
    }
  }

  const std::string path_ = ::testing::TempDir() + "/schedulers";
};

TEST_F(Schedulers, GoOnByStep) { expect_undisturbed(step_lr); }
TEST_F(Schedulers, GoOnByMetric) { expect_undisturbed(plateau); }
TEST_F(Schedulers, GoOnWithStateOfTheirOwn) { expect_undisturbed(sinking); }

/// A scheduler stands where its optimizer does.
TEST_F(Schedulers, StayWithoutTheOptimizer) {
  train(step_lr, {1, 0, 3});
  run_as_threads(1, stages(1), [&] {
    DistributedModel<Mlp> model(make_mlp());
    DistributedOptimizer<to::SGD> optimizer(model->parameters(), kOptions);
    to::StepLR scheduler(optimizer, 2, 0.5);
    register_scheduler("lr", scheduler);
    load(path_, model);
    scheduler.step();
    EXPECT_EQ(rate_of(optimizer), kOptions.lr());
    scheduler.step();
    EXPECT_EQ(rate_of(optimizer), kOptions.lr());
    scheduler.step();
    EXPECT_EQ(rate_of(optimizer), kOptions.lr() / 2);
  });
}

TEST_F(Schedulers, RefuseWhatDoesNotFit) {
  train(step_lr, {1, 0, 3});
  const auto refusal = [&](const char* name, const MakeSchedule& make) {
    return error_of_run<CheckpointError>(2, stages(2), [&] {
      DistributedModel<Mlp> model(make_mlp());
      DistributedOptimizer<to::SGD> optimizer(model->parameters(), kOptions);
      to::StepLR other(optimizer, 2, 0.5);
      const auto schedule = make(optimizer);
      if (std::string(name) == "lr") {
        schedule.registered();
      } else {
        register_scheduler(name, other);
      }
      load(path_, model, optimizer);
    });
  };
  expect_has(refusal("warmup", step_lr),
             {"holds nothing of scheduler \"warmup\": it was not registered when that was written. "
              "Load with strict = false for its schedule to begin anew"});
  expect_has(
      refusal("lr", plateau),
      {"scheduler \"lr\" is not of the kind that was saved under its name: {\"step_count\":3}"});
  expect_has(refusal("lr", sinking), {"scheduler \"lr\" is not of the kind that was saved"});
  run_as_threads(1, stages(1), [&] {
    DistributedModel<Mlp> model(make_mlp());
    DistributedOptimizer<to::SGD> optimizer(model->parameters(), kOptions);
    to::StepLR scheduler(optimizer, 2, 0.5);
    register_scheduler("warmup", scheduler);
    load(path_, model, optimizer, LoadOptions().strict(false));  // begins anew
    expect_has(error_of<UsageError>([&] { register_scheduler("warmup", scheduler); }),
               {"register_scheduler was called twice for \"warmup\""});
    expect_has(error_of<UsageError>([&] {
                 register_scheduler("half", scheduler, {[] { return "1"; }, nullptr});
               }),
               {"register_scheduler of \"half\": a SchedulerState needs both save and load"});
  });
}

}  // namespace
}  // namespace smp
