// SPDX-License-Identifier: Apache-2.0
// Runs smp_train as a user does, against a loop of plain libtorch that is written here.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "checkpoint/safetensors.h"
#include "smp/exported.h"
#include "smp/optim/fused.h"
#include "tests/command.h"
#include "tests/exported/archives.h"
#include "tests/temp_folder.h"
#include "tests/tools/plain_order.h"

namespace smp::tools::train {
namespace {

using nlohmann::json;
using smp::testing::archive;
using smp::testing::Outcome;
using smp::testing::plain_order;
using smp::testing::TempFolder;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using torch::Tensor;

constexpr int64_t kMicrobatches = 4, kShards = 2, kBatch = 8, kSamples = 20;
constexpr uint64_t kSeed = 7;

/// The plain loss of the model's result and the target: the sum, and how many numbers count.
struct PlainLoss {
  std::function<Tensor(ExportedModule&, const Tensor& x, const Tensor& y)> sum;
  std::function<Tensor(const Tensor& y)> count = [](const Tensor& y) {
    return torch::tensor(y.numel());
  };
};

PlainLoss cross_entropy() {
  return {[](ExportedModule& model, const Tensor& x, const Tensor& y) {
            using torch::nn::functional::CrossEntropyFuncOptions;
            return torch::nn::functional::cross_entropy(
                model(x).toTensor().flatten(0, 1), y.flatten(),
                CrossEntropyFuncOptions().reduction(torch::kSum).ignore_index(-100));
          },
          [](const Tensor& y) { return y.ne(-100).sum(); }};
}

struct Trace {
  std::vector<double> losses;
  std::map<std::string, Tensor> weights;
};

/// Six steps at most, of AdamW with warm-up and half a cosine, clipped.
class PlainLoop {
 public:
  PlainLoop(const std::string& name, Tensor x, Tensor y, PlainLoss loss)
      : model_(load_exported(archive(name))),
        x_(std::move(x)),
        y_(std::move(y)),
        loss_(std::move(loss)) {
    for (const Tensor& parameter : model_->parameters()) {
      const bool is_known =
          std::any_of(parameters_.begin(), parameters_.end(),
                      [&](const Tensor& known) { return known.is_same(parameter); });
      if (!is_known) parameters_.push_back(parameter);
    }
  }

  Trace train(int64_t steps) {
    std::vector<Tensor> matrices, vectors;
    for (const Tensor& parameter : parameters_) {
      (parameter.dim() >= 2 ? matrices : vectors).push_back(parameter);
    }
    optim::FusedAdamW optimizer({torch::optim::OptimizerParamGroup(matrices, options(0.1)),
                                 torch::optim::OptimizerParamGroup(vectors, options(0))},
                                torch::optim::AdamWOptions(0.01));
    Trace trace;
    for (int64_t step = 0; step < steps; ++step) {
      trace.losses.push_back(accumulate(step));
      torch::nn::utils::clip_grad_norm_(parameters_, 0.5);
      const double done = static_cast<double>(step - 2) / 4;
      const double rate = step < 2 ? static_cast<double>(step + 1) / 2
                                   : 0.1 + (1 - 0.1) * ((1 + std::cos(M_PI * done)) / 2);
      for (auto& group : optimizer.param_groups()) group.options().set_lr(0.01 * rate);
      optimizer.step();
    }
    for (const auto& entry : model_->named_parameters()) {
      trace.weights[entry.key()] = entry.value().detach();
    }
    return trace;
  }

 private:
  static std::unique_ptr<torch::optim::AdamWOptions> options(double weight_decay) {
    return std::make_unique<torch::optim::AdamWOptions>(
        torch::optim::AdamWOptions(0.01).weight_decay(weight_decay));
  }

  /// Leaves the gradient of a step in the parameters, and returns its loss.
  double accumulate(int64_t step) {
    const int64_t per_epoch = x_.size(0) / kBatch;
    const auto order = torch::tensor(plain_order(x_.size(0), kSeed, step / per_epoch));
    const auto batch = order.narrow(0, step % per_epoch * kBatch, kBatch);
    const Tensor count = loss_.count(y_.index_select(0, batch));
    Tensor total;
    std::vector<Tensor> sums(parameters_.size());
    for (const Tensor& shard : batch.chunk(kShards)) {
      for (const Tensor& parameter : parameters_) parameter.mutable_grad() = Tensor();
      for (const Tensor& rows : shard.chunk(kMicrobatches / kShards)) {
        Tensor loss = loss_.sum(model_, x_.index_select(0, rows), y_.index_select(0, rows));
        loss = loss * kMicrobatches / count;
        loss.backward();
        total = total.defined() ? total + loss.detach() : loss.detach();
      }
      for (size_t i = 0; i < sums.size(); ++i) {
        const Tensor& gradient = parameters_[i].grad();
        sums[i] = sums[i].defined() ? sums[i] + gradient : gradient;
      }
    }
    for (size_t i = 0; i < sums.size(); ++i) {
      parameters_[i].mutable_grad() = sums[i] / kMicrobatches;
    }
    return (total / kMicrobatches).item<double>();
  }

  ExportedModule model_;
  const Tensor x_, y_;
  const PlainLoss loss_;
  std::vector<Tensor> parameters_;
};

/// Numbers by step.
std::vector<double> numbers_in(const std::string& output, const std::string& key) {
  std::vector<double> numbers;
  std::istringstream lines(output);
  for (std::string line; std::getline(lines, line);) {
    if (line.rfind("{\"step\"", 0) != 0) continue;
    const json object = json::parse(line);
    if (object.contains(key)) numbers.push_back(object.at(key));
  }
  return numbers;
}

class SmpTrain : public ::testing::Test {
 protected:
  SmpTrain() {
    torch::set_num_threads(1);
    torch::manual_seed(1);
    tokens_ = torch::randint(24, {kSamples, 7});
    x_ = tokens_.slice(1, 0, 6).contiguous();
    y_ = tokens_.slice(1, 1, 7).contiguous();
    y_.masked_fill_(torch::rand(y_.sizes()) < 0.2, -100);
    write("gpt.safetensors", {{"input", x_}, {"target", y_}});
    values_ = torch::randn({kSamples, 3});
    wanted_ = torch::rand({kSamples, 2});
    write("values.safetensors", {{"input", values_}, {"target", wanted_}});
    for (const auto& [name, stages, replicas] : std::vector<std::tuple<std::string, int, int>>{
             {"1x1", 1, 1}, {"2x1", 2, 1}, {"1x2", 1, 2}}) {
      folder_.write(name + ".json", json{{"partitions", stages},
                                         {"ddp", replicas > 1},
                                         {"microbatches", kMicrobatches / replicas},
                                         {"gradient_shards", kShards}}
                                        .dump());
    }
  }

  std::string path(const std::string& name) const { return folder_.file(name); }

  void write(const std::string& name,
             const std::vector<std::pair<std::string, Tensor>>& tensors) const {
    checkpoint::write_safetensors(path(name), tensors);
  }

  /// The command line for a model and its samples, in six steps, or until one of them.
  std::string arguments(const std::string& model, const std::string& data, const std::string& more,
                        int64_t batch_size = kBatch) const {
    return " " + archive(model) + " --data " + path(data) +
           " --optimizer adamw --lr 0.01 --weight-decay 0.1 --clip 0.5 --warmup 2 --schedule "
           "cosine --final-rate 0.1 --schedule-steps 6 --seed 7 --json --batch-size " +
           std::to_string(batch_size) + " " + more;
  }

  /// On two ranks, if the layout has as many.
  Outcome train(const std::string& layout, const std::string& arguments) const {
    const std::string config = " --config " + path(layout + ".json") + " ";
    const std::string program = "tools/train/smp_train";
    return smp::testing::run_command(
        (layout == "1x1" ? program + arguments + config
                         : "tools/smprun_bin --np 2" + config + program + arguments) +
        " 2>&1");
  }

  std::map<std::string, Tensor> saved(const std::string& folder) const {
    const checkpoint::SafetensorsReader reader(path(folder) + "/trained/model/model.safetensors");
    std::map<std::string, Tensor> weights;
    for (const auto& entry : reader.entries()) weights[entry.first] = reader.read(entry.first);
    return weights;
  }

  void expect_trained(const std::string& folder, const Trace& expected) const {
    const auto weights = saved(folder);
    const ExportedModule program = load_exported(path(folder) + "/trained/model.pt2");
    const auto parameters = program->named_parameters();
    EXPECT_FALSE(weights.empty());
    for (const auto& [name, value] : weights) {
      EXPECT_TRUE(torch::equal(value, expected.weights.at(name))) << name;
    }
    for (const auto& [name, value] : expected.weights) {
      EXPECT_TRUE(torch::equal(parameters[name], value)) << name;
    }
  }

  TempFolder folder_;
  Tensor tokens_, x_, y_, values_, wanted_;
};

TEST_F(SmpTrain, EqualsAPlainLoopOnOneRankTwoStagesAndTwoReplicas) {
  const Trace expected = PlainLoop("gpt", x_, y_, cross_entropy()).train(6);
  for (const std::string layout : {"1x1", "2x1", "1x2"}) {
    SCOPED_TRACE(layout);
    const Outcome outcome =
        train(layout, arguments("gpt", "gpt.safetensors",
                                "--loss cross_entropy --steps 6 --folder " + path(layout)));
    ASSERT_EQ(outcome.status, 0) << outcome.output;
    EXPECT_EQ(numbers_in(outcome.output, "loss"), expected.losses) << outcome.output;
    EXPECT_EQ(numbers_in(outcome.output, "norm").size(), 6U);
    expect_trained(layout, expected);
  }
}

TEST_F(SmpTrain, ResumesInAnotherLayoutAsIfItHadNotStopped) {
  const Trace expected = PlainLoop("gpt", x_, y_, cross_entropy()).train(6);
  const std::string common = "--loss cross_entropy --save-every 1 --keep 2 --folder " + path("run");
  const Outcome first = train("1x1", arguments("gpt", "gpt.safetensors", common + " --steps 3"));
  ASSERT_EQ(first.status, 0) << first.output;
  for (const char* name : {"step_2_partial", "step_3_partial"}) {
    EXPECT_TRUE(std::filesystem::exists(path("run") + "/checkpoints/" + name)) << name;
  }
  EXPECT_FALSE(std::filesystem::exists(path("run") + "/checkpoints/step_1_partial"));
  const Outcome second = train("2x1", arguments("gpt", "gpt.safetensors", common + " --steps 6"));
  ASSERT_EQ(second.status, 0) << second.output;
  auto losses = numbers_in(first.output, "loss");
  for (const double loss : numbers_in(second.output, "loss")) losses.push_back(loss);
  EXPECT_EQ(losses, expected.losses) << second.output;
  expect_trained("run", expected);
  // Nothing is left to do.
  const Outcome third = train("2x1", arguments("gpt", "gpt.safetensors", common + " --steps 6"));
  ASSERT_EQ(third.status, 0) << third.output;
  EXPECT_EQ(numbers_in(third.output, "loss").size(), 0U) << third.output;
  expect_trained("run", expected);
}

TEST_F(SmpTrain, EvaluatesOverAllNumbersThatCount) {
  y_.narrow(0, 0, kBatch).fill_(-100);  // a batch of which none counts
  write("gpt.safetensors", {{"input", x_}, {"target", y_}});
  const Outcome outcome =
      train("1x1", arguments("gpt", "gpt.safetensors",
                             "--loss cross_entropy --steps 3 --eval-every 2 --folder " +
                                 path("run") + " --eval-model " + archive("gpt") + " --eval-data " +
                                 path("gpt.safetensors")));
  ASSERT_EQ(outcome.status, 0) << outcome.output;
  const auto losses = numbers_in(outcome.output, "eval_loss");
  ASSERT_EQ(losses.size(), 2U) << outcome.output;  // after two steps, and at the end
  ExportedModule trained =
      load_exported(ExportedPrograms().eval(path("run") + "/trained/model_eval.pt2"));
  const torch::NoGradGuard no_grad;
  const int64_t count = kSamples / kBatch * kBatch;  // whole batches
  const Tensor y = y_.narrow(0, 0, count);
  const double sum = cross_entropy().sum(trained, x_.narrow(0, 0, count), y).item<double>();
  EXPECT_NEAR(losses.back(), sum / cross_entropy().count(y).item<double>(), 1e-5);
}

TEST_F(SmpTrain, OtherLosses) {
  const auto output = [](ExportedModule& model, const Tensor& x, const Tensor& y) {
    return model(x, y).toGenericDict().at("out").toTensor();
  };
  namespace F = torch::nn::functional;
  const std::map<std::string, PlainLoss> losses{
      {"mse", {[&](auto& model, const auto& x, const auto& y) {
         return F::mse_loss(output(model, x, y), y, F::MSELossFuncOptions(torch::kSum));
       }}},
      {"l1", {[&](auto& model, const auto& x, const auto& y) {
         return F::l1_loss(output(model, x, y), y, F::L1LossFuncOptions(torch::kSum));
       }}},
      {"bce_with_logits", {[&](auto& model, const auto& x, const auto& y) {
         return F::binary_cross_entropy_with_logits(
             output(model, x, y), y,
             F::BinaryCrossEntropyWithLogitsFuncOptions().reduction(torch::kSum));
       }}}};
  for (const auto& [name, loss] : losses) {
    SCOPED_TRACE(name);
    const Trace expected = PlainLoop("losses", values_, wanted_, loss).train(3);
    const Outcome outcome =
        train("1x1", arguments("losses", "values.safetensors",
                               "--inputs input,target --output out --steps 3 --loss " + name +
                                   " --folder " + path(name)));
    ASSERT_EQ(outcome.status, 0) << outcome.output;
    EXPECT_EQ(numbers_in(outcome.output, "loss"), expected.losses) << outcome.output;
    expect_trained(name, expected);
  }
}

/// The model's own loss is a mean over each microbatch, and these have as many numbers.
TEST_F(SmpTrain, TheLossOfTheModel) {
  const PlainLoss own{[](ExportedModule& model, const Tensor& x, const Tensor& y) {
                        return model(x, y).toGenericDict().at("loss").toTensor();
                      },
                      [](const Tensor& /*y*/) { return torch::tensor(kMicrobatches); }};
  const Trace expected = PlainLoop("losses", values_, wanted_, own).train(3);
  const Outcome outcome =
      train("2x1", arguments("losses", "values.safetensors",
                             "--inputs target=target,x=input --output loss --loss output --steps 3 "
                             "--folder " +
                                 path("run")));
  ASSERT_EQ(outcome.status, 0) << outcome.output;
  EXPECT_EQ(numbers_in(outcome.output, "loss"), expected.losses) << outcome.output;
  expect_trained("run", expected);
}

TEST_F(SmpTrain, RawTokensGiveTheWindowsOfATensor) {
  const Tensor stream = tokens_.flatten().to(torch::kUInt16);
  const int64_t count = (stream.numel() - 1) / 6;
  write("windows.safetensors",
        {{"input", tokens_.flatten().narrow(0, 0, count * 6).view({count, 6})},
         {"target", tokens_.flatten().narrow(0, 1, count * 6).view({count, 6})}});
  folder_.write("tokens.bin",
                std::string(static_cast<const char*>(stream.const_data_ptr()), stream.nbytes()));
  const Outcome a = train("1x1", arguments("gpt", "windows.safetensors",
                                           "--loss cross_entropy --steps 4 --folder " + path("a")));
  const Outcome b = train("1x1", arguments("gpt", "tokens.bin",
                                           "--loss cross_entropy --steps 4 --format tokens "
                                           "--sequence 6 --shift --folder " +
                                               path("b")));
  ASSERT_EQ(a.status, 0) << a.output;
  ASSERT_EQ(b.status, 0) << b.output;
  EXPECT_EQ(numbers_in(a.output, "loss"), numbers_in(b.output, "loss"));
  EXPECT_EQ(numbers_in(b.output, "loss").size(), 4U);
}

/// In some step, of so many that it is never done before it has heard of that.
TEST_F(SmpTrain, StopsWithACheckpointWhenItIsAskedTo) {
  folder_.write("stop.json",
                json{{"partitions", 2}, {"microbatches", 4}, {"preempt_seconds", 60}}.dump());
  const std::string common = "--loss cross_entropy --folder " + path("run");
  const Outcome outcome = smp::testing::run_command(
      "tools/smprun_bin --np 2 --config " + path("stop.json") + " tools/train/smp_train" +
      arguments("gpt", "gpt.safetensors", common + " --steps 1000000") + " >" + path("out") +
      " 2>&1 & pid=$!; until grep -q '\"step\":2,' " + path("out") +
      " || ! kill -0 $pid; do sleep 0.05; done; kill -TERM $pid; wait $pid; echo status $?; cat " +
      path("out"));
  EXPECT_THAT(outcome.output, HasSubstr("status 75\n"));
  EXPECT_FALSE(std::filesystem::exists(path("run") + "/trained"));
  const auto steps = numbers_in(outcome.output, "step");
  ASSERT_FALSE(steps.empty()) << outcome.output;
  const auto last = static_cast<int64_t>(steps.back());
  const Outcome resumed = train(
      "1x1", arguments("gpt", "gpt.safetensors", common + " --steps " + std::to_string(last + 2)));
  ASSERT_EQ(resumed.status, 0) << resumed.output;
  EXPECT_THAT(numbers_in(resumed.output, "step"), ElementsAre(last + 1, last + 2));
}

TEST_F(SmpTrain, WrongRunsSayWhatToDo) {
  const std::string gpt = "--loss cross_entropy --steps 1 --folder " + path("none");
  const std::string losses = "--inputs input,target --steps 1 --folder " + path("none");
  const auto refused = [&](const std::string& arguments) {
    const Outcome outcome = train("1x1", arguments);
    EXPECT_EQ(outcome.status, 2) << outcome.output;
    return outcome.output;
  };
  EXPECT_THAT(refused(arguments("gpt", "gpt.safetensors", gpt, 6)),
              HasSubstr("a batch of 6 samples gives each replica 6, which are not divided by 4 "
                        "microbatches. Choose a --batch-size that is a multiple of microbatches "
                        "times replicas"));
  EXPECT_THAT(refused(arguments("gpt", "gpt.safetensors", gpt, 24)),
              AllOf(HasSubstr("has 20 samples, fewer than a batch of 24. Choose a smaller "
                              "--batch-size"),
                    HasSubstr("gpt.safetensors")));
  EXPECT_THAT(refused(arguments("losses", "values.safetensors", losses + " --loss output")),
              HasSubstr("the model's result has no tensor \"\" for the loss, it has: out, loss. "
                        "Choose one of them by --output"));
  EXPECT_THAT(refused(arguments("gpt", "gpt.safetensors", gpt + " --output logits")),
              HasSubstr("it has: one tensor, which is taken without --output"));
  EXPECT_THAT(
      refused(arguments("losses", "values.safetensors", losses + " --loss mse --output loss")),
      HasSubstr("the loss compares an output of shape [] with a target of shape [2, 2], and needs "
                "[]. Choose others by --output and --target, or the axis of the classes by "
                "--class-axis"));
  write("floats.safetensors", {{"input", x_}, {"target", y_.to(torch::kFloat)}});
  EXPECT_THAT(refused(arguments("gpt", "floats.safetensors", gpt)),
              HasSubstr("--loss cross_entropy got a target of type Float, and takes labels, which "
                        "are integers. Choose another --target, or write it as integers"));
  write("file.safetensors", {{"input", x_}});
  EXPECT_THAT(refused(arguments("gpt", "gpt.safetensors",
                                "--loss cross_entropy --steps 1 --folder " +
                                    path("file.safetensors") + "/below")),
              AllOf(HasSubstr("smp_train: cannot make the folder "),
                    HasSubstr("Give a --folder that can be written")));
}

TEST_F(SmpTrain, ARunHasNoFewerStepsThanItHasMade) {
  const std::string run = "--loss cross_entropy --folder " + path("run") + " --steps ";
  EXPECT_EQ(train("1x1", arguments("gpt", "gpt.safetensors", run + "2")).status, 0);
  const Outcome fewer = train("1x1", arguments("gpt", "gpt.safetensors", run + "1"));
  EXPECT_EQ(fewer.status, 2);
  EXPECT_THAT(fewer.output, HasSubstr("has made 2 steps, more than --steps 1. Give more --steps, "
                                      "or another --folder"));
}

/// -240 is 16 in a byte, and 16 is a label.
TEST_F(SmpTrain, NoLabelOfOneByteIsIgnored) {
  const Tensor labels = tokens_.slice(1, 1, 7).contiguous();
  write("bytes.safetensors", {{"input", x_}, {"target", labels.to(torch::kByte)}});
  write("words.safetensors", {{"input", x_}, {"target", labels}});
  std::vector<std::vector<double>> losses;
  for (const char* name : {"bytes", "words"}) {
    const Outcome outcome = train(
        "1x1",
        arguments("gpt", name + std::string(".safetensors"),
                  "--loss cross_entropy --ignore-index -240 --steps 2 --folder " + path(name)));
    ASSERT_EQ(outcome.status, 0) << outcome.output;
    losses.push_back(numbers_in(outcome.output, "loss"));
  }
  EXPECT_EQ(losses[0].size(), 2U);
  EXPECT_EQ(losses[0], losses[1]);
}

}  // namespace
}  // namespace smp::tools::train
