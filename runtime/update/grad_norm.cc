// SPDX-License-Identifier: Apache-2.0
#include "runtime/update/grad_norm.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <ATen/ops/scalar_tensor.h>

#include <limits>

#include "core/check.h"
#include "optim/grad_norm.h"

namespace smp::runtime {
namespace {

constexpr double kNone = -1;  // less than any norm

}  // namespace

at::Tensor total_norm(const std::vector<GradientNorm>& norms, double norm_type,
                      comm::Communicator& group, uint64_t fingerprint, const std::string& call) {
  at::NoGradGuard no_grad;
  const auto count = static_cast<int64_t>(norms.size());
  // Norms are doubles on the way, which changes none, and a maximum takes one of several equal.
  const at::Tensor exchanged = at::full({count + 2}, kNone, at::kDouble);
  double* const numbers = exchanged.mutable_data_ptr<double>();
  for (int64_t i = 0; i < count; ++i) {
    if (norms[i].norm.defined()) numbers[i] = norms[i].norm.item<double>();
  }
  numbers[count] = static_cast<double>(fingerprint);
  numbers[count + 1] = -numbers[count];
  group.all_reduce(exchanged, ReduceOp::kMax);
  SMP_CHECK_WITH(UsageError, numbers[count] == -numbers[count + 1], call,
                 " was called with other arguments on other ranks. Give all ranks the same "
                 "parameters in the same order, such as model->parameters() (not "
                 "local_parameters()), and the same numbers");
  std::vector<at::Tensor> present;
  for (int64_t i = 0; i < count; ++i) {
    if (numbers[i] != kNone) present.push_back(at::scalar_tensor(numbers[i], norms[i].dtype));
  }
  return optim::norm_of_norms(present, norm_type);
}

std::vector<at::Tensor> norms_of_wholes(const Runtime& runtime, const std::vector<Held>& held,
                                        double norm_type) {
  std::vector<at::Tensor> norms(held.size());
  if (norm_type == 0 || norm_type == std::numeric_limits<double>::infinity()) {
    for (size_t i = 0; i < held.size(); ++i) {
      if (held[i].own.defined()) norms[i] = optim::gradient_norm(held[i].own, norm_type);
    }
    return norms;
  }
  for_each_whole(runtime, held, [&](size_t i, const at::Tensor& whole) {
    norms[i] = optim::gradient_norm(whole, norm_type);
  });
  return norms;
}

}  // namespace smp::runtime
