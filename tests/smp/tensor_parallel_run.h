// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <type_traits>
#include <vector>

#include "graph/absent.h"
#include "runtime/parameters/join_parts.h"
#include "runtime/runtime.h"
#include "tests/smp/tensor_parallel.h"

/// Training a language model on ranks that divide its layers, and in one plain process.
namespace smp::testing {

constexpr int kSteps = 3;
constexpr double kMaxNorm = 0.5;

using MakeOptimizer =
    std::function<std::unique_ptr<torch::optim::Optimizer>(const Tensors& parameters)>;

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

/// The results of a run.
struct Outcome {
  std::vector<Tensors> losses;   // losses by step, then global microbatch
  std::vector<Named> gradients;  // gradients by step, of whole parameters
  std::vector<double> norms;     // norms by step
  std::vector<double> largest;   // norms of order infinity by step
  Tensors evaluations;           // evaluations by global microbatch, at the end
  Named weights;
  std::set<std::string> divided;  // names of parameters
  std::string report;
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

template <class Net>
Outcome run_plain(
    const std::function<void(Net&)>& prepare = [](Net&) {}, const MakeOptimizer& make = kSgd) {
  Outcome result;
  const auto net = make_model<Net>(5);
  prepare(*net);
  const auto parameters = unique_parameters(*net);
  const auto optimizer = make(parameters);
  const auto loss_of = [&](const Tensors& batch, int m) {
    return net->loss(part(batch[0], kMicrobatches, m), part(batch[1], kMicrobatches, m));
  };
  for (int step = 0; step < kSteps; ++step) {
    optimizer->zero_grad();
    const auto batch = BatchOf<Net>::make(step);
    result.losses.push_back(plain_backward(parameters, 1, kMicrobatches, [&](int m) {
      const KeyedRandom random(kSeed, "step 0", step, m);
      return loss_of(batch, m);
    }));
    result.gradients.emplace_back();
    for (const auto& item : net->named_parameters()) {
      if (!item.value().grad().defined()) continue;
      result.gradients.back()[item.key()] = item.value().grad().clone();
    }
    double largest = 0;
    for (const auto& parameter : parameters) {
      if (!parameter.grad().defined()) continue;
      largest = std::max(largest, parameter.grad().abs().max().template item<double>());
    }
    result.largest.push_back(largest);
    result.norms.push_back(torch::nn::utils::clip_grad_norm_(parameters, kMaxNorm));
    optimizer->step();
  }
  net->eval();
  torch::NoGradGuard no_grad;
  for (int m = 0; m < kMicrobatches; ++m) {
    result.evaluations.push_back(loss_of(BatchOf<Net>::make(0), m));
  }
  result.weights = state_of(*net);
  return result;
}

/// The gradients of this rank's stage, whole; not those of which replicas have pieces.
inline Named whole_gradients(const ModelCore& model) {
  Named result;
  for (const auto& item : model.local_named_parameters()) {
    const auto gradient = item.value().grad();
    if (!gradient.defined() || graph::is_absent(gradient)) continue;
    auto& runtime = runtime::Runtime::get();
    const auto& split = runtime.table().at(item.value()).split;
    result[item.key()] =
        split ? runtime::join_on_all(*runtime.group(CommGroup::kTp), *split, gradient)
              : gradient.clone();
  }
  return result;
}

/// The same on the ranks of a layout. `prepare` gets each rank's net before it is wrapped; `more`
/// changes the configuration.
template <class Net>
Outcome run_on_ranks(
    const TensorLayout& layout, const std::function<void(Net&)>& prepare = [](Net&) {},
    const std::function<Config(Config)>& more = [](Config config) { return config; },
    const MakeOptimizer& make = kSgd) {
  Outcome result;
  result.losses.assign(kSteps, Tensors(kMicrobatches));
  result.gradients.resize(kSteps);
  result.evaluations.resize(kMicrobatches);
  std::mutex mutex;
  torch::set_num_threads(1);
  run_as_threads(layout.ranks(), more(config_of(layout)), [&] {
    // The others get the values of the first replica's first stage.
    const auto net = make_model<Net>(rdp_rank() == 0 && pp_rank() == 0 ? 5 : 6 + rank());
    prepare(*net);
    DistributedModel<std::shared_ptr<Net>> model(net);
    const auto plain = make(model->parameters());
    auto optimizer = distributed(*plain);
    const auto loss_of = [&](torch::Tensor x, torch::Tensor y) { return net->loss(x, y); };
    auto train = step([&](torch::Tensor x, torch::Tensor y) {
      auto loss = loss_of(x, y);
      model->backward(loss);
      return loss;
    });
    auto evaluate = step(loss_of);
    const int first = (layout.prescaled ? rdp_rank() : dp_rank()) *
                      static_cast<int>(runtime::Runtime::get().config().microbatches());
    const auto note = [&](Tensors& all, const StepOutput& output) {
      const std::lock_guard lock(mutex);
      for (size_t m = 0; m < output.outputs().size(); ++m) {
        auto& place = all[first + m];
        if (place.defined()) {
          EXPECT_TRUE(torch::equal(place, output.outputs()[m])) << m;
        }
        place = output.outputs()[m];
      }
    };
    std::vector<double> norms, largest;
    for (int i = 0; i < kSteps; ++i) {
      optimizer.zero_grad();
      const auto batch = BatchOf<Net>::make(i);
      const auto losses = train(own_batch(layout, batch[0]), own_batch(layout, batch[1]));
      EXPECT_EQ(losses.outputs().size(), kMicrobatches / layout.batches());
      note(result.losses[i], losses);
      const auto gradients = whole_gradients(model);
      {
        const std::lock_guard lock(mutex);
        for (const auto& [name, gradient] : gradients) {
          auto& known = result.gradients[i][name];
          if (known.defined()) {
            EXPECT_TRUE(torch::equal(known, gradient)) << name;
          }
          known = gradient;
        }
      }
      largest.push_back(
          grad_norm(model, std::numeric_limits<double>::infinity()).template item<double>());
      norms.push_back(clip_grad_norm_(model, kMaxNorm));
      optimizer.step();
    }
    model->eval();
    const auto batch = BatchOf<Net>::make(0);
    note(result.evaluations, evaluate(own_batch(layout, batch[0]), own_batch(layout, batch[1])));
    const auto state = to_map(model->state_dict());
    const std::lock_guard lock(mutex);
    for (const auto* entry : runtime::Runtime::get().table().divided()) {
      result.divided.insert(entry->name);
    }
    if (result.weights.empty()) {
      result.weights = state;
      result.report = model->tensor_parallelism_report();
      result.norms = norms;
      result.largest = largest;
    }
    EXPECT_EQ(norms, result.norms) << "rank " << rank();
    EXPECT_EQ(largest, result.largest) << "rank " << rank();
    expect_equal(state, result.weights, "value");
  });
  return result;
}

inline void expect_close(const Outcome& got, const Outcome& expected, double tolerance = 1e-12) {
  for (int step = 0; step < kSteps; ++step) {
    const std::string in_step = " in step " + std::to_string(step);
    for (int m = 0; m < kMicrobatches; ++m) {
      expect_close(got.losses[step][m], expected.losses[step][m],
                   "loss of microbatch " + std::to_string(m) + in_step, tolerance);
    }
    expect_close(got.gradients[step], expected.gradients[step], "gradient" + in_step, tolerance);
    EXPECT_NEAR(got.norms[step], expected.norms[step], tolerance * expected.norms[step]) << in_step;
    EXPECT_GT(expected.norms[step], kMaxNorm) << "clipping did nothing" << in_step;
    EXPECT_NEAR(got.largest[step], expected.largest[step], tolerance * expected.largest[step]);
  }
  for (int m = 0; m < kMicrobatches; ++m) {
    expect_close(got.evaluations[m], expected.evaluations[m],
                 "evaluation of microbatch " + std::to_string(m), tolerance);
  }
  expect_close(got.weights, expected.weights, "value", tolerance);
}

inline void expect_same(const Outcome& got, const Outcome& expected) {
  for (int step = 0; step < kSteps; ++step) {
    expect_equal(got.losses[step], expected.losses[step], "loss");
    expect_equal(got.gradients[step], expected.gradients[step], "gradient");
  }
  EXPECT_EQ(got.norms, expected.norms);
  expect_equal(got.evaluations, expected.evaluations, "evaluation");
  expect_equal(got.weights, expected.weights, "value");
}

}  // namespace smp::testing
