// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <map>
#include <mutex>
#include <ostream>
#include <string>
#include <type_traits>
#include <vector>

#include "smp/smp.h"

/// The oracle of parity: training on ranks and the same in one plain libtorch process, and the
/// comparison of the two, bit for bit.
namespace smp::testing::parity {

using Tensors = std::vector<torch::Tensor>;
using Named = std::map<std::string, torch::Tensor>;

struct Layout {
  int stages;
  int replicas;
  int microbatches;  // microbatches of one replica
  std::string pipeline;
  bool fusion = false;  // gradient_accumulation_fusion
  int steps = 3;
  std::string placement = "cluster";

  Layout with_steps(int count) const {
    Layout result = *this;
    result.steps = count;
    return result;
  }
};

inline std::ostream& operator<<(std::ostream& out, const Layout& layout) {
  return out << layout.stages << " stages x " << layout.replicas << " replicas, "
             << layout.microbatches << " microbatches, " << layout.pipeline
             << (layout.fusion ? ", fused" : "")
             << (layout.placement == "cluster" ? "" : ", " + layout.placement);
}

/// The results of a run, to be compared bit for bit.
struct Trace {
  std::vector<Tensors> losses;   // losses by step; by global microbatch
  std::vector<Named> gradients;  // gradients by step
  Tensors evaluations;           // evaluations by step; of replica 0
  Named weights;
};

constexpr uint64_t kSeed = 11;

template <class Net>
std::vector<Tensors> make_batches(const Layout& layout) {
  torch::manual_seed(23);
  std::vector<Tensors> batches;
  const int64_t size = 2 * layout.replicas * layout.microbatches;
  for (int i = 0; i < layout.steps; ++i) batches.push_back(Net::ContainedType::batch(size));
  return batches;
}

inline void expect_same(const Named& got, const Named& expected, const std::string& what) {
  ASSERT_EQ(got.size(), expected.size()) << what;
  for (const auto& [name, tensor] : expected) {
    ASSERT_EQ(got.count(name), 1u) << what << " " << name;
    EXPECT_TRUE(torch::equal(got.at(name), tensor))
        << what << " of " << name << ": largest difference "
        << (got.at(name) - tensor).abs().max().item<double>();
  }
}

inline void expect_same(const Trace& got, const Trace& expected) {
  ASSERT_EQ(got.losses.size(), expected.losses.size());
  for (size_t step = 0; step < expected.losses.size(); ++step) {
    ASSERT_EQ(got.losses[step].size(), expected.losses[step].size());
    for (size_t m = 0; m < expected.losses[step].size(); ++m) {
      EXPECT_TRUE(torch::equal(got.losses[step][m], expected.losses[step][m]))
          << "loss of step " << step << ", microbatch " << m << ": "
          << got.losses[step][m].item<double>() << " against "
          << expected.losses[step][m].item<double>();
    }
    expect_same(got.gradients[step], expected.gradients[step],
                "gradient in step " + std::to_string(step));
    EXPECT_TRUE(torch::equal(got.evaluations[step], expected.evaluations[step]))
        << "evaluation after step " << step;
  }
  expect_same(got.weights, expected.weights, "value");
}

/// Plain libtorch on one process: microbatches one after the other, gradients summed as
/// documented (microbatches in order in a shard, shards in order, divided once). Each replica has
/// buffers of its own.
template <class Net, class Optimizer, class Options>
Trace run_plain(const std::function<Net()>& make, const Options& options, const Layout& layout,
                const std::vector<Tensors>& batches) {
  torch::manual_seed(5);
  Net net = make();
  Tensors parameters;
  for (const auto& parameter : net->parameters()) {
    bool seen = false;
    for (const auto& other : parameters) seen |= other.is_same(parameter);
    if (!seen) parameters.push_back(parameter);
  }
  Optimizer optimizer(parameters, options);
  std::vector<Tensors> buffers(layout.replicas);
  for (auto& own : buffers) {
    for (const auto& buffer : net->buffers()) own.push_back(buffer.clone());
  }
  const auto use_buffers = [&](int replica) {
    torch::NoGradGuard no_grad;
    auto current = net->buffers();
    for (size_t i = 0; i < current.size(); ++i) current[i].copy_(buffers[replica][i]);
  };
  const auto keep_buffers = [&](int replica) {
    auto current = net->buffers();
    for (size_t i = 0; i < current.size(); ++i) buffers[replica][i] = current[i].clone();
  };
  Trace trace;
  for (int step = 0; step < layout.steps; ++step) {
    const auto& batch = batches[step];
    const int64_t count = layout.replicas * layout.microbatches;
    const int64_t size = batch[0].size(0) / count;
    trace.losses.emplace_back();
    Tensors total(parameters.size());
    for (int replica = 0; replica < layout.replicas; ++replica) {
      use_buffers(replica);
      Tensors sum(parameters.size());
      for (int m = 0; m < layout.microbatches; ++m) {
        const int64_t global = replica * layout.microbatches + m;
        net->zero_grad();
        const KeyedRandom random(kSeed, "step 0", step, global);
        auto loss = net->loss(batch[0].narrow(0, global * size, size).clone(),
                              batch[1].narrow(0, global * size, size).clone());
        loss.backward();
        trace.losses[step].push_back(loss.detach());
        for (size_t i = 0; i < parameters.size(); ++i) {
          const auto gradient = parameters[i].grad();
          if (!gradient.defined()) continue;
          sum[i] = sum[i].defined() ? sum[i] + gradient : gradient.clone();
        }
      }
      keep_buffers(replica);
      for (size_t i = 0; i < parameters.size(); ++i) {
        if (sum[i].defined()) total[i] = total[i].defined() ? total[i] + sum[i] : sum[i];
      }
    }
    trace.gradients.emplace_back();
    for (size_t i = 0; i < parameters.size(); ++i) {
      if (total[i].defined()) parameters[i].mutable_grad() = total[i] / count;
    }
    for (const auto& item : net->named_parameters()) {
      if (item.value().grad().defined()) {
        trace.gradients[step][item.key()] = item.value().grad().clone();
      }
    }
    optimizer.step();
    use_buffers(0);
    net->eval();
    torch::NoGradGuard no_grad;
    auto sum = torch::zeros({});
    for (int m = 0; m < layout.microbatches; ++m) {
      sum += net->loss(batch[0].narrow(0, m * size, size).clone(),
                       batch[1].narrow(0, m * size, size).clone());
    }
    trace.evaluations.push_back(sum / layout.microbatches);
    net->train();
  }
  use_buffers(0);
  for (const auto& item : net->named_parameters()) trace.weights[item.key()] = item.value().clone();
  for (const auto& item : net->named_buffers()) trace.weights[item.key()] = item.value().clone();
  return trace;
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

/// Plays ranks, each of which calls the program, as `run_as_threads` does.
using RunRanks =
    std::function<void(int ranks, const Config& config, const std::function<void()>& program)>;

template <class Net, class Optimizer, class Options>
Trace run_distributed(const std::function<Net()>& make, const Options& options,
                      const Layout& layout, const std::vector<Tensors>& batches,
                      const RunRanks& run_ranks = run_as_threads) {
  Trace trace;
  trace.losses.assign(layout.steps, Tensors(layout.replicas * layout.microbatches));
  trace.gradients.resize(layout.steps);
  trace.evaluations.resize(layout.steps);
  std::mutex mutex;
  const auto config = Config()
                          .partitions(layout.stages)
                          .microbatches(layout.microbatches)
                          .pipeline(layout.pipeline)
                          .gradient_accumulation_fusion(layout.fusion)
                          .ddp(layout.replicas > 1)
                          .placement_strategy(layout.placement)
                          .seed(kSeed)
                          .timeout_seconds(60);
  torch::manual_seed(5);
  std::vector<Net> nets;
  const int ranks = layout.stages * layout.replicas;
  // Rank 0's weights count; the others' are overwritten.
  for (int i = 0; i < ranks; ++i) nets.push_back(make());
  run_ranks(ranks, config, [&] {
    DistributedModel<Net> model(nets[rank()]);
    DistributedOptimizer<Optimizer> optimizer(model->parameters(), options);
    auto train = step([&](torch::Tensor x, torch::Tensor y) {
      auto loss = loss_of(model, x, y);
      model->backward(loss);
      return loss;
    });
    auto evaluate = step([&](torch::Tensor x, torch::Tensor y) { return loss_of(model, x, y); });
    for (int i = 0; i < layout.steps; ++i) {
      const int64_t size = batches[i][0].size(0) / layout.replicas;
      const auto x = batches[i][0].narrow(0, dp_rank() * size, size);
      const auto y = batches[i][1].narrow(0, dp_rank() * size, size);
      model->train();
      optimizer.zero_grad();
      const auto losses = train(x, y);
      std::map<const void*, torch::Tensor> gradients;
      {
        const std::lock_guard<std::mutex> lock(mutex);
        for (int m = 0; m < layout.microbatches; ++m) {
          auto& place = trace.losses[i][dp_rank() * layout.microbatches + m];
          if (place.defined()) {
            EXPECT_TRUE(torch::equal(place, losses.outputs()[m]));
          }
          place = losses.outputs()[m];
        }
        for (const auto& item : model->local_named_parameters()) {
          if (!item.value().grad().defined()) continue;
          const auto gradient = item.value().grad().clone();
          auto& known = trace.gradients[i][item.key()];
          if (known.defined()) {
            EXPECT_TRUE(torch::equal(known, gradient)) << item.key();
          }
          known = gradient;
        }
      }
      optimizer.step();
      model->eval();
      const auto evaluation = evaluate(x, y).reduce_mean();
      const std::lock_guard<std::mutex> lock(mutex);
      if (dp_rank() == 0) trace.evaluations[i] = evaluation;
    }
    const auto state = model->state_dict();
    const std::lock_guard<std::mutex> lock(mutex);
    if (dp_rank() == 0) {
      for (const auto& item : state) trace.weights[item.key()] = item.value();
    }
  });
  return trace;
}

/// Trains both ways and compares losses, gradients, evaluations and the final models.
template <class Net, class Optimizer, class Options>
void check(const Layout& layout, const std::function<Net()>& make, const Options& options,
           const RunRanks& run_ranks = run_as_threads) {
  const auto batches = make_batches<Net>(layout);
  const auto plain = run_plain<Net, Optimizer>(make, options, layout, batches);
  expect_same(run_distributed<Net, Optimizer>(make, options, layout, batches, run_ranks), plain);
}

}  // namespace smp::testing::parity
