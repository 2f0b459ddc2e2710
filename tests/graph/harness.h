// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include "core/check.h"
#include "core/node.h"
#include "graph/autograd_entry.h"
#include "graph/content.h"
#include "graph/keyed_random.h"
#include "graph/profile.h"
#include "graph/random.h"
#include "graph/replay.h"
#include "graph/tracer.h"

namespace smp::graph::testing {

using Tensors = std::vector<torch::Tensor>;
using Function = std::function<Tensors(const Tensors&)>;

inline TensorTable table_of(const torch::nn::Module& module) {
  TensorTable table;
  for (const auto& item : module.named_parameters()) {
    table.add(ValueKind::kParameter, item.key(), item.value());
  }
  for (const auto& item : module.named_buffers()) {
    table.add(ValueKind::kBuffer, item.key(), item.value());
  }
  return table;
}

/// Marks `loss` as the tensor that the step differentiates, when a tracer is at work.
inline void backward(const torch::Tensor& loss) {
  if (auto* tracer = Tracer::current()) {
    tracer->backward({loss}, {});
  } else {
    loss.backward();
  }
}

inline TraceResult trace(const TensorTable& table, const Tensors& inputs, const Function& function,
                         bool execute = true, std::vector<const Graph*> candidates = {},
                         const RandomKey& key = {}) {
  at::set_num_threads(1);
  TraceOptions options;
  options.step_name = "train";
  options.table = &table;
  options.execute = execute;
  options.random = key;
  options.candidates = std::move(candidates);
  Tracer tracer(std::move(options));
  return tracer.run(inputs, function);
}

struct Replayed {
  Tensors outputs;
  std::map<std::string, torch::Tensor> gradients;
};

/// Replays the whole graph as one segment, with backward if it trains.
inline Replayed replay(const Graph& graph, const TensorTable& table, const Tensors& inputs,
                       const RandomKey& key = {},
                       const std::vector<ConstantOverride>& constants = {}) {
  std::vector<int> all(graph.operators.size());
  std::iota(all.begin(), all.end(), 0);
  std::vector<ValueId> keep = graph.outputs;
  std::set<int> written;  // alias sets
  for (const Operator& op : graph.operators) written.insert(op.writes.begin(), op.writes.end());
  std::vector<ValueId> written_buffers;
  for (size_t id = 0; id < graph.values.size(); ++id) {
    const Value& value = graph.values[id];
    if (value.kind != ValueKind::kBuffer || written.count(value.alias_set) == 0) continue;
    written_buffers.push_back(static_cast<ValueId>(id));
    keep.push_back(written_buffers.back());
  }
  for (const auto& root : graph.roots) {
    keep.push_back(root.value);
    if (root.gradient != kUndefined) keep.push_back(root.gradient);
  }
  Segment segment(graph, all, keep);
  segment.apply(constants);
  Environment environment(graph.values.size());
  std::map<std::string, GradientSinkPtr> sinks;
  for (size_t id = 0; id < graph.values.size(); ++id) {
    const Value& value = graph.values[id];
    if (value.kind == ValueKind::kInput) environment[id] = inputs[std::stoi(value.name)];
    if (value.content.defined()) environment[id] = clone_content(value.content);
    if (value.kind == ValueKind::kParameter && value.meta.requires_grad) {
      sinks[value.name] = core::make_node<GradientSink>();
      environment[id] = enter(table.at(value.name).tensor, sinks[value.name]);
    } else if (value.kind == ValueKind::kParameter || value.kind == ValueKind::kBuffer) {
      environment[id] = table.at(value.name).tensor;
    }
  }
  for (ValueId id : written_buffers) environment[id] = environment[id].clone();
  segment.run(environment, key);
  for (ValueId id : written_buffers) {
    table.at(graph.values[id].name).tensor.detach().copy_(environment[id].detach());
  }
  Replayed result;
  for (ValueId id : graph.outputs) result.outputs.push_back(environment[id].detach());
  std::vector<torch::autograd::Edge> roots;
  Tensors gradients;
  for (const auto& root : graph.roots) {
    roots.push_back(start_of_backward(environment[root.value]));
    gradients.push_back(root.gradient == kUndefined ? torch::ones_like(environment[root.value])
                                                    : environment[root.gradient]);
  }
  run_backward(roots, gradients);
  for (const auto& [name, sink] : sinks) result.gradients[name] = sink->gradient;
  return result;
}

/// Captures `function` on `inputs`, then compares a replay on `fresh` inputs under another random
/// key with plain eager code: outputs and gradients, bit for bit.
inline void expect_replay_equals_eager(torch::nn::Module& module, const Tensors& inputs,
                                       const Tensors& fresh, const Function& function) {
  const TensorTable table = table_of(module);
  std::map<std::string, torch::Tensor> buffers;
  for (const auto& item : module.named_buffers()) buffers[item.key()] = item.value().clone();
  const auto restore_buffers = [&] {
    torch::NoGradGuard no_grad;
    for (auto& item : module.named_buffers()) item.value().copy_(buffers[item.key()]);
  };
  const TraceResult traced = trace(table, inputs, function);
  ASSERT_NE(traced.recorded, nullptr);
  const Graph& graph = *traced.recorded;
  const RandomKey key{7, 0, 3, 5};

  restore_buffers();
  module.zero_grad();
  Tensors eager;
  {
    KeyedRandomScope random(key);
    eager = function(fresh);
  }
  std::map<std::string, torch::Tensor> buffers_after;
  for (const auto& item : module.named_buffers()) buffers_after[item.key()] = item.value().clone();

  restore_buffers();
  const Replayed replayed = replay(graph, table, fresh, key);
  ASSERT_EQ(replayed.outputs.size(), eager.size());
  for (size_t i = 0; i < eager.size(); ++i) {
    EXPECT_TRUE(torch::equal(replayed.outputs[i], eager[i])) << "output " << i << "\n"
                                                             << graph.to_string();
  }
  for (const auto& entry : table.entries()) {
    if (entry.kind != ValueKind::kParameter) continue;
    const auto expected = entry.tensor.grad();
    const auto found = replayed.gradients.find(entry.name);  // the graph may not read it
    const auto gradient = found == replayed.gradients.end() ? torch::Tensor() : found->second;
    ASSERT_EQ(gradient.defined(), expected.defined()) << entry.name;
    if (!expected.defined()) continue;
    EXPECT_TRUE(torch::equal(gradient, expected)) << entry.name;
  }
  for (const auto& item : module.named_buffers()) {
    EXPECT_TRUE(torch::equal(item.value(), buffers_after[item.key()])) << item.key();
  }
}

/// The text of the `CaptureError` or `UsageError` that tracing `function` throws.
inline std::string refusal(const TensorTable& table, const Tensors& inputs,
                           const Function& function, bool execute = true,
                           std::vector<const Graph*> candidates = {}) {
  try {
    trace(table, inputs, function, execute, std::move(candidates));
  } catch (const CaptureError& error) {
    return error.what();
  } catch (const UsageError& error) {
    return error.what();
  }
  ADD_FAILURE() << "the function was captured";
  return "";
}

}  // namespace smp::graph::testing
