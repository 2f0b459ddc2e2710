// SPDX-License-Identifier: Apache-2.0
#include "smp/clip_grad.h"

#include "core/status.h"
#include "runtime/update/clip_grad.h"
#include "smp/model_core.h"

namespace smp {

at::Tensor grad_norm(const std::vector<at::Tensor>& parameters, double norm_type) {
  const core::CallScope here("smp::grad_norm");
  return runtime::grad_norm(parameters, norm_type);
}

double clip_grad_norm_(const std::vector<at::Tensor>& parameters, double max_norm, double norm_type,
                       bool error_if_nonfinite) {
  const core::CallScope here("smp::clip_grad_norm_");
  return runtime::clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite);
}

void clip_grad_value_(const std::vector<at::Tensor>& parameters, double clip_value) {
  runtime::clip_grad_value_(parameters, clip_value);
}

at::Tensor grad_norm(const ModelCore& model, double norm_type) {
  return grad_norm(model.parameters(), norm_type);
}

double clip_grad_norm_(const ModelCore& model, double max_norm, double norm_type,
                       bool error_if_nonfinite) {
  return clip_grad_norm_(model.parameters(), max_norm, norm_type, error_if_nonfinite);
}

void clip_grad_value_(const ModelCore& model, double clip_value) {
  clip_grad_value_(model.parameters(), clip_value);
}

}  // namespace smp
