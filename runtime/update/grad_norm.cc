// SPDX-License-Identifier: Apache-2.0
#include "runtime/update/grad_norm.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <ATen/ops/scalar_tensor.h>

#include <algorithm>
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

std::vector<at::Tensor> norms_of_pieces(const dp::ParameterSlices& slices,
                                        const std::function<at::Tensor(size_t)>& piece,
                                        const std::vector<bool>& wanted, double norm_type,
                                        bool as_summed) {
  at::NoGradGuard no_grad;
  std::vector<at::Tensor> norms(wanted.size());
  if (norm_type == 0 || norm_type == std::numeric_limits<double>::infinity()) {
    for (size_t i = 0; i < wanted.size(); ++i) {
      const at::Tensor mine = wanted[i] ? piece(i) : at::Tensor();
      if (mine.defined()) norms[i] = optim::gradient_norm(mine, norm_type);
    }
    return norms;
  }
  for (size_t b = 0; b < slices.layout().size(); ++b) {
    const auto& members = slices.layout().members[b];
    if (std::none_of(members.begin(), members.end(), [&](size_t i) { return wanted[i]; })) continue;
    const int root = static_cast<int>(b) % slices.group()->size();
    const auto summed = slices.layout().options[b].dtype().toScalarType();
    const at::Tensor flat = slices.gather_bucket(b, summed, piece, root);
    for (size_t i : members) {
      if (!wanted[i] || !flat.defined()) continue;
      const at::Tensor gradient = slices.place(flat, i);
      const auto dtype = as_summed ? summed : slices.parameters()[i].scalar_type();
      norms[i] = optim::gradient_norm(gradient.to(dtype), norm_type);
    }
  }
  return norms;
}

}  // namespace smp::runtime
