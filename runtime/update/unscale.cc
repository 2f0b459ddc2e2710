// SPDX-License-Identifier: Apache-2.0
#include "runtime/update/unscale.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/full.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include <limits>
#include <map>
#include <string>
#include <utility>

#include "runtime/update/update_watch.h"

namespace smp::runtime {
namespace {

/// The gradients that have elements, by device and dtype.
std::vector<std::vector<at::Tensor>> group_alike(const std::vector<at::Tensor>& gradients) {
  std::map<std::pair<std::string, at::ScalarType>, std::vector<at::Tensor>> groups;
  for (const at::Tensor& gradient : gradients) {
    if (gradient.numel() == 0) continue;
    groups[{gradient.device().str(), gradient.scalar_type()}].push_back(gradient.detach());
  }
  std::vector<std::vector<at::Tensor>> result;
  for (auto& [key, group] : groups) result.push_back(std::move(group));
  return result;
}

/// The largest absolute value tells: it is NaN where one is.
bool all_finite(const std::vector<at::Tensor>& gradients) {
  const auto largest = at::_foreach_norm(gradients, std::numeric_limits<double>::infinity());
  return at::isfinite(at::stack(largest)).all().item<bool>();
}

}  // namespace

GradientCheck check_gradients(const std::vector<at::Tensor>& gradients, comm::Communicator* world) {
  at::NoGradGuard no_grad;
  GradientCheck check;
  for (const auto& group : group_alike(gradients)) check.found_inf |= !all_finite(group);
  check.any = !gradients.empty();
  if (world == nullptr || world->size() == 1) return check;
  const at::Tensor flags = at::zeros({2}, at::kByte);
  auto* flag = flags.mutable_data_ptr<uint8_t>();
  flag[0] = check.found_inf;
  flag[1] = check.any;
  world->all_reduce(flags, ReduceOp::kMax);
  return {flag[0] != 0, flag[1] != 0};
}

void unscale_gradients(const std::vector<at::Tensor>& gradients, double scale) {
  at::NoGradGuard no_grad;
  const UpdateWatch::OwnScaling own;
  const auto inverse = static_cast<float>(1.0 / scale);
  for (const auto& group : group_alike(gradients)) {
    const auto options = group.front().options().dtype(at::kFloat);
    at::Tensor found_inf = at::zeros({}, options);
    at::_amp_foreach_non_finite_check_and_unscale_(group, found_inf,
                                                   at::full({}, inverse, options));
  }
}

}  // namespace smp::runtime
