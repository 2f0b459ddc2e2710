// SPDX-License-Identifier: Apache-2.0
#include "runtime/update/gradient_probes.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

namespace smp::runtime {
namespace {

constexpr size_t kParameters = 16;
constexpr int64_t kElements = 4;  // elements probed of each

bool can_look(const at::Tensor& gradient) {
  return gradient.defined() && gradient.is_floating_point() && !gradient.is_meta() &&
         gradient.layout() == at::kStrided && gradient.numel() > 0;
}

/// Some elements, far from each other where that is easy to tell: how many, and their distance.
std::pair<int64_t, int64_t> chosen_from(const at::Tensor& gradient) {
  if (!gradient.is_non_overlapping_and_dense()) return {1, 1};
  const int64_t count = std::min(kElements, gradient.numel());
  return {count, gradient.numel() / count};
}

/// Without an operator, since it is done at every step.
void append_floats(const at::Tensor& gradient, std::vector<double>& elements) {
  const auto [count, distance] = chosen_from(gradient);
  const auto* const floats = gradient.const_data_ptr<float>();
  for (int64_t i = 0; i < count; ++i) elements.push_back(floats[i * distance]);
}

/// Elements of another type, or of a device, where they lie.
at::Tensor elements_of(const at::Tensor& gradient) {
  const auto [count, distance] = chosen_from(gradient);
  return gradient.detach().as_strided({count}, {distance});
}

/// Copies the elements, with one kernel of a device and without a wait. Undefined where one of the
/// gradients is gone.
at::Tensor read(const std::vector<at::Tensor>& parameters) {
  at::NoGradGuard no_grad;
  std::vector<double> floats;
  std::vector<at::Tensor> others;
  for (const at::Tensor& parameter : parameters) {
    const at::Tensor& gradient = parameter.grad();
    if (!can_look(gradient)) return {};
    if (gradient.is_cpu() && gradient.scalar_type() == at::kFloat) {
      append_floats(gradient, floats);
    } else {
      others.push_back(elements_of(gradient));
    }
  }
  if (!floats.empty()) others.push_back(at::tensor(floats, at::kDouble));
  return others.empty() ? at::Tensor() : at::cat(others);
}

double epsilon_of(at::ScalarType type) {
  if (type == at::kHalf) return std::numeric_limits<at::Half>::epsilon();
  if (type == at::kBFloat16) return std::numeric_limits<at::BFloat16>::epsilon();
  return std::numeric_limits<float>::epsilon();
}

}  // namespace

void GradientProbes::look(const std::vector<at::Tensor>& parameters) {
  std::vector<at::Tensor> seen;
  for (const at::Tensor& parameter : parameters) {
    if (can_look(parameter.grad())) seen.push_back(parameter);
  }
  parameters_.clear();
  tolerance_ = 0;
  const size_t every = (seen.size() + kParameters - 1) / kParameters;
  for (size_t i = 0; i < seen.size(); i += every) {
    parameters_.push_back(seen[i]);
    tolerance_ = std::max(tolerance_, 4 * epsilon_of(seen[i].grad().scalar_type()));
  }
  elements_ = read(parameters_);
}

std::optional<double> GradientProbes::factor() const {
  const at::Tensor now = elements_.defined() ? read(parameters_) : at::Tensor();
  if (!now.defined() || now.numel() != elements_.numel()) return std::nullopt;
  const at::Tensor both = at::cat({elements_, now}).cpu().to(at::kDouble);
  const double* const before = both.const_data_ptr<double>();
  const double* const after = before + now.numel();
  std::optional<double> factor;
  for (int64_t i = 0; i < now.numel(); ++i) {
    if (before[i] == 0 && after[i] == 0) continue;
    const double ratio = after[i] / before[i];
    if (!std::isfinite(ratio) || ratio == 0) return std::nullopt;
    if (factor && std::abs(ratio - *factor) > tolerance_ * std::abs(*factor)) return std::nullopt;
    if (!factor) factor = ratio;
  }
  return factor;
}

}  // namespace smp::runtime
