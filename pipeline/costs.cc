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

void fill(std::vector<double>& numbers, const std::vector<double>& otherwise) {
  if (numbers.empty()) numbers = otherwise;
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

StageCosts StageCosts::filled(size_t stages, size_t edges) const {
  StageCosts result = *this;
  check("forward", forward, stages);
  if (can_split() || !backward_input.empty()) {
    check("backward_input", backward_input, stages);
    check("backward_weight", backward_weight, stages);
  }
  fill(result.backward, sum(backward_input, backward_weight));
  check("backward", result.backward, stages);
  fill(result.latency, std::vector<double>(edges, 0));
  check("latency", result.latency, edges);
  fill(result.backward_latency, result.latency);
  check("backward_latency", result.backward_latency, edges);
  fill(result.send, std::vector<double>(edges, 0));
  check("send", result.send, edges);
  fill(result.kept, std::vector<double>(stages, 0));
  check("kept", result.kept, stages);
  fill(result.kept_for_weights, result.kept);
  check("kept_for_weights", result.kept_for_weights, stages);
  fill(result.gradients_for_weights, std::vector<double>(stages, 0));
  check("gradients_for_weights", result.gradients_for_weights, stages);
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
