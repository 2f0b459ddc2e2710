// SPDX-License-Identifier: Apache-2.0
#include "runtime/update/clip_grad.h"

#include <ATen/core/grad_mode.h>
#include <xxhash.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>
#include <string>
#include <unordered_set>
#include <utility>

#include "core/check.h"
#include "dp/bucket_layout.h"
#include "optim/grad_norm.h"
#include "runtime/precision.h"
#include "runtime/runtime.h"
#include "runtime/update/complete_gradients.h"
#include "runtime/update/grad_norm.h"
#include "runtime/update/optimizer_pieces.h"
#include "runtime/update/update_watch.h"

namespace smp::runtime {
namespace {

/// The real type of the norm of a parameter's `.grad`, which is of float32 for half precision that
/// the configuration asks for.
at::ScalarType gradient_type(const Config& config, const at::Tensor& parameter) {
  const bool summed = half_type(config) && MasterWeights::concerns(parameter);
  return summed ? at::kFloat : c10::toRealValueType(parameter.scalar_type());
}

/// The listed parameters, each once, and this rank's parts of their gradients.
class Gradients {
 public:
  Gradients(std::string call, const std::vector<at::Tensor>& parameters)
      : call_(std::move(call)), runtime_(Runtime::get()), divided_(!pieces_of(runtime_).empty()) {
    begin_use_of_gradients(call_);
    std::unordered_set<const c10::TensorImpl*> seen;
    for (size_t i = 0; i < parameters.size(); ++i) {
      if (seen.insert(parameters[i].unsafeGetTensorImpl()).second) add(i, parameters[i]);
    }
  }

  /// Whole gradients and pieces; undefined where this rank has nothing.
  std::vector<at::Tensor> mine() const {
    std::vector<at::Tensor> result;
    for (const Entry* entry : listed_) result.push_back(gradient(*entry));
    return result;
  }

  at::Tensor norm(double norm_type, const std::vector<double>& numbers) const {
    std::vector<Held> held;
    for (const Entry* entry : listed_) held.push_back(held_of(*entry));
    const auto own = norms_of_wholes(runtime_, held, norm_type);
    std::vector<GradientNorm> norms;
    for (size_t i = 0; i < listed_.size(); ++i) {
      norms.push_back({own[i], gradient_type(runtime_.config(), listed_[i]->tensor)});
    }
    return total_norm(padded(norms), norm_type, group(), fingerprint(numbers), call_);
  }

 private:
  using Entry = ParameterTable::Entry;

  void add(size_t position, const at::Tensor& parameter) {
    const auto* entry = runtime_.table().find(parameter);
    SMP_CHECK_WITH(
        UsageError, entry != nullptr && entry->is_parameter(), call_, ": tensor ", position,
        " of shape ", parameter.sizes(),
        " is not a parameter of a DistributedModel. Give it model->parameters(), or some "
        "of them (not those of virtual_named_parameters())");
    listed_.push_back(entry);
  }

  at::Tensor gradient(const Entry& entry) const {
    if (entry.piece) entry.piece->has_gradient();  // drops it where the program has
    const bool has_some = runtime_.owns(entry) && entry.updated().defined();
    return has_some ? entry.updated().grad() : at::Tensor();
  }

  Held held_of(const Entry& entry) const {
    const auto& piece = entry.piece;
    at::Tensor own = gradient(entry);
    const bool exists = piece ? piece->has_gradient() : own.defined();
    const auto dtype = half_type(runtime_.config())
                           ? dp::sum_options(entry.tensor).dtype().toScalarType()
                           : entry.tensor.scalar_type();
    return {&entry, entry.within_owner(), std::move(own), dtype, exists};
  }

  /// Norms padded to the number of parameters and buffers, so that ranks that were given lists of
  /// other lengths find that out.
  std::vector<GradientNorm> padded(std::vector<GradientNorm> norms) const {
    norms.resize(runtime_.table().entries().size());
    return norms;
  }

  /// The fingerprint of the list and the numbers that the function was given.
  uint64_t fingerprint(const std::vector<double>& numbers) const {
    std::vector<size_t> entries;
    const auto* first = runtime_.table().entries().data();
    for (const Entry* entry : listed_) entries.push_back(entry - first);
    const uint64_t of_list = XXH64(entries.data(), entries.size() * sizeof(size_t), /*seed=*/0);
    return XXH64(numbers.data(), numbers.size() * sizeof(double), of_list) >> 11;
  }

  comm::Communicator& group() const {
    return *runtime_.group(divided_ ? CommGroup::kWorld : CommGroup::kMp);
  }

  std::string call_;
  Runtime& runtime_;
  bool divided_;  // whether replicas divide parameters
  std::vector<const Entry*> listed_;
};

}  // namespace

at::Tensor grad_norm(const std::vector<at::Tensor>& parameters, double norm_type) {
  at::NoGradGuard no_grad;
  return Gradients("smp::grad_norm", parameters).norm(norm_type, {norm_type});
}

double clip_grad_norm_(const std::vector<at::Tensor>& parameters, double max_norm, double norm_type,
                       bool error_if_nonfinite) {
  at::NoGradGuard no_grad;
  const Gradients gradients("smp::clip_grad_norm_", parameters);
  const at::Tensor norm = gradients.norm(norm_type, {max_norm, norm_type});
  const double value = norm.item<double>();
  SMP_CHECK_WITH(UsageError, !error_if_nonfinite || std::isfinite(value),
                 "smp::clip_grad_norm_: the norm of order ", norm_type, " of the gradients is ",
                 value,
                 ", so they cannot be clipped. Nothing was changed. Skip this step, look for "
                 "the loss that is not finite, or pass error_if_nonfinite = false to scale them "
                 "anyway");
  const UpdateWatch::OwnScaling own;
  optim::scale_to_norm(gradients.mine(), norm, max_norm);
  return value;
}

void clip_grad_value_(const std::vector<at::Tensor>& parameters, double clip_value) {
  at::NoGradGuard no_grad;
  const UpdateWatch::OwnScaling own;
  for (const at::Tensor& gradient : Gradients("smp::clip_grad_value_", parameters).mine()) {
    if (gradient.defined()) gradient.clamp_(-clip_value, clip_value);
  }
}

}  // namespace smp::runtime
