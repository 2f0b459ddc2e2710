// SPDX-License-Identifier: Apache-2.0
#include "pipeline/costs.h"

#include <algorithm>
#include <cmath>

#include "core/check.h"

namespace smp::pipeline {
namespace {

void check(const char* name, const std::vector<double>& numbers, size_t expected) {
  SMP_CHECK_WITH(ConfigError, numbers.size() == expected, "schedule costs: expected ", expected,
                 " numbers in costs.", name, ", got ", numbers.size(), ".");
  for (const double number : numbers) {
    SMP_CHECK_WITH(ConfigError, std::isfinite(number) && number >= 0, "schedule costs: costs.",
                   name, " must be finite and not negative, got ", number, ".");
  }
}

void fill(const char* name, std::vector<double>& numbers, size_t expected,
          const std::vector<double>& otherwise) {
  if (numbers.empty()) numbers = otherwise;
  check(name, numbers, expected);
}

std::vector<double> sum(const std::vector<double>& a, const std::vector<double>& b) {
  std::vector<double> result;
  for (size_t i = 0; i < a.size(); ++i) result.push_back(a[i] + b[i]);
  return result;
}

}  // namespace

StageCosts StageCosts::unit(int stages) {
  auto costs = uniform(stages);
  costs.backward.assign(static_cast<size_t>(stages), 1);
  return costs;
}

StageCosts StageCosts::uniform(int stages, double forward, double input, double weight) {
  const auto count = static_cast<size_t>(stages);
  StageCosts costs;
  costs.forward.assign(count, forward);
  costs.backward_input.assign(count, input);
  costs.backward_weight.assign(count, weight);
  return costs;
}

double StageCosts::of(const Action& compute) const {
  const auto stage = static_cast<size_t>(compute.stage);
  switch (compute.kind) {
    case Action::Kind::kForward:
      return forward[stage];
    case Action::Kind::kBackward:
      return backward[stage];
    case Action::Kind::kBackwardInput:
      return backward_input[stage];
    default:
      return backward_weight[stage];
  }
}

StageCosts StageCosts::filled(size_t stages, size_t edges) const {
  StageCosts result = *this;
  check("forward", forward, stages);
  if (can_split() || !backward_input.empty()) {
    check("backward_input", backward_input, stages);
    check("backward_weight", backward_weight, stages);
  }
  const std::vector<double> no_stage(stages, 0), no_edge(edges, 0);
  fill("backward", result.backward, stages, sum(backward_input, backward_weight));
  fill("latency", result.latency, edges, no_edge);
  fill("backward_latency", result.backward_latency, edges, result.latency);
  fill("send", result.send, edges, no_edge);
  fill("kept", result.kept, stages, no_stage);
  fill("kept_for_weights", result.kept_for_weights, stages, result.kept);
  fill("gradients_for_weights", result.gradients_for_weights, stages, no_stage);
  return result;
}

void KeptMemory::add(const Action& action) {
  const auto stage = static_cast<size_t>(action.stage);
  const double kept = costs_->kept[stage], for_weights = costs_->kept_for_weights[stage];
  if (action.kind == Action::Kind::kForward) now_ += kept;
  if (action.kind == Action::Kind::kBackwardInput) {
    peak_ = std::max(peak_, now_ + costs_->gradients_for_weights[stage]);
  }
  if (action.makes_input_gradients()) now_ += for_weights - kept;
  if (action.makes_weight_gradients()) now_ -= for_weights;
  peak_ = std::max(peak_, now_);
}

}  // namespace smp::pipeline
