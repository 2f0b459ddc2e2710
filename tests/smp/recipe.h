// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "runtime/update/optimizer.h"
#include "tests/smp/plain_scaler.h"
#include "tests/smp/precision.h"

/// Training by a recipe: a precision of the parameters, an optimizer and a loss scale; on ranks, in
/// parts with checkpoints in between, and in one plain process.
namespace smp::testing::precision {

/// The precision of the parameters.
struct Precision {
  torch::Dtype type;
  double spike;  // overflows it

  bool is_half() const { return type != torch::kFloat; }
};

const Precision kFloat32{torch::kFloat, HUGE_VAL};
const Precision kFp16{torch::kHalf, 1e6};
const Precision kBf16{torch::kBFloat16, HUGE_VAL};

inline Config with_precision(Config config, const Precision& precision) {
  return config.fp16(precision.type == torch::kHalf).bf16(precision.type == torch::kBFloat16);
}

struct Recipe {
  Precision precision;
  std::function<std::unique_ptr<torch::optim::Optimizer>(const Tensors& parameters)> optimizer;
  LossScaleOptions scale = {};
  bool overflows = false;
  double max_norm = 0;  // norm to which gradients are clipped, if not 0
  double norm_type = 2;

  double spike() const { return overflows ? precision.spike : 1; }
  bool scales() const {
    return scale.dynamic_loss_scale() ||
           scale.static_loss_scale() != LossScaleOptions().static_loss_scale();
  }
  /// Overflows are looked for.
  bool checks() const { return precision.type == torch::kHalf || scales(); }
};

template <class Optimizer, class Options>
Recipe recipe(const Precision& precision, const Options& options,
              const LossScaleOptions& scale = {}, bool overflows = false) {
  const auto make = [options](const Tensors& parameters) {
    return std::make_unique<Optimizer>(parameters, options);
  };
  return {precision, make, scale, overflows};
}

/// Grows every second step.
inline LossScaleOptions lively() {
  return dynamic(DynamicLossArgs().init_scale(4096).scale_window(2));
}

/// After so many steps trainings in two parts go on with the second one.
constexpr int kHalfWay = kSteps / 2;

/// One process: a module of the precision, gradients added in float32, master weights of float32,
/// and a plain optimizer for them.
class PlainTraining {
 public:
  explicit PlainTraining(const Recipe& recipe) : recipe_(recipe), scaler_(recipe.scale) {
    net_->to(recipe.precision.type);
    parameters_ = unique_parameters(*net_);
    for (const auto& parameter : parameters_) {
      masters_.push_back(
          parameter.detach().to(torch::kFloat, false, /*copy=*/true).requires_grad_());
    }
    optimizer_ = recipe.optimizer(masters_);
  }

  /// Goes on with parameters of another precision, and another loss scale.
  void change(const Precision& precision, const LossScaleOptions& scale) {
    recipe_.precision = precision;
    recipe_.scale = scale;
    scaler_ = PlainScaler(scale);
    net_->to(precision.type);
    round();
  }

  void step(int number) {
    const auto [x, y] = batch_of(number, recipe_.spike());
    const auto gradients = plain_gradients(parameters_, [&, x = x, y = y](int m) {
      const KeyedRandom random(kSeed, "step 0", number, m);
      const int count = Layout::kMicrobatches;
      const auto output = net_(part(x, count, m).to(recipe_.precision.type)).to(torch::kFloat);
      const auto loss = loss_of(output, part(y, count, m));
      trace_.losses.push_back(noted(loss));
      return loss * torch::full({}, scaler_.scale);
    });
    const bool overflow = recipe_.checks() && !all_finite(gradients);
    if (!overflow) {
      update(gradients);
    } else if (recipe_.max_norm > 0) {
      trace_.norms.push_back(-1);
    }
    scaler_.update(overflow);
    trace_.skipped.push_back(overflow);
    trace_.scales.push_back(scaler_.scale);
  }

  Trace finish() {
    trace_.weights = state_of(*net_);
    for (const auto& item : net_->named_parameters()) {
      for (size_t i = 0; i < parameters_.size(); ++i) {
        const bool has_master = recipe_.precision.is_half() && item.key() != "unused";
        if (has_master && parameters_[i].is_same(item.value())) {
          trace_.masters[item.key()] = masters_[i];
        }
      }
    }
    return trace_;
  }

 private:
  void update(const Tensors& gradients) {
    if (recipe_.scales()) scale_all(gradients, static_cast<float>(1 / scaler_.scale));
    for (size_t i = 0; i < parameters_.size(); ++i) masters_[i].mutable_grad() = gradients[i];
    if (recipe_.max_norm > 0) {
      trace_.norms.push_back(
          torch::nn::utils::clip_grad_norm_(masters_, recipe_.max_norm, recipe_.norm_type));
      EXPECT_GT(trace_.norms.back(), recipe_.max_norm);
    }
    optimizer_->step();
    round();
  }

  void round() {
    torch::NoGradGuard no_grad;
    for (size_t i = 0; i < parameters_.size(); ++i) parameters_[i].copy_(masters_[i]);
  }

  Recipe recipe_;
  PlainScaler scaler_;
  Net net_ = make_net();
  Tensors parameters_, masters_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
  Trace trace_;
};

inline Trace train_plain(const Recipe& recipe) {
  PlainTraining training(recipe);
  for (int i = 0; i < kSteps; ++i) training.step(i);
  return training.finish();
}

/// Where a run on ranks begins and ends, and its checkpoints.
struct Span {
  int first = 0, last = kSteps;
  std::string load = {}, save = {};
};

/// Adds the masters that a rank has, by name; not of the parameter that is never trained.
inline void add_masters(const OptimizerCore& optimizer, Named& masters, std::mutex& mutex) {
  const auto state = optimizer.impl().local_state();
  const std::lock_guard lock(mutex);
  for (const auto& [name, param] : state.params) {
    const auto found = param.tensors.find("master");
    if (found == param.tensors.end() || name == "unused") continue;
    EXPECT_EQ(found->second.scalar_type(), torch::kFloat);
    masters[name] = found->second;
  }
}

inline Trace train_ranks(const Layout& layout, const Recipe& recipe, const Span& span = {}) {
  Trace trace;
  Losses losses(trace);
  std::mutex mutex;
  std::vector<Net> nets;
  for (int i = 0; i < layout.ranks(); ++i) nets.push_back(make_net());
  run_as_threads(layout.ranks(), with_precision(config_of(layout), recipe.precision), [&] {
    DistributedModel<Net> model(nets[rank()]);
    const auto plain = recipe.optimizer(model->parameters());
    auto optimizer = distributed(*plain);
    if (recipe.scales()) optimizer.scale_loss(recipe.scale);
    if (!span.load.empty()) smp::load(span.load, model, optimizer, LoadOptions().convert(true));
    auto train = step([&](torch::Tensor x, torch::Tensor y) {
      auto loss = loss_of(model(x), y);
      model->backward(loss);
      return loss;
    });
    for (int i = span.first; i < span.last; ++i) {
      const auto [x, y] = batch_of(i, recipe.spike());
      optimizer.zero_grad(i % 2 == 0);
      losses.note(i, train(own(x), own(y)));
      for (const auto& item : model->virtual_named_parameters()) {
        if (!item.value().grad().defined()) continue;
        EXPECT_EQ(item.value().grad().scalar_type(), torch::kFloat) << item.key();
      }
      const bool clips = recipe.max_norm > 0;
      const double norm =
          clips ? optimizer.clip_master_grads(recipe.max_norm, recipe.norm_type) : 0;
      EXPECT_TRUE(!clips || optimizer.overflow() == (norm == -1));
      optimizer.step();
      const std::lock_guard lock(mutex);
      const auto done = static_cast<int>(trace.scales.size());
      if (clips && rank() == 0) trace.norms.push_back(norm);
      if (done == i - span.first) {
        trace.scales.push_back(optimizer.loss_scale());
        trace.skipped.push_back(optimizer.overflow());
      }
      EXPECT_EQ(trace.scales.back(), optimizer.loss_scale());  // the same on all ranks
      EXPECT_EQ(trace.skipped.back(), optimizer.overflow());
    }
    add_masters(optimizer, trace.masters, mutex);
    if (!span.save.empty()) smp::save(span.save, model, optimizer);
    const auto state = to_map(model->state_dict());
    const std::lock_guard lock(mutex);
    trace.weights = state;
  });
  return trace;
}

/// Joins the traces of two runs, one after the other, to that of a single run.
inline Trace joined(Trace first, const Trace& second) {
  for (size_t i = 0; i < first.losses.size(); ++i) {
    if (!first.losses[i].defined()) first.losses[i] = second.losses[i];
  }
  first.weights = second.weights;
  first.masters = second.masters;
  const auto append = [](auto& to, const auto& from) {
    to.insert(to.end(), from.begin(), from.end());
  };
  append(first.scales, second.scales);
  append(first.skipped, second.skipped);
  append(first.norms, second.norms);
  return first;
}

}  // namespace smp::testing::precision
