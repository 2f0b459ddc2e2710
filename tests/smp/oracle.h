// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "smp/smp.h"
#include "tests/error_of.h"

/// The common part of the tests of the public interface: a small model, plain libtorch loops to
/// compare with, and checks of error texts.
namespace smp::testing {

using Tensors = std::vector<torch::Tensor>;
using Named = std::map<std::string, torch::Tensor>;

/// A multilayer perceptron that runs its first `depth` layers: members are read at every call.
struct MlpImpl : torch::nn::Module {
  explicit MlpImpl(int layers = 4, double dropout = 0, int64_t inputs = kWidth)
      : depth(layers), in(torch::nn::Linear(inputs, kWidth)), drop(torch::nn::Dropout(dropout)) {
    register_module("in", in);
    register_module("drop", drop);
    for (int i = 0; i < layers; ++i) {
      hidden.push_back(
          register_module("hidden" + std::to_string(i), torch::nn::Linear(kWidth, kWidth)));
    }
    head = register_module("head", torch::nn::Linear(kWidth, 1));
  }

  torch::Tensor forward(torch::Tensor x) {
    x = torch::tanh(in(x));
    for (int i = 0; i < depth; ++i) x = drop(torch::tanh(hidden[i](x)));
    return head(x);
  }

  static constexpr int64_t kWidth = 6;
  int depth;
  torch::nn::Linear in{nullptr}, head{nullptr};
  torch::nn::Dropout drop{nullptr};
  std::vector<torch::nn::Linear> hidden;
};
TORCH_MODULE(Mlp);

/// The same weights at each call with a seed.
inline Mlp make_mlp(uint64_t seed = 3, torch::Dtype dtype = torch::kFloat) {
  torch::manual_seed(seed);
  Mlp net;
  net->to(dtype);
  return net;
}

/// A batch of 4 samples, the same at each call with a number.
inline torch::Tensor mlp_input(int number) {
  torch::manual_seed(50 + number);
  return torch::randn({4, MlpImpl::kWidth});
}

/// Parameters, each once, in the order of registration.
inline Tensors unique_parameters(const torch::nn::Module& module) {
  Tensors result;
  for (const auto& parameter : module.parameters()) {
    bool seen = false;
    for (const auto& other : result) seen |= other.is_same(parameter);
    if (!seen) result.push_back(parameter);
  }
  return result;
}

/// Copies of parameters and buffers by name.
inline Named state_of(const torch::nn::Module& module) {
  Named result;
  for (const auto& item : module.named_parameters()) {
    result[item.key()] = item.value().detach().clone();
  }
  for (const auto& item : module.named_buffers()) result[item.key()] = item.value().clone();
  return result;
}

inline Named to_map(const torch::OrderedDict<std::string, torch::Tensor>& dict) {
  Named result;
  for (const auto& item : dict) result[item.key()] = item.value();
  return result;
}

/// Gives `to` the parameters and buffers of `from`.
inline void copy_values(const torch::nn::Module& from, torch::nn::Module& to) {
  torch::NoGradGuard no_grad;
  const auto parameters = from.parameters();
  const auto buffers = from.buffers();
  for (size_t i = 0; i < parameters.size(); ++i) to.parameters()[i].copy_(parameters[i]);
  for (size_t i = 0; i < buffers.size(); ++i) to.buffers()[i].copy_(buffers[i]);
}

inline void expect_equal(const torch::Tensor& got, const torch::Tensor& expected,
                         const std::string& what) {
  ASSERT_TRUE(got.defined()) << what;
  ASSERT_EQ(got.sizes(), expected.sizes()) << what;
  EXPECT_TRUE(torch::equal(got, expected))
      << what << ": largest difference "
      << (got - expected).abs().max().to(torch::kDouble).item<double>();
}

inline void expect_equal(const Tensors& got, const Tensors& expected, const std::string& what) {
  ASSERT_EQ(got.size(), expected.size()) << what;
  for (size_t i = 0; i < got.size(); ++i) {
    expect_equal(got[i], expected[i], what + ", number " + std::to_string(i));
  }
}

inline void expect_equal(const Named& got, const Named& expected, const std::string& what) {
  ASSERT_EQ(got.size(), expected.size()) << what;
  for (const auto& [name, tensor] : expected) {
    ASSERT_EQ(got.count(name), 1u) << what << " has no " << name;
    expect_equal(got.at(name), tensor, what + " of " + name);
  }
}

/// The largest difference, relative to the largest element expected.
inline double relative_difference(const torch::Tensor& got, const torch::Tensor& expected) {
  const double largest = expected.abs().max().item<double>();
  return (got - expected).abs().max().item<double>() / std::max(largest, 1e-300);
}

inline void expect_close(const torch::Tensor& got, const torch::Tensor& expected,
                         const std::string& what, double tolerance = 1e-12) {
  ASSERT_TRUE(got.defined()) << what;
  ASSERT_EQ(got.sizes(), expected.sizes()) << what;
  EXPECT_LE(relative_difference(got, expected), tolerance) << what;
}

inline void expect_close(const Tensors& got, const Tensors& expected, const std::string& what,
                         double tolerance = 1e-12) {
  ASSERT_EQ(got.size(), expected.size()) << what;
  for (size_t i = 0; i < got.size(); ++i) {
    expect_close(got[i], expected[i], what + ", number " + std::to_string(i), tolerance);
  }
}

inline void expect_close(const Named& got, const Named& expected, const std::string& what,
                         double tolerance = 1e-12) {
  ASSERT_EQ(got.size(), expected.size()) << what;
  for (const auto& [name, tensor] : expected) {
    ASSERT_EQ(got.count(name), 1u) << what << " has no " << name;
    expect_close(got.at(name), tensor, what + " of " + name, tolerance);
  }
}

/// The part of `tensor` for one of `count` microbatches, along `axis`.
inline torch::Tensor part(const torch::Tensor& tensor, int64_t count, int64_t microbatch,
                          int64_t axis = 0) {
  const int64_t size = tensor.size(axis) / count;
  return tensor.narrow(axis, microbatch * size, size).clone();
}

/// In which type gradients of microbatches are added up: docs/architecture.md, "Numerics".
inline torch::Dtype sum_type(const torch::Tensor& tensor) {
  const auto type = tensor.scalar_type();
  return type == torch::kHalf || type == torch::kBFloat16 ? torch::kFloat : type;
}

/// The gradients of one step of plain libtorch, as docs/architecture.md words it ("Numerics"): the
/// raw gradients of the microbatches are summed in order within a replica, the replicas' sums in
/// order, and divided once. `run(m)` does the forward and backward of global microbatch m. Leaves
/// `.grad` undefined.
inline Tensors mean_gradients(const Tensors& parameters, int replicas, int microbatches,
                              const std::function<void(int)>& run) {
  Tensors total(parameters.size());
  for (int replica = 0; replica < replicas; ++replica) {
    Tensors sum(parameters.size());
    for (int m = 0; m < microbatches; ++m) {
      for (const auto& parameter : parameters) parameter.mutable_grad().reset();
      run(replica * microbatches + m);
      for (size_t i = 0; i < parameters.size(); ++i) {
        if (!parameters[i].grad().defined()) continue;
        const auto gradient = parameters[i].grad().to_dense().to(sum_type(parameters[i]));
        sum[i] = sum[i].defined() ? sum[i] + gradient : gradient.clone();
      }
    }
    for (size_t i = 0; i < parameters.size(); ++i) {
      if (sum[i].defined()) total[i] = total[i].defined() ? total[i] + sum[i] : sum[i];
    }
  }
  for (size_t i = 0; i < parameters.size(); ++i) {
    parameters[i].mutable_grad().reset();
    if (total[i].defined()) total[i] /= replicas * microbatches;
  }
  return total;
}

/// The same, rounded to the parameters' types and added to `.grad`; where `run` does no backward,
/// that stays as it was.
inline void plain_microbatches(const Tensors& parameters, int replicas, int microbatches,
                               const std::function<void(int)>& run) {
  Tensors before;
  for (const auto& parameter : parameters) before.push_back(parameter.grad());
  const Tensors means = mean_gradients(parameters, replicas, microbatches, run);
  for (size_t i = 0; i < parameters.size(); ++i) {
    auto& gradient = parameters[i].mutable_grad();
    gradient = before[i];
    if (!means[i].defined()) continue;
    const auto mean = means[i].to(parameters[i].scalar_type());
    gradient = gradient.defined() ? gradient + mean : mean;
  }
}

/// The same for a training step: `loss(m)` computes global microbatch m. Returns the losses.
inline Tensors plain_backward(const Tensors& parameters, int replicas, int microbatches,
                              const std::function<torch::Tensor(int)>& loss) {
  Tensors losses;
  plain_microbatches(parameters, replicas, microbatches, [&](int m) {
    const auto value = loss(m);
    value.backward();
    losses.push_back(value.detach());
  });
  return losses;
}

/// Runs `program` on ranks played by threads; the run must end with an E. Returns its text.
template <class E>
std::string error_of_run(int ranks, const Config& config, const std::function<void()>& program) {
  return error_of<E>([&] { run_as_threads(ranks, config, program); });
}

constexpr uint64_t kSeed = 11;

/// `stages` stages, 2 microbatches; cut by memory first, so that noise in measured times moves few
/// operators.
inline Config stages(int64_t count) {
  return Config().partitions(count).microbatches(2).seed(kSeed).timeout_seconds(60).memory_weight(
      0.8);
}

/// The usual training function: mean squared error of a model.
template <class M>
auto make_training(DistributedModel<M>& model, StepOptions options = {}) {
  return step(
      [&model](torch::Tensor x, torch::Tensor y) {
        auto loss = torch::mse_loss(model(x), y);
        model->backward(loss);
        return loss;
      },
      options);
}

}  // namespace smp::testing
