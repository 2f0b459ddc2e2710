#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <utility>
#include <vector>

namespace torch::optim {
class Optimizer;
}  // namespace torch::optim

namespace smp::optim {

// torch::nn::utils::clip_grad_norm_ in three parts, by the same operators in the same order, so
// that what stands between them may be communication.

/// The parameters of all groups of an optimizer, in their order.
std::vector<at::Tensor> parameters_of(const torch::optim::Optimizer& optimizer);

/// The norm of order `norm_type` of one gradient: a tensor without dimensions.
at::Tensor gradient_norm(const at::Tensor& gradient, double norm_type);

/// The norm of all gradients, whose own are `norms`; a zero without any. The bits depend on their
/// order.
at::Tensor norm_of_norms(const std::vector<at::Tensor>& norms, double norm_type);

/// Multiplies by max_norm / (norm + 1e-6) where that is less than one. Undefined ones are passed
/// over.
void scale_to_norm(const std::vector<at::Tensor>& gradients, const at::Tensor& norm,
                   double max_norm);

/// Gives the L2 norm over the gradients of parameters, of which some may have none.
using GradNorm = std::function<at::Tensor(const std::vector<at::Tensor>& parameters)>;

/// Of parameters of this process alone.
at::Tensor local_grad_norm(const std::vector<at::Tensor>& parameters);

/// Base of optimizers that need the norm over all gradients: where a model is divided among ranks,
/// `DistributedOptimizer` has them use one over all.
class UsesGradNorm {
 public:
  virtual ~UsesGradNorm() = default;
  void set_grad_norm(GradNorm norm) { grad_norm_ = std::move(norm); }

 protected:
  GradNorm grad_norm_ = local_grad_norm;
};

}  // namespace smp::optim
