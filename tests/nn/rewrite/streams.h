// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <functional>
#include <string>

#include "nn/rewrite/divide.h"
#include "tests/nn/rewrite/harness.h"

/// Nets whose activations are divided between layers (`DivideOptions::residual_streams`).
namespace smp::nn::rewrite::testing {

using torch::Tensor;
namespace F = torch::nn::functional;

/// A residual block of two layers behind a norm, as in a transformer, between an embedding and a
/// vocabulary head.
struct NetImpl : torch::nn::Module {
  NetImpl() {
    table = register_module("table", torch::nn::Embedding(8, 4));
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({4})));
    up = register_module("up", torch::nn::Linear(4, 8));
    down = register_module("down", torch::nn::Linear(8, 4));
    head = register_module("head", torch::nn::Linear(4, 8));
    to(torch::kDouble);
  }
  Tensor forward(const Tensor& ids) {
    Tensor x = table(ids);
    x = x + down(torch::relu(up(norm(x))));
    return head(x);
  }
  torch::nn::Embedding table{nullptr};
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear up{nullptr}, down{nullptr}, head{nullptr};
};

inline Function step_of(NetImpl& net) {
  return training([&net](const Tensors& in) -> Tensors {
    return {F::cross_entropy(net.forward(in[0]).flatten(0, 1), in[0].flatten())};
  });
}

inline Tensors ids(int64_t samples, int64_t length) {
  return {torch::arange(samples * length).view({samples, length}).remainder(8)};
}

/// A function on a module's parameters, divided with these options, after the divided graph's
/// results were found to be those of one process.
inline DividedGraph divided_as_plain(torch::nn::Module& module, const Tensors& inputs,
                                     const Function& body, const DivideOptions& options) {
  const TensorTable table = table_of(module);
  const Function step = training(body);
  const auto whole = capture(table, inputs, step);
  DividedGraph divided = divide(*whole, options);
  expect_equals_plain(divided, module, table, inputs, step, options.ranks);
  expect_metas_hold(divided, table, inputs, options.ranks);
  return divided;
}

inline DividedGraph divided_as_plain(torch::nn::Module& module, const Tensors& inputs,
                                     const Function& body, int ranks) {
  return divided_as_plain(module, inputs, body, memory_options(table_of(module), ranks));
}

inline DividedGraph divided_net(int64_t samples, int64_t length, int ranks = 2) {
  torch::manual_seed(2);
  NetImpl net;
  const Tensors in = ids(samples, length);
  return divided_as_plain(
      net, in,
      [&](const Tensors& x) -> Tensors {
        return {F::cross_entropy(net.forward(x[0]).flatten(0, 1), x[0].flatten())};
      },
      ranks);
}

/// The net with other options than `memory_options`.
inline DividedGraph divided_net_with(const std::function<void(DivideOptions&)>& change) {
  torch::manual_seed(2);
  NetImpl net;
  const TensorTable table = table_of(net);
  DivideOptions options = memory_options(table, 2);
  change(options);
  return divide(*capture(table, ids(2, 3), step_of(net)), options);
}

/// "dim" of each divided stream, "-" of each whole one.
inline std::string dims(const DividedGraph& divided) {
  std::string text;
  for (const ResidualStreamDecision& stream : divided.residual_streams) {
    text += stream.dim < 0 ? "-" : std::to_string(stream.dim);
  }
  return text;
}

inline int count(const graph::Graph& graph, const std::string& name) {
  return static_cast<int>(std::count_if(graph.operators.begin(), graph.operators.end(),
                                        [&](const auto& op) { return op.name() == name; }));
}

}  // namespace smp::nn::rewrite::testing
