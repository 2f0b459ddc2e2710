// SPDX-License-Identifier: Apache-2.0
#include "runtime/update/grad_norm.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <ATen/ops/scalar_tensor.h>

#include <algorithm>
#include <iterator>
#include <limits>

#include "core/check.h"
#include "core/numbers.h"
#include "optim/grad_norm.h"

namespace smp::runtime {
namespace {

constexpr double kNone = -std::numeric_limits<double>::infinity();  // less than any number

}  // namespace

std::vector<std::optional<double>> share_norms(const std::vector<at::Tensor>& norms,
                                               comm::Communicator& group) {
  at::NoGradGuard no_grad;
  const auto count = static_cast<int64_t>(norms.size());
  // Norms are doubles on the way, which changes none, and a maximum takes one of several equal.
  const at::Tensor exchanged = at::full({count}, kNone, at::kDouble);
  double* const numbers = exchanged.mutable_data_ptr<double>();
  std::vector<at::Tensor> own;
  std::copy_if(norms.begin(), norms.end(), std::back_inserter(own),
               [](const at::Tensor& norm) { return norm.defined(); });
  const std::vector<double> own_numbers = core::read_numbers(own);
  auto next = own_numbers.begin();
  for (int64_t i = 0; i < count; ++i) {
    if (norms[i].defined()) numbers[i] = *next++;
  }
  group.all_reduce(exchanged, ReduceOp::kMax);
  std::vector<std::optional<double>> result(norms.size());
  for (int64_t i = 0; i < count; ++i) {
    if (numbers[i] != kNone) result[i] = numbers[i];
  }
  return result;
}

at::Tensor total_norm(const std::vector<GradientNorm>& norms, double norm_type,
                      comm::Communicator& group, uint64_t fingerprint, const std::string& call) {
  at::NoGradGuard no_grad;
  std::vector<at::Tensor> own;
  for (const GradientNorm& norm : norms) own.push_back(norm.norm);
  const at::Tensor asked_for = at::scalar_tensor(static_cast<double>(fingerprint), at::kDouble);
  own.push_back(asked_for);
  own.push_back(-asked_for);
  const auto all = share_norms(own, group);
  const size_t count = norms.size();
  SMP_CHECK_WITH(UsageError, *all[count] == -*all[count + 1], call,
                 " was called with other arguments on other ranks. Give all ranks the same "
                 "parameters in the same order, such as model->parameters() (not "
                 "local_parameters()), and the same numbers");
  std::vector<at::Tensor> present;
  for (size_t i = 0; i < count; ++i) {
    if (all[i]) present.push_back(at::scalar_tensor(*all[i], norms[i].dtype));
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
