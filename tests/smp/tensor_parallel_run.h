// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <type_traits>
#include <vector>

#include "runtime/runtime.h"
#include "tests/smp/tensor_parallel.h"
#include "tests/smp/training_case.h"

/// Training a language model on ranks that divide its layers, and in one plain process.
namespace smp::testing {

constexpr int kSteps = 2;  // one that is captured, and another with the updated weights and state
constexpr double kMaxNorm = 0.5;

template <class Optimizer, class Options>
MakeOptimizer optimizer_with(const Options& options) {
  return [options](const Tensors& parameters) {
    return std::make_unique<Optimizer>(parameters, options);
  };
}

inline const torch::optim::SGDOptions kOptions = torch::optim::SGDOptions(0.5).momentum(0.9);
inline const MakeOptimizer kSgd = optimizer_with<torch::optim::SGD>(kOptions);

/// The batch of all ranks together in a step: the result of a net's `step_batch`, tokens otherwise.
template <class Net, class = void>
struct BatchOf {
  static Tensors make(int number) { return token_batch(number); }
};

template <class Net>
struct BatchOf<Net, std::void_t<decltype(Net::step_batch(0))>> {
  static Tensors make(int number) { return Net::step_batch(number); }
};

/// The results of a run, and how ranks divided the net.
struct Outcome : Trace {
  std::set<std::string> divided = {};  // names of parameters
  std::string report = {};
};

/// How many of the streams of activations that a report names are divided.
inline int divided_streams(const std::string& report) {
  const size_t begin = report.find("activations between divided layers");
  if (begin == std::string::npos) return 0;
  const std::string streams =
      report.substr(begin, report.find("Of a microbatch a rank keeps", begin) - begin);
  int count = 0;
  for (size_t at = 0; (at = streams.find("divided along dimension", at)) != std::string::npos;
       ++at) {
    ++count;
  }
  return count;
}

/// A net in float64, trained on ranks of a layout. `prepare` changes the net of every run.
template <class Net>
TrainingCase<std::shared_ptr<Net>, WrappedRecipe> tensor_parallel_case(
    const TensorLayout& layout, const std::function<void(Net&)>& prepare,
    const MakeOptimizer& optimizer) {
  const auto make = [prepare] {
    auto net = std::make_shared<Net>();
    net->to(torch::kDouble);
    prepare(*net);
    return net;
  };
  TrainingCase<std::shared_ptr<Net>, WrappedRecipe> result(make, {optimizer});
  result.batch = [](int step) { return BatchOf<Net>::make(step); };
  result.config = config_of(layout);
  result.ranks = layout.ranks();
  result.microbatches = kMicrobatches;
  result.steps = kSteps;
  result.max_norm = kMaxNorm;
  // The others get the values of the first replica's first stage.
  result.seed = [] { return rdp_rank() == 0 && pp_rank() == 0 ? 5 : 6 + rank(); };
  return result;
}

template <class Net>
Outcome run_plain(
    const std::function<void(Net&)>& prepare = [](Net&) {}, const MakeOptimizer& make = kSgd) {
  return {tensor_parallel_case<Net>({1}, prepare, make).run_plain()};
}

/// The same on the ranks of a layout. `prepare` gets each rank's net before it is wrapped; `more`
/// changes the configuration.
template <class Net>
Outcome run_on_ranks(
    const TensorLayout& layout, const std::function<void(Net&)>& prepare = [](Net&) {},
    const std::function<Config(Config)>& more = [](Config config) { return config; },
    const MakeOptimizer& make = kSgd) {
  auto training = tensor_parallel_case<Net>(layout, prepare, make);
  training.config = more(training.config);
  Outcome result;
  std::mutex mutex;
  training.at_end = [&](auto& rank) {
    const std::lock_guard lock(mutex);
    for (const auto* entry : runtime::Runtime::get().table().divided()) {
      result.divided.insert(entry->name);
    }
    if (result.report.empty()) result.report = rank.model->tensor_parallelism_report();
  };
  static_cast<Trace&>(result) = training.run_on_ranks();
  return result;
}

}  // namespace smp::testing
