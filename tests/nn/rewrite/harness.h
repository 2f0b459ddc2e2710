// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "comm/threads/run_ranks.h"
#include "graph/keyed_random.h"
#include "nn/rewrite/divide.h"
#include "nn/tensor_group.h"
#include "tests/graph/harness.h"

/// Runs graphs on the ranks of a tensor-parallel group, which are threads, and compares them with
/// plain libtorch in one process.
namespace smp::nn::rewrite::testing {

using graph::Graph;
using graph::RandomKey;
using graph::TensorTable;
using graph::testing::Function;
using graph::testing::Replayed;
using graph::testing::table_of;
using graph::testing::Tensors;

constexpr double kTolerance = 1e-12;  // relative to the largest element, in float64
inline const RandomKey kKey{7, 0, 3, 5};

/// Everything may be divided, and communication costs little beside products (see `set_costs`).
inline DivideOptions eager_options(const TensorTable& table, int ranks) {
  DivideOptions options;
  options.ranks = ranks;
  options.latency_us = 1;
  options.parameter_us_per_byte = 0.01;
  for (const auto& entry : table.entries()) {
    if (entry.kind == graph::ValueKind::kParameter) options.allowed.insert(entry.name);
  }
  return options;
}

/// The same, and whatever lies between divided layers is divided where it can be.
inline DivideOptions memory_options(const TensorTable& table, int ranks) {
  DivideOptions options = eager_options(table, ranks);
  options.residual_streams = true;
  options.activation_us_per_byte = 100;
  return options;
}

/// A step that differentiates the first tensor that `body` returns.
inline Function training(const Function& body) {
  return [body](const Tensors& inputs) {
    Tensors results = body(inputs);
    graph::testing::backward(results.at(0));
    return results;
  };
}

/// Times as of a large model: products take nearly all of it.
inline void set_costs(Graph& graph) {
  const std::set<std::string> products = {"aten::addmm",     "aten::baddbmm",
                                          "aten::bmm",       "aten::conv1d",
                                          "aten::conv2d",    "aten::linear",
                                          "aten::embedding", "aten::matmul",
                                          "aten::mm",        "aten::scaled_dot_product_attention"};
  for (auto& op : graph.operators) {
    const double us = products.count(op.handle.operator_name().name) > 0 ? 1000 : 1;
    op.cost.forward_us = us;
    op.cost.backward_us = 2 * us;
  }
}

inline std::unique_ptr<Graph> capture(const TensorTable& table, const Tensors& inputs,
                                      const Function& function) {
  auto graph = graph::testing::trace(table, inputs, function, /*execute=*/false).recorded;
  set_costs(*graph);
  return graph;
}

/// The parameters that a rank has; buffers are copies.
inline TensorTable local_table(const TensorTable& table, const DividedGraph& divided, int rank) {
  TensorTable local;
  for (const auto& entry : table.entries()) {
    const auto split = divided.parameters.find(entry.name);
    torch::Tensor own = split == divided.parameters.end()
                            ? entry.tensor.detach().clone()
                            : split->second.part(entry.tensor.detach(), rank);
    own.requires_grad_(entry.tensor.requires_grad());
    local.add(entry.kind, entry.name, own);
    for (const auto& alias : entry.aliases) local.add(entry.kind, alias, own);
  }
  return local;
}

/// Replays the divided graph on all ranks.
inline std::vector<Replayed> run_on_ranks(
    const DividedGraph& divided, const TensorTable& table, const Tensors& inputs, int ranks,
    const std::vector<graph::ConstantOverride>& changes = {}) {
  std::vector<Replayed> results(ranks);
  std::vector<TensorTable> tables;
  for (int rank = 0; rank < ranks; ++rank) tables.push_back(local_table(table, divided, rank));
  comm::run_ranks(ranks, [&](const comm::CommunicatorPtr& group) {
    at::set_num_threads(1);
    const TensorGroupScope scope(group);
    Tensors own;
    for (const auto& input : inputs) own.push_back(input.clone());
    results[group->rank()] =
        graph::testing::replay(divided.graph, tables[group->rank()], own, kKey, changes);
  });
  return results;
}

inline void expect_close(const torch::Tensor& got, const torch::Tensor& expected,
                         const std::string& what) {
  ASSERT_EQ(got.defined(), expected.defined()) << what;
  if (!got.defined()) return;
  ASSERT_EQ(got.sizes(), expected.sizes()) << what;
  if (!expected.is_floating_point()) {
    EXPECT_TRUE(torch::equal(got, expected)) << what;
    return;
  }
  if (expected.numel() == 0) return;
  // -inf of a mask is the same everywhere.
  const auto same = got.eq(expected);
  const auto difference = (got - expected).masked_fill(same, 0).abs().max().item<double>();
  const auto finite = expected.masked_fill(expected.isinf(), 0).abs().max().item<double>();
  EXPECT_LE(difference, kTolerance * std::max(finite, 1.0)) << what;
}

/// Runs in one process, without a capture: results and gradients by name.
inline Replayed run_plain(torch::nn::Module& module, const TensorTable& table,
                          const Tensors& inputs, const Function& function) {
  module.zero_grad();
  std::map<std::string, torch::Tensor> buffers;
  for (const auto& item : module.named_buffers()) buffers[item.key()] = item.value().clone();
  Tensors own;
  for (const auto& input : inputs) own.push_back(input.clone());
  Replayed plain;
  {
    const graph::KeyedRandomScope random(kKey);
    for (const auto& output : function(own)) plain.outputs.push_back(output.detach().clone());
  }
  for (const auto& entry : table.entries()) {
    if (entry.kind == graph::ValueKind::kParameter)
      plain.gradients[entry.name] = entry.tensor.grad();
  }
  const torch::NoGradGuard no_grad;
  for (auto& item : module.named_buffers()) item.value().copy_(buffers[item.key()]);
  return plain;
}

/// The divided graph gives on every rank the function's results in one process.
inline void expect_equals_plain(const DividedGraph& divided, torch::nn::Module& module,
                                const TensorTable& table, const Tensors& inputs,
                                const Function& function, int ranks) {
  const Replayed plain = run_plain(module, table, inputs, function);
  const auto results = run_on_ranks(divided, table, inputs, ranks);
  const std::string text = "\n" + divided.graph.to_string();
  for (int rank = 0; rank < ranks; ++rank) {
    ASSERT_EQ(results[rank].outputs.size(), plain.outputs.size());
    for (size_t i = 0; i < plain.outputs.size(); ++i) {
      expect_close(results[rank].outputs[i], plain.outputs[i],
                   c10::str("output ", i, " of rank ", rank, text));
    }
  }
  for (const auto& [name, expected] : plain.gradients) {
    const auto split = divided.parameters.find(name);
    Tensors parts;
    for (const auto& result : results) {
      const auto found = result.gradients.find(name);  // the graph may not read it
      parts.push_back(found == result.gradients.end() ? torch::Tensor() : found->second);
    }
    const bool joined = split != divided.parameters.end() && parts[0].defined();
    expect_close(joined ? split->second.join(parts) : parts[0], expected,
                 c10::str("gradient of ", name, text));
    for (const auto& part : parts) {
      ASSERT_EQ(part.defined(), expected.defined()) << name << text;
      if (!joined && part.defined()) {
        EXPECT_TRUE(torch::equal(part, parts[0])) << name << " differs between ranks" << text;
      }
    }
  }
}

/// Checks that the sizes, strides, types and needs of gradients in the divided graph are those of
/// its operators' results: plans and channels are made of them.
inline void expect_metas_hold(const DividedGraph& divided, const TensorTable& table,
                              const Tensors& inputs, int ranks) {
  const Graph& graph = divided.graph;
  std::vector<TensorTable> tables;
  for (int rank = 0; rank < ranks; ++rank) tables.push_back(local_table(table, divided, rank));
  std::vector<std::string> differences(ranks);
  comm::run_ranks(ranks, [&](const comm::CommunicatorPtr& group) {
    at::set_num_threads(1);
    const TensorGroupScope scope(group);
    std::vector<int> all(graph.operators.size());
    std::iota(all.begin(), all.end(), 0);
    std::vector<graph::ValueId> keep(graph.values.size());
    std::iota(keep.begin(), keep.end(), 0);
    graph::Segment segment(graph, all, keep);
    graph::Environment environment(graph.values.size());
    std::set<int> written;
    for (const auto& op : graph.operators) written.insert(op.writes.begin(), op.writes.end());
    for (size_t id = 0; id < graph.values.size(); ++id) {
      const auto& value = graph.values[id];
      if (value.kind == graph::ValueKind::kInput) {
        environment[id] = inputs[std::stoi(value.name)].clone();
      } else if (value.content.defined()) {
        environment[id] = value.content.clone();
      } else if (value.producer < 0) {
        environment[id] = tables[group->rank()].at(value.name).tensor;
      }
    }
    segment.run(environment, kKey);
    for (size_t id = 0; id < graph.values.size(); ++id) {
      graph::TensorMeta made = graph::TensorMeta::of(environment[id]);
      const graph::TensorMeta& said = graph.values[id].meta;
      // Writing may make a tensor need a gradient after its value was noted.
      if (written.count(graph.values[id].alias_set) > 0) made.requires_grad = said.requires_grad;
      for (size_t d = 0; d < made.sizes.size(); ++d) {
        if (made.sizes[d] == 1 && said.sizes == made.sizes) made.strides[d] = said.strides[d];
      }
      if (made == said) continue;
      differences[group->rank()] +=
          c10::str("%", id, " is ", made.to_string(), made.requires_grad ? " grad" : "", ", not ",
                   said.to_string(), said.requires_grad ? " grad" : "", "\n");
    }
  });
  for (const std::string& text : differences) EXPECT_EQ(text, "") << graph.to_string();
}

/// "smp::tp_copy", without their prefix, in the order of the graph.
inline std::string collectives(const Graph& graph) {
  std::string names;
  const std::string prefix = "smp::tp_";
  for (const auto& op : graph.operators) {
    const std::string& name = op.handle.operator_name().name;
    if (name.rfind(prefix, 0) != 0) continue;
    names += (names.empty() ? "" : " ") + name.substr(prefix.size());
  }
  return names;
}

inline const ParameterDecision& decision_of(const DividedGraph& divided, const std::string& name) {
  for (const auto& decision : divided.decisions) {
    if (decision.name == name) return decision;
  }
  throw std::out_of_range(name);
}

}  // namespace smp::nn::rewrite::testing
