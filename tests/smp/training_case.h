// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "smp/smp.h"
#include "tests/smp/lying.h"
#include "tests/smp/oracle.h"

/// A training (a net, a recipe, batches, a layout of ranks) and its runs: in one plain libtorch
/// process, on ranks, and on ranks that save and others that go on.
namespace smp::testing {

/// The results of a run.
struct Trace {
  std::vector<Tensors> losses;       // losses by step; by global microbatch
  std::vector<Named> gradients;      // gradients by step, of whole parameters, before clipping
  std::vector<double> norms;         // norms by step, if gradients are clipped
  std::vector<double> largest;       // norms of order infinity by step, likewise
  std::vector<Tensors> evaluations;  // evaluations after each step; by global microbatch
  Named weights;                     // parameters, and buffers of the first replica
};

/// The same to the bit.
void expect_same(const Trace& got, const Trace& expected);
/// The same up to rounding.
void expect_close(const Trace& got, const Trace& expected, double tolerance = 1e-12);

/// An optimizer and its options; a `DistributedOptimizer` on ranks.
template <class Optimizer, class Options>
struct Recipe {
  Options options;
  bool groups = false;  ///< matrices in the first group, a third of the rate for the rest

  auto plain(const Tensors& parameters) const { return make<Optimizer>(parameters); }
  auto on_rank(const Tensors& parameters) const {
    return make<DistributedOptimizer<Optimizer>>(parameters);
  }

  template <class Made>
  std::unique_ptr<Made> make(const Tensors& parameters) const {
    if (!groups) return std::make_unique<Made>(parameters, options);
    Tensors matrices, others;
    for (const auto& parameter : parameters) {
      (parameter.dim() > 1 ? matrices : others).push_back(parameter);
    }
    auto made = std::make_unique<Made>(matrices, options);
    auto other_options = std::make_unique<Options>(options);
    other_options->set_lr(options.get_lr() / 3);
    made->add_param_group(torch::optim::OptimizerParamGroup(others, std::move(other_options)));
    return made;
  }
};

template <class Optimizer, class Options>
Recipe<Optimizer, Options> recipe(Options options, bool groups = false) {
  return {std::move(options), groups};
}

using MakeOptimizer =
    std::function<std::unique_ptr<torch::optim::Optimizer>(const Tensors& parameters)>;

/// A plain optimizer, which ranks give to `smp::distributed`.
struct WrappedRecipe {
  class OnRank : public DistributedOptimizerRef<torch::optim::Optimizer> {
   public:
    explicit OnRank(std::unique_ptr<torch::optim::Optimizer> plain)
        : DistributedOptimizerRef(*plain), plain_(std::move(plain)) {}

   private:
    std::unique_ptr<torch::optim::Optimizer> plain_;
  };

  MakeOptimizer make;

  auto plain(const Tensors& parameters) const { return make(parameters); }
  auto on_rank(const Tensors& parameters) const {
    return std::make_unique<OnRank>(make(parameters));
  }
};

/// The optimizer whose options a scheduler changes.
inline torch::optim::Optimizer& scheduled(torch::optim::Optimizer& plain) { return plain; }
inline torch::optim::Optimizer& scheduled(WrappedRecipe::OnRank& optimizer) {
  return optimizer.optimizer();
}

template <class Net, class = void>
struct HasCriterion : std::false_type {};
template <class Net>
struct HasCriterion<Net, std::void_t<decltype(&Net::ContainedType::criterion)>> : std::true_type {};

/// Computes the loss like a user's step function: a criterion of the wrapped model's result, where
/// the net has one; else a method of the module.
template <class Net>
torch::Tensor loss_of(DistributedModel<Net>& model, torch::Tensor x, torch::Tensor y) {
  if constexpr (HasCriterion<Net>::value) {
    return Net::ContainedType::criterion(model(x), y);
  } else {
    return model.get_module()->loss(x, y);
  }
}

/// The gradients of this rank's stage, whole; not those of which replicas have pieces.
Named whole_gradients(const ModelCore& model);

/// The buffers of replicas, which one plain net has in turn.
class ReplicaBuffers {
 public:
  ReplicaBuffers(torch::nn::Module& net, int replicas);
  /// Gives the net those of a replica, and keeps those of the one before.
  void use(int replica);

 private:
  torch::nn::Module& net_;
  std::vector<Tensors> values_;
  int current_ = 0;
};

/// Plays ranks, each of which calls the program, as `run_as_threads` does.
using RunRanks =
    std::function<void(int ranks, const Config& config, const std::function<void()>& program)>;

/// Where a run on ranks begins and ends, and its checkpoints.
struct Span {
  int first = 0, last = 0;
  std::string load = {}, save = {};
};

/// `Net` has a method `loss(x, y)`, which a plain process calls.
template <class Net, class Recipe>
struct TrainingCase {
  TrainingCase(std::function<Net()> net, Recipe optimizers)
      : make(std::move(net)), recipe(std::move(optimizers)) {}

  std::function<Net()> make;  ///< called by one rank at a time, with a seed of its own
  Recipe recipe;
  std::function<Tensors(int step)> batch;  ///< inputs and targets of all ranks together
  std::function<Tensors(int step)> evaluation_batch = {};  ///< the same if it is another
  Config config;
  int ranks = 1;
  int microbatches = 1;  ///< microbatches of all ranks together
  int shards = 1;        ///< equal numbers of them, whose sums of gradients a plain process adds up
  int steps = 3;
  double max_norm = 0, norm_type = 2;  ///< gradients are clipped if the norm is not 0
  bool decays = false;                 ///< half the learning rate after every second step
  bool evaluates = true;               ///< after each step
  ModelOptions model_options = {};
  std::function<torch::Tensor(DistributedModel<Net>&, torch::Tensor x, torch::Tensor y)> loss =
      loss_of<Net>;  ///< called in step functions
  RunRanks run_ranks = run_as_threads;
  /// The seed of this rank's net. That of a plain process is 5.
  std::function<int()> seed = [] { return rank() == 0 ? 5 : 6 + rank(); };
  std::function<void(Net&)> prepare = [](Net&) {};  ///< given each rank's net before it is wrapped

  /// A rank of a run.
  class Rank {
   public:
    Rank(const TrainingCase& training, Net made)
        : net(std::move(made)),
          model(net, training.model_options),
          optimizer(training.recipe.on_rank(model->parameters())),
          batch_(training.batch),
          evaluation_batch_(training.evaluation_batch ? training.evaluation_batch : batch_),
          loss_(training.loss),
          prescaled_(training.config.prescaled_batch()),
          train_(smp::step(Loss([this](torch::Tensor x, torch::Tensor y) {
            auto loss = loss_(model, x, y);
            model->backward(loss);
            return loss;
          }))),
          evaluate_(smp::step(
              Loss([this](torch::Tensor x, torch::Tensor y) { return loss_(model, x, y); }))) {}

    /// The number of this rank's batch among those that ranks of a stage are given.
    int number() const { return prescaled_ ? rdp_rank() : dp_rank(); }
    /// Forwards and backwards on this rank's part of the batch of a step.
    StepOutput train(int step) {
      const auto [x, y] = own(batch_(step));
      return train_(x, y);
    }
    StepOutput evaluate(int step) {
      const auto [x, y] = own(evaluation_batch_(step));
      return evaluate_(x, y);
    }
    /// A whole step of training.
    void step(int number) {
      optimizer->zero_grad();
      train(number);
      optimizer->step();
    }

    Net net;
    DistributedModel<Net> model;
    decltype(std::declval<const Recipe&>().on_rank({})) optimizer;

   private:
    using Loss = std::function<torch::Tensor(torch::Tensor, torch::Tensor)>;

    std::pair<torch::Tensor, torch::Tensor> own(const Tensors& whole) const {
      const auto part = [&](const torch::Tensor& tensor) {
        const int64_t size = tensor.size(0) / (prescaled_ ? rdp_size() : dp_size());
        return tensor.narrow(0, number() * size, size);
      };
      return {part(whole[0]), part(whole[1])};
    }

    std::function<Tensors(int step)> batch_, evaluation_batch_;
    std::function<torch::Tensor(DistributedModel<Net>&, torch::Tensor, torch::Tensor)> loss_;
    bool prescaled_;
    Step<Loss> train_, evaluate_;
  };
  /// Called before each step with the net of a process, plain or a rank.
  std::function<void(Net&, int step)> before_step = [](Net&, int) {};
  /// Called on each rank before it loads, if it does.
  std::function<void(Rank&)> before_load = [](Rank&) {};
  /// Called on each rank after each step, one at a time.
  std::function<void(Rank&, int step)> after_step = [](Rank&, int) {};
  /// Called on each rank after the last one.
  std::function<void(Rank&)> at_end = [](Rank&) {};

  Net make_net(int with_seed) const {
    static std::mutex mutex;  // ranks that are threads share the generator
    const std::lock_guard lock(mutex);
    torch::manual_seed(with_seed);
    return make();
  }

  /// Runs microbatches one after the other in this process; each shard has buffers of its own.
  Trace run_plain() const {
    torch::set_num_threads(1);
    Trace trace;
    Net net = make_net(5);
    const auto parameters = unique_parameters(*net);
    const auto optimizer = recipe.plain(parameters);
    torch::optim::StepLR scheduler(*optimizer, 2, 0.5);
    ReplicaBuffers buffers(*net, shards);
    const auto loss_of_microbatch = [&](const Tensors& whole, int m) {
      buffers.use(m / (microbatches / shards));
      return net->loss(part(whole[0], microbatches, m), part(whole[1], microbatches, m));
    };
    for (int i = 0; i < steps; ++i) {
      const auto whole = batch(i);
      before_step(net, i);
      optimizer->zero_grad();
      trace.losses.push_back(plain_backward(parameters, shards, microbatches / shards, [&](int m) {
        const KeyedRandom random(kSeed, "step 0", i, m);
        return loss_of_microbatch(whole, m);
      }));
      trace.gradients.emplace_back();
      for (const auto& item : net->named_parameters()) {
        if (!item.value().grad().defined()) continue;
        trace.gradients.back()[item.key()] = item.value().grad().clone();
      }
      if (max_norm > 0) clip_plain(parameters, trace);
      optimizer->step();
      if (decays) scheduler.step();
      if (!evaluates) continue;
      net->eval();
      torch::NoGradGuard no_grad;
      const auto evaluated = evaluation_batch ? evaluation_batch(i) : whole;
      trace.evaluations.emplace_back();
      for (int m = 0; m < microbatches; ++m) {
        trace.evaluations.back().push_back(loss_of_microbatch(evaluated, m));
      }
      net->train();
    }
    buffers.use(0);
    trace.weights = state_of(*net);
    return trace;
  }

  /// Calls `body` on each rank. Other values of `more_seed` make other nets.
  void on_ranks(const std::function<void(Rank&)>& body, int more_seed = 0) const {
    torch::set_num_threads(1);
    run_ranks(ranks, config, [&] {
      Net net = make_net(seed() + more_seed);
      prepare(net);
      Rank own(*this, std::move(net));
      body(own);
    });
  }

  /// Runs all steps on ranks.
  Trace run_on_ranks() const { return run_on_ranks({0, steps}); }

  /// Runs some steps on ranks. Ranks that have the same results must agree in them.
  Trace run_on_ranks(const Span& span) const {
    Trace trace;
    trace.losses.assign(steps, Tensors(microbatches));
    trace.gradients.resize(steps);
    if (evaluates) trace.evaluations.assign(steps, Tensors(microbatches));
    std::mutex mutex;
    const auto run = [&](Rank& own) {
      torch::optim::StepLR scheduler(scheduled(*own.optimizer), 2, 0.5);
      if (!span.load.empty()) {
        before_load(own);
        EXPECT_EQ(smp::load(span.load, own.model, *own.optimizer).step, span.first);
      }
      Trace alone;  // the norms of this rank
      for (int i = span.first; i < span.last; ++i) {
        before_step(own.net, i);
        own.model->train();
        own.optimizer->zero_grad();
        note(trace.losses[i], own.train(i), own.number(), mutex);
        const auto gradients = whole_gradients(own.model);
        {
          const std::lock_guard lock(mutex);
          for (const auto& [name, gradient] : gradients) {
            note(trace.gradients[i][name], gradient, "gradient of " + name);
          }
        }
        if (max_norm > 0) clip(own.model, alone);
        own.optimizer->step();
        if (decays) scheduler.step();
        if (evaluates) {
          own.model->eval();
          note(trace.evaluations[i], own.evaluate(i), own.number(), mutex);
        }
        const std::lock_guard lock(mutex);
        after_step(own, i);
      }
      at_end(own);
      if (!span.save.empty()) smp::save(span.save, own.model, *own.optimizer);
      finish(own, alone, trace, mutex);
    };
    on_ranks(run, span.first);  // a run that goes on must not depend on the values that it makes
    return trace;
  }

 private:
  /// Notes the result of a rank, which others may have noted.
  static void note(torch::Tensor& place, const torch::Tensor& tensor, const std::string& name) {
    if (place.defined()) expect_equal(tensor, place, name + " on rank " + std::to_string(rank()));
    place = tensor;
  }

  /// The same for the microbatches of the rank's batch, which has a number.
  void note(Tensors& all, const StepOutput& output, int number, std::mutex& mutex) const {
    const auto& own = output.outputs();
    const auto count = static_cast<int>(own.size());
    EXPECT_EQ(static_cast<size_t>(count), static_cast<size_t>(microbatches) / batches());
    auto sum = torch::zeros_like(own[0]);
    for (const auto& one : own) sum += one;
    expect_equal(output.reduce_mean(), sum / count, "mean");
    const std::lock_guard lock(mutex);
    for (int m = 0; m < count; ++m) {
      note(all.at(number * count + m), own[m], "microbatch " + std::to_string(m));
    }
  }

  /// How many batches the ranks of a stage are given.
  size_t batches() const { return config.prescaled_batch() ? rdp_size() : dp_size(); }

  void clip_plain(const Tensors& parameters, Trace& trace) const {
    double largest = 0;
    for (const auto& parameter : parameters) {
      if (!parameter.grad().defined()) continue;
      largest = std::max(largest, parameter.grad().abs().max().template item<double>());
    }
    trace.largest.push_back(largest);
    trace.norms.push_back(torch::nn::utils::clip_grad_norm_(parameters, max_norm, norm_type));
    // A gradient of zero has a zero norm of negative order.
    if (norm_type >= 0) {
      EXPECT_GT(trace.norms.back(), max_norm) << "clipping did nothing";
    }
  }

  void clip(const DistributedModel<Net>& model, Trace& trace) const {
    constexpr double kInfinity = std::numeric_limits<double>::infinity();
    trace.largest.push_back(grad_norm(model, kInfinity).template item<double>());
    const double norm = grad_norm(model, norm_type).template item<double>();
    trace.norms.push_back(clip_grad_norm_(model, max_norm, norm_type));
    EXPECT_EQ(norm, trace.norms.back());
  }

  static void finish(Rank& own, const Trace& alone, Trace& trace, std::mutex& mutex) {
    const auto state = to_map(own.model->state_dict());
    expect_lies_as_said(state);
    const auto parameters = to_map(own.model->named_parameters());
    const std::lock_guard lock(mutex);
    for (const auto& [name, tensor] : state) {
      const bool has = rdp_rank() == 0 || parameters.count(name) == 1;  // or a replica's own buffer
      if (has) note(trace.weights[name], tensor, "value of " + name);
    }
    if (trace.norms.empty()) trace.norms = alone.norms;
    if (trace.largest.empty()) trace.largest = alone.largest;
    EXPECT_EQ(alone.norms, trace.norms) << "rank " << rank();
    EXPECT_EQ(alone.largest, trace.largest) << "rank " << rank();
  }
};

/// Trains until step `at`, saves, and goes on as another case; the results of the latter.
template <class First, class Second>
Trace save_and_resume(const First& first, const Second& second, int at, const std::string& path) {
  first.run_on_ranks({0, at, {}, path});
  return second.run_on_ranks({at, second.steps, path, {}});
}

/// Batches of so many samples, one a step, that `Net` draws one after the other.
template <class Net>
std::function<Tensors(int)> batches_of(int64_t size, int steps) {
  torch::manual_seed(23);
  std::vector<Tensors> batches;
  for (int i = 0; i < steps; ++i) batches.push_back(Net::ContainedType::batch(size));
  return [batches](int step) { return batches.at(static_cast<size_t>(step)); };
}

}  // namespace smp::testing
