#include "graph/profile.h"

#include <ATen/ops/ones_like.h>

#include <chrono>
#include <cmath>
#include <cstring>
#include <numeric>
#include <unordered_set>

#include "graph/autograd_entry.h"
#include "graph/content.h"
#include "smp/core/error.h"

namespace smp::graph {
namespace {

using Clock = std::chrono::steady_clock;

double microseconds_since(Clock::time_point start) {
  return std::chrono::duration<double, std::micro>(Clock::now() - start).count();
}

/// Two digits are what a measurement on a busy machine is worth; fewer ties, steadier plans.
double round_to_two_digits(double value) {
  if (value <= 0) return 0;
  const double unit = std::pow(10.0, std::floor(std::log10(value)) - 1);
  return std::round(value / unit) * unit;
}

std::vector<ValueId> tensor_arguments(const Operator& op) {
  std::vector<ValueId> ids;
  for (const Argument& argument : op.arguments) {
    for (ValueId id : argument.values) {
      if (id != kUndefined) ids.push_back(id);
    }
  }
  return ids;
}

uint64_t checksum(const Operator& op, const Environment& environment) {
  uint64_t hash = 1;
  for (ValueId id : op.results) {
    if (id == kUndefined) continue;
    hash = hash_content(environment[id], hash);
  }
  return hash;
}

double measure_backward(const Operator& op, const Environment& environment) {
  std::vector<torch::autograd::Edge> starts;
  std::vector<at::Tensor> gradients;
  for (ValueId id : op.results) {
    if (id == kUndefined || !environment[id].requires_grad()) continue;
    starts.push_back(start_of_backward(environment[id]));
    gradients.push_back(at::ones_like(environment[id]));
  }
  const auto start = Clock::now();
  run_backward(starts, gradients);
  return microseconds_since(start);
}

}  // namespace

void measure_costs(Graph& graph, Environment environment, const RandomKey& key,
                   const std::vector<uint64_t>& checksums, const std::string& step_name) {
  std::vector<int> all(graph.operators.size());
  std::iota(all.begin(), all.end(), 0);
  std::vector<ValueId> keep(graph.values.size());
  std::iota(keep.begin(), keep.end(), 0);
  Segment segment(graph, all, keep);
  std::vector<size_t> last_use(graph.values.size(), 0);
  for (size_t i = 0; i < graph.operators.size(); ++i) {
    for (ValueId id : tensor_arguments(graph.operators[i])) last_use[id] = i;
  }
  for (size_t i = 0; i < graph.operators.size(); ++i) {
    Operator& op = graph.operators[i];
    // A history of one operator: its inputs enter anew.
    for (ValueId id : tensor_arguments(op)) {
      const bool differentiable = environment[id].defined() && graph.values[id].meta.requires_grad;
      environment[id] =
          enter(environment[id], differentiable ? std::make_shared<GradientSink>() : nullptr);
    }
    const auto start = Clock::now();
    segment.run_one(i, environment, key);
    op.cost.forward_us = round_to_two_digits(microseconds_since(start));
    const bool literal = graph.makes_literal(op);
    if (!checksums.empty() && checksums[i] != 0 && !literal) {
      SMP_CHECK_WITH(CaptureError, checksum(op, environment) == checksums[i], "step function \"",
                     step_name, "\": operator ", i, " (", op.name(), ", in module \"", op.scope,
                     "\") gives another result when it is replayed than it gave in the step "
                     "function. Something that is no tensor operator changed its input (an "
                     "accessor, data_ptr, a library that works in place), or the operator is not "
                     "deterministic. Use tensor operators there");
    }
    if (graph.trains())
      op.cost.backward_us = round_to_two_digits(measure_backward(op, environment));
    std::unordered_set<int> aliased;
    for (ValueId id : tensor_arguments(op)) aliased.insert(graph.values[id].alias_set);
    for (ValueId id : op.results) {
      if (id == kUndefined) continue;
      const Value& value = graph.values[id];
      environment[id] = enter(environment[id], nullptr);
      if (aliased.count(value.alias_set) > 0) continue;
      op.cost.output_bytes += value.meta.nbytes();
      if (value.meta.requires_grad) op.cost.saved_bytes += value.meta.nbytes();
    }
    for (ValueId id : tensor_arguments(op)) {
      if (last_use[id] == i) environment[id] = at::Tensor();
    }
  }
}

std::string costs_to_bytes(const Graph& graph) {
  std::vector<Cost> costs;
  for (const Operator& op : graph.operators) costs.push_back(op.cost);
  return std::string(reinterpret_cast<const char*>(costs.data()), costs.size() * sizeof(Cost));
}

void costs_from_bytes(Graph& graph, const std::string& bytes) {
  SMP_INTERNAL_ASSERT(bytes.size() == graph.operators.size() * sizeof(Cost), "costs of ",
                      bytes.size() / sizeof(Cost), " operators for a graph of ",
                      graph.operators.size());
  for (size_t i = 0; i < graph.operators.size(); ++i) {
    std::memcpy(&graph.operators[i].cost, bytes.data() + i * sizeof(Cost), sizeof(Cost));
  }
}

}  // namespace smp::graph
