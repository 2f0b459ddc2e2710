// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/torch.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "smp/detail/structure.h"
#include "smp/smp.h"
#include "tests/smp/oracle.h"
#include "tests/zoo/zoo.h"

/// Lets one program run as plain libtorch and over ranks: see zoo.h.
namespace smp::zoo {

using testing::Named;
using testing::Tensors;

/// Everything a run leaves behind, by name. Ranks may record at the same time; tensors of several
/// of them must be equal.
class Trace {
 public:
  void record(const std::string& what, const torch::Tensor& tensor);
  void record(const std::string& what, const Named& tensors);

  /// Keeps the differences between ranks in words.
  std::vector<std::string> contradictions() const;
  const Named& tensors() const { return tensors_; }

  /// The graph of the first step function and its plan; set by one rank.
  std::shared_ptr<const graph::Graph> first_graph;
  std::shared_ptr<const partitioner::Plan> first_plan;

 private:
  std::mutex mutex_;
  Named tensors_;
  std::vector<std::string> contradictions_;
};

/// Calls `visit(tensors by microbatch)` for every StepOutput in a step's result.
template <class T, class Visit>
void for_each_output(const T& value, const Visit& visit) {
  if constexpr (std::is_same_v<T, StepOutput>) {
    visit(value.outputs());
  } else if constexpr (detail::Parts<T>::kShape != detail::Shape::kOpaque) {
    detail::Parts<T>::visit(value, [&](const auto& part) { for_each_output(part, visit); });
  }
}

/// A model of a run: the module itself, or wrapped for its ranks.
template <class Net>
class Model {
 public:
  Model(Net net, std::string name, bool plain) : net_(std::move(net)), name_(std::move(name)) {
    if (!plain) distributed_.emplace(net_, ModelOptions().name(name_));
  }

  template <class... Arguments>
  auto operator()(Arguments&&... arguments) {
    return distributed_ ? (*distributed_)(std::forward<Arguments>(arguments)...)
                        : net_->forward(std::forward<Arguments>(arguments)...);
  }
  void backward(const torch::Tensor& loss) {
    if (distributed_) {
      (*distributed_)->backward(loss);
    } else {
      loss.backward();
    }
  }
  void train() { net_->train(); }
  void eval() { net_->eval(); }

  Net& net() { return net_; }
  const std::string& name() const { return name_; }
  Tensors parameters() const { return testing::unique_parameters(*net_); }

  /// Gradients (those defined), parameters and buffers that are on this rank, by name.
  Named local_gradients() const {
    Named result;
    for (const auto& [name, parameter] : local_parameters()) {
      if (parameter.grad().defined()) result[name] = parameter.grad();
    }
    return result;
  }
  Named local_values() const {
    Named result = local_parameters();
    result.merge(testing::to_map(distributed_ ? (*distributed_)->local_named_buffers()
                                              : net_->named_buffers()));
    return result;
  }
  /// All parameters and buffers; collective.
  Named state() const {
    return distributed_ ? testing::to_map((*distributed_)->state_dict()) : testing::state_of(*net_);
  }

 private:
  Named local_parameters() const {
    return testing::to_map(distributed_ ? (*distributed_)->local_named_parameters()
                                        : net_->named_parameters());
  }

  Net net_;
  std::string name_;
  std::optional<DistributedModel<Net>> distributed_;
};

/// An optimizer of a run, which notes the tensors that it works on.
template <class Base>
class Optimizer {
 public:
  Optimizer(std::unique_ptr<Base> optimizer, std::function<void(const char*)> note)
      : optimizer_(std::move(optimizer)), note_(std::move(note)) {}

  void zero_grad() { optimizer_->zero_grad(); }
  void step() {
    note_("gradient");
    optimizer_->step();
    note_("value");
  }

 private:
  std::unique_ptr<Base> optimizer_;
  std::function<void(const char*)> note_;
};

template <class Function>
class StepFunction;

/// One run of a program on one rank.
class Run {
 public:
  /// `plain` holds the initial values; null: this is the plain run. `by_hand`: pins count.
  Run(Trace& trace, const Trace* plain, bool by_hand);

  bool is_plain() const { return plain_ == nullptr; }

  /// A model of the program. Its initial values are those of the plain run.
  template <class Net>
  Model<Net> model(Net net, const std::string& name = "") {
    start(*net, name);
    Model<Net> model(std::move(net), name, is_plain());
    finally_.push_back(
        [this, model] { trace_.record(prefix(model) + "at the end", model.state()); });
    return model;
  }

  /// Where the program is divided by hand, pins a module to a partition, or to the last one where
  /// there are fewer; elsewhere nothing.
  template <class Net>
  void pin(const Net& net, int partition) const {
    if (by_hand_) set_partition(net, existing(partition));
  }
  /// The same for modules made or called while the result lives.
  [[nodiscard]] std::unique_ptr<PartitionScope> pin_scope(int partition) const {
    return by_hand_ ? std::make_unique<PartitionScope>(existing(partition)) : nullptr;
  }

  template <class Base, class Net, class Options>
  Optimizer<Base> optimizer(Model<Net>& model, const Options& options) {
    auto optimizer =
        is_plain() ? std::make_unique<Base>(model.parameters(), options)
                   : std::make_unique<DistributedOptimizer<Base>>(model.parameters(), options);
    return {std::move(optimizer), [this, model, update = 0](const char* what) mutable {
              const bool gradient = std::string(what) == "gradient";
              update += gradient;
              trace_.record(prefix(model) + what + " in update " + std::to_string(update),
                            gradient ? model.local_gradients() : model.local_values());
            }};
  }

  template <class Function>
  StepFunction<Function> step(Function function, StepOptions options = {}) {
    return {*this, std::move(function), std::move(options), step_functions_++};
  }

  /// Data made outside of step functions, the same on all ranks and in all runs.
  torch::Tensor randn(at::IntArrayRef sizes) { return torch::randn(sizes, generator_); }
  torch::Tensor rand(at::IntArrayRef sizes) { return torch::rand(sizes, generator_); }
  torch::Tensor randint(int64_t low, int64_t high, at::IntArrayRef sizes) {
    return torch::randint(low, high, sizes, generator_, torch::kLong);
  }

  /// Plain only: runs `microbatch(m)` for each under its random streams and averages gradients.
  void run_microbatches(int step_function, int call, int count,
                        const std::function<void(int)>& microbatch);
  Trace& trace() { return trace_; }
  /// Records the models' values; the end of a program.
  void finish();

 private:
  template <class Net>
  static std::string prefix(const Model<Net>& model) {
    return model.name().empty() ? "" : model.name() + " ";
  }
  static int existing(int partition) { return std::min(partition, pp_size() - 1); }
  void start(torch::nn::Module& net, const std::string& name);

  Trace& trace_;
  const Trace* plain_;
  bool by_hand_;
  at::Generator generator_;
  Tensors parameters_;
  int step_functions_ = 0;
  std::vector<std::function<void()>> finally_;
};

/// A step function of a run. Over ranks it is `smp::step`; in the plain run it cuts the batch
/// itself and calls the function for one microbatch after the other.
template <class Function>
class StepFunction {
 public:
  StepFunction(Run& run, Function function, StepOptions options, int ordinal)
      : run_(&run),
        function_(std::move(function)),
        options_(std::move(options)),
        ordinal_(ordinal) {
    if (!run.is_plain()) distributed_.emplace(function_, options_);
  }

  template <class... Arguments>
  auto operator()(Arguments&&... arguments) {
    auto result = run_->is_plain() ? call_plain(arguments...) : (*distributed_)(arguments...);
    const auto name = "step function " + std::to_string(ordinal_) + ", call " +
                      std::to_string(calls_++) + ", output ";
    int position = 0;
    for_each_output(result, [&](const Tensors& by_microbatch) {
      for (size_t m = 0; m < by_microbatch.size(); ++m) {
        run_->trace().record(name + std::to_string(position) + ", microbatch " + std::to_string(m),
                             by_microbatch[m]);
      }
      ++position;
    });
    return result;
  }

 private:
  template <class... Arguments>
  auto call_plain(const Arguments&... arguments) {
    using Whole = std::tuple<detail::AsArgument<Arguments>...>;
    using Result = std::decay_t<std::invoke_result_t<Function&, detail::AsArgument<Arguments>&...>>;
    const int count =
        options_.microbatches() > 0 ? static_cast<int>(options_.microbatches()) : kMicrobatches;
    std::vector<Result> results;
    std::vector<Tensors> outputs;
    run_->run_microbatches(ordinal_, calls_, count, [&](int m) {
      Whole mine(arguments...);
      cut(mine, count, m, std::make_index_sequence<sizeof...(Arguments)>());
      results.push_back(std::apply(function_, mine));
      size_t position = 0;
      detail::for_each_tensor(std::as_const(results.back()), [&](const torch::Tensor& tensor) {
        if (outputs.size() == position) outputs.emplace_back();
        outputs[position++].push_back(tensor.detach().clone());
      });
    });
    std::vector<const Result*> by_microbatch;
    for (const Result& result : results) by_microbatch.push_back(&result);
    size_t next = 0;
    return detail::gather(by_microbatch, [&] { return outputs[next++]; });
  }

  template <class Whole, size_t... I>
  void cut([[maybe_unused]] Whole& whole, [[maybe_unused]] int count, [[maybe_unused]] int m,
           std::index_sequence<I...>) const {
    (cut_argument(std::get<I>(whole), static_cast<int>(I), count, m), ...);
  }

  template <class T>
  void cut_argument(T& argument, int position, int count, int m) const {
    for (int whole : options_.non_split_inputs()) {
      if (whole == position) return;
    }
    const auto axis = options_.input_split_axes().find(position);
    const int64_t along = axis == options_.input_split_axes().end() ? 0 : axis->second;
    detail::for_each_tensor(
        argument, [&](torch::Tensor& tensor) { tensor = testing::part(tensor, count, m, along); });
  }

  Run* run_;
  Function function_;
  StepOptions options_;
  int ordinal_;
  int calls_ = 0;
  std::optional<Step<Function>> distributed_;
};

/// The usual program: trains, evaluates and trains again. `batch()` gives a tuple of arguments for
/// both step functions.
template <class Model, class Optimizer, class Train, class Evaluate, class Batch>
void train_and_evaluate(Model& model, Optimizer& optimizer, Train& train, Evaluate& evaluate,
                        const Batch& batch) {
  for (int i = 0; i < 3; ++i) {
    model.train();
    optimizer.zero_grad();
    std::apply(train, batch());
    optimizer.step();
    model.eval();
    std::apply(evaluate, batch());
  }
}

}  // namespace smp::zoo
