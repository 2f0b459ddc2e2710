// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "core/node.h"
#include "graph/checkpointed_segment.h"
#include "graph/content.h"
#include "graph/keyed_random.h"
#include "tests/graph/harness.h"

namespace smp::graph::testing {

/// A captured step function, to be run with regions.
class Checkpointed {
 public:
  Checkpointed(torch::nn::Module& module, const Tensors& inputs, const Function& function)
      : table_(table_of(module)), recorded_(trace(table_, inputs, function).recorded) {
    operators_.resize(graph().operators.size());
    std::iota(operators_.begin(), operators_.end(), 0);
  }

  const Graph& graph() const { return *recorded_; }
  const std::vector<int>& operators() const { return operators_; }

  /// Makes the operators run anew: `region` tells the region of each.
  void set_regions(const std::function<int(int)>& region) {
    std::vector<int> of_operator;
    for (int index : operators_) of_operator.push_back(region(index));
    segment_ = std::make_unique<CheckpointedSegment>(graph(), operators_, keep(), of_operator);
  }
  /// The same with `length` operators in each region, but for those that cannot run again.
  void set_regions_of(int length) {
    std::vector<int> of_operator;
    for (int index : operators_) of_operator.push_back(index / length);
    const auto differentiated = differentiated_ranges(graph());
    for (const auto& region : find_regions(operators_, of_operator)) {
      if (!why_not_repeatable(graph(), differentiated, region)) continue;
      for (int index : region) of_operator[index] = -1;
    }
    segment_ = std::make_unique<CheckpointedSegment>(graph(), operators_, keep(), of_operator);
  }
  CheckpointedSegment& segment() { return *segment_; }

  /// A run between its forward and its backward.
  struct Run {
    Tensors outputs;
    RegionInputs stored;
    std::vector<torch::autograd::Edge> starts;
    Tensors gradients;
    std::map<std::string, GradientSinkPtr> sinks;
  };

  Run forward(const Tensors& inputs, const RandomKey& key, TensorStore* store = nullptr) {
    Run run;
    Environment environment(graph().values.size());
    std::vector<std::pair<at::Tensor, ValueId>> copies;
    for (size_t id = 0; id < graph().values.size(); ++id) {
      const Value& value = graph().values[id];
      if (value.kind == ValueKind::kInput) environment[id] = inputs[std::stoi(value.name)];
      if (value.content.defined()) environment[id] = clone_content(value.content);
      if (value.kind != ValueKind::kParameter && value.kind != ValueKind::kBuffer) continue;
      auto& sink = run.sinks[value.name];
      if (value.meta.requires_grad) sink = core::make_node<GradientSink>();
      const at::Tensor& tensor = table_.at(value.name).tensor;
      const bool copied = value.kind == ValueKind::kBuffer;  // copied by stages, too
      environment[id] = enter(copied ? tensor.clone() : tensor, sink);
      if (copied) copies.emplace_back(tensor, static_cast<ValueId>(id));
    }
    run.stored = segment_->run(environment, key, store);
    for (const auto& [buffer, id] : copies) buffer.copy_(environment[id].detach());
    for (ValueId id : graph().outputs) run.outputs.push_back(environment[id].detach());
    for (const auto& root : graph().roots) {
      run.starts.push_back(start_of_backward(environment[root.value]));
      run.gradients.push_back(root.gradient == kUndefined
                                  ? torch::ones_like(environment[root.value])
                                  : environment[root.gradient].detach());
    }
    return run;
  }

  static std::map<std::string, torch::Tensor> backward(Run& run) {
    {
      const auto starts = std::move(run.starts);
      run_backward(starts, run.gradients);
    }
    return gradients(run);
  }
  static std::map<std::string, torch::Tensor> gradients(const Run& run) {
    std::map<std::string, torch::Tensor> result;
    for (const auto& [name, sink] : run.sinks) {
      if (sink != nullptr) result[name] = sink->gradient;
    }
    return result;
  }

 private:
  std::vector<ValueId> keep() const {
    std::vector<ValueId> keep = graph().outputs;
    for (size_t id = 0; id < graph().values.size(); ++id) {
      if (graph().values[id].kind == ValueKind::kBuffer) keep.push_back(static_cast<ValueId>(id));
    }
    for (const auto& root : graph().roots) {
      keep.push_back(root.value);
      if (root.gradient != kUndefined) keep.push_back(root.gradient);
    }
    return keep;
  }

  TensorTable table_;
  std::shared_ptr<Graph> recorded_;
  std::vector<int> operators_;
  std::unique_ptr<CheckpointedSegment> segment_;
};

inline void expect_equal(const std::map<std::string, torch::Tensor>& got,
                         const std::map<std::string, torch::Tensor>& expected,
                         const std::string& what) {
  ASSERT_EQ(got.size(), expected.size()) << what;
  for (const auto& [name, tensor] : expected) {
    ASSERT_EQ(got.at(name).defined(), tensor.defined()) << what << ", " << name;
    if (!tensor.defined()) continue;
    EXPECT_TRUE(torch::equal(got.at(name), tensor)) << what << ", " << name;
  }
}

/// Runs two microbatches, forward both and then backward both, with regions of every length from 1
/// to all operators, and compares outputs, gradients and buffers with plain eager code.
inline void expect_eager_bits(torch::nn::Module& module, const std::vector<Tensors>& microbatches,
                              const Function& function) {
  at::set_num_threads(1);
  std::map<std::string, torch::Tensor> buffers;
  for (const auto& item : module.named_buffers()) buffers[item.key()] = item.value().clone();
  const auto restore_buffers = [&] {
    torch::NoGradGuard no_grad;
    for (auto& item : module.named_buffers()) item.value().copy_(buffers[item.key()]);
  };
  const auto buffers_now = [&] {
    std::map<std::string, torch::Tensor> result;
    for (const auto& item : module.named_buffers()) result[item.key()] = item.value().clone();
    return result;
  };
  Checkpointed step(module, microbatches[0], function);
  const auto key_of = [](size_t m) {
    RandomKey key{7, 0, 3, 0};
    key.global_microbatch = m;
    return key;
  };

  restore_buffers();
  const TensorTable table = table_of(module);  // which has a tied parameter once
  std::vector<Tensors> outputs;
  std::vector<std::map<std::string, torch::Tensor>> gradients;
  for (size_t m = 0; m < microbatches.size(); ++m) {
    module.zero_grad();
    const KeyedRandomScope random(key_of(m));
    outputs.push_back(function(microbatches[m]));
    gradients.emplace_back();
    for (const auto& entry : table.entries()) {
      if (entry.tensor.requires_grad()) gradients[m][entry.name] = entry.tensor.grad();
    }
    for (auto& [name, gradient] : gradients[m]) {
      if (gradient.defined()) gradient = gradient.clone();
    }
  }
  const auto buffers_after = buffers_now();

  size_t most_regions = 0;
  for (int length = 1; length <= static_cast<int>(step.operators().size()); ++length) {
    const std::string what = "regions of " + std::to_string(length) + " operators";
    restore_buffers();
    step.set_regions_of(length);
    most_regions = std::max(most_regions, step.segment().regions());
    std::vector<Checkpointed::Run> runs;
    for (size_t m = 0; m < microbatches.size(); ++m) {
      runs.push_back(step.forward(microbatches[m], key_of(m)));
    }
    for (size_t m = 0; m < microbatches.size(); ++m) {
      ASSERT_EQ(runs[m].outputs.size(), outputs[m].size()) << what;
      for (size_t i = 0; i < outputs[m].size(); ++i) {
        EXPECT_TRUE(torch::equal(runs[m].outputs[i], outputs[m][i])) << what << ", output " << i;
      }
      const auto got = Checkpointed::backward(runs[m]);
      for (const auto& [name, expected] : gradients[m]) {
        const auto found = got.find(name);  // the graph may not read it
        const auto gradient = found == got.end() ? torch::Tensor() : found->second;
        ASSERT_EQ(gradient.defined(), expected.defined()) << what << ", " << name;
        if (!gradient.defined()) continue;
        EXPECT_TRUE(torch::equal(gradient, expected))
            << what << ", microbatch " << m << ", " << name << ": largest difference "
            << (gradient - expected).abs().max().item<double>();
      }
    }
    expect_equal(buffers_now(), buffers_after, what + ", buffers");
  }
  EXPECT_GT(most_regions, 1u);
}

}  // namespace smp::graph::testing
