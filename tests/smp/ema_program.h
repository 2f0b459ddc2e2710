// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/reader.h"
#include "checkpoint/safetensors.h"
#include "tests/smp/recipe.h"

/// Programs that average their parameters by an `smp::Ema`, and the plain loop in one process.
namespace smp::testing::precision {

namespace to = torch::optim;

constexpr double kDecay = 0.7;

inline Recipe recipe_of(const Precision& precision) {
  return recipe<to::AdamW>(precision, to::AdamWOptions(1e-2));
}

/// Adds the parameters that a process has trained to averages, as torch.optim.swa_utils does it.
inline void average(const Trace& now, Named& averages) {
  for (const auto& item : make_net()->named_parameters()) {
    const auto master = now.masters.find(item.key());
    const auto& values = master == now.masters.end() ? now.weights.at(item.key()) : master->second;
    const auto source = values.detach().to(torch::kFloat);
    torch::Tensor& of_parameter = averages[item.key()];
    if (of_parameter.defined()) {
      of_parameter.lerp_(source, 1 - kDecay);
    } else {
      of_parameter = source.clone();
    }
  }
}

/// A plain run: its weights at the end, and the averages of its parameters.
struct Plain {
  explicit Plain(const Precision& precision, int steps = kSteps) {
    PlainTraining training(recipe_of(precision));
    for (int i = 0; i < steps; ++i) {
      training.step(i);
      average(training.finish(), averages);
    }
    weights = training.finish().weights;
    net->to(precision.type);
    torch::NoGradGuard no_grad;
    for (auto& item : net->named_parameters()) item.value().copy_(averages.at(item.key()));
    net->eval();
  }

  Named averages, weights;
  Net net = make_net();  // net of the averaged weights
};

/// A rank of a program that averages.
class Program {
 public:
  Program(Net net, const Recipe& recipe)
      : model_(std::move(net)),
        plain_(recipe.optimizer(model_->parameters())),
        optimizer_(distributed(*plain_)),
        ema_(model_, optimizer_, EmaOptions().decay(kDecay)),
        train_(step(Train([this](torch::Tensor x, torch::Tensor y) {
          auto loss = loss_of(model_(x), y);
          model_->backward(loss);
          return loss;
        }))),
        evaluate_(step(Evaluate([this](torch::Tensor x) { return model_(x); }))) {}

  void train(int number) {
    const auto [x, y] = batch_of(number);
    optimizer_.zero_grad();
    train_(own(x), own(y));
    optimizer_.step();
    ema_.update();
  }

  /// Compares the outputs of evaluation with those of a plain module.
  void expect_evaluates_as(Net& net, const Precision& precision) {
    const auto x = batch_of(kSteps).first;
    model_->eval();
    const StepOutput output = evaluate_(own(x));
    model_->train();
    const auto outputs = output.outputs();
    for (size_t m = 0; m < outputs.size(); ++m) {
      const auto number = dp_rank() * static_cast<int64_t>(outputs.size()) + m;
      const auto input = part(x, Layout::kMicrobatches, number).to(precision.type);
      expect_equal(outputs[m], net(input).to(torch::kFloat), "output of microbatch");
    }
  }

  Named state() { return to_map(model_->state_dict()); }
  Named averaged_state() {
    const auto averaged = ema_.averaged();
    return state();
  }
  void save(const std::string& path) { smp::save(path, model_, optimizer_); }
  void load(const std::string& path, const LoadOptions& options = {}) {
    smp::load(path, model_, optimizer_, options);
  }

  DistributedModel<Net>& model() { return model_; }
  auto& optimizer() { return optimizer_; }
  Ema& ema() { return ema_; }

 private:
  using Train = std::function<torch::Tensor(torch::Tensor, torch::Tensor)>;
  using Evaluate = std::function<torch::Tensor(torch::Tensor)>;

  DistributedModel<Net> model_;
  std::unique_ptr<to::Optimizer> plain_;
  DistributedOptimizerRef<to::Optimizer> optimizer_;
  Ema ema_;
  Step<Train> train_;
  Step<Evaluate> evaluate_;
};

inline void run(const Layout& layout, const Precision& precision,
                const std::function<void(Program&)>& body, uint64_t seed = 5) {
  const Recipe recipe = recipe_of(precision);
  std::vector<Net> nets;
  for (int i = 0; i < layout.ranks(); ++i) {
    torch::manual_seed(seed);
    nets.emplace_back();
  }
  run_as_threads(layout.ranks(), with_precision(config_of(layout), precision), [&] {
    Program program(nets[rank()], recipe);
    body(program);
  });
}

/// The averages of a checkpoint: hashes by name, and the count.
inline nlohmann::json averages_in(const std::string& path) {
  const checkpoint::Reader reader(path);
  nlohmann::json content = reader.index().optimizer.at("averages");
  for (const auto& [name, entry] : reader.index().optimizer_tensors) {
    if (name.find("/average.") == std::string::npos) continue;
    content["tensors"][name] = {entry.hash, checkpoint::to_string(entry.spec)};
  }
  return content;
}

}  // namespace smp::testing::precision
