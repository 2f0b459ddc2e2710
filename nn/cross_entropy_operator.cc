// SPDX-License-Identifier: Apache-2.0
// smp::tp_cross_entropy. For sample i with target t, weights w (1 without), label smoothing e and C
// classes, where log p_c = x_c - max - log(sum_c exp(x_c - max)):
//
//   loss_i = -(1 - e) w_t log p_t - (e / C) sum_c w_c log p_c
//   d loss_i / d x_k = p_k ((1 - e) w_t + (e / C) sum_c w_c) - (1 - e) w_t [k = t] - (e / C) w_k
//
// and 0 if t is ignored. The mean divides by the sum of w_t over the samples that are not.

#include <ATen/TensorOperators.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/Reduction.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <optional>
#include <vector>

#include "core/check.h"
#include "nn/operator_call.h"
#include "nn/tensor_group.h"

namespace smp::nn {
namespace {

using at::Tensor;

struct Settings {
  int64_t reduction;
  int64_t ignore_index;
  double label_smoothing;
  int64_t first;    ///< first of this rank's classes
  int64_t classes;  ///< classes of all ranks
};

struct Loss {
  Tensor value;
  Tensor probabilities;  ///< those of this rank's classes, in the logits' type
};

void check(const Tensor& logits, const Tensor& target, const Tensor& weight,
           const Settings& settings) {
  std::vector<int64_t> expected = logits.sizes().vec();
  if (expected.size() >= 2) expected.erase(expected.begin() + 1);
  SMP_CHECK_WITH(UsageError,
                 logits.dim() >= 2 && target.sizes() == at::IntArrayRef(expected) &&
                     target.scalar_type() == at::kLong,
                 "smp::tp_cross_entropy: logits of sizes ", logits.sizes(), " and a target of ",
                 target.scalar_type(), target.sizes(),
                 ". Expected are logits [N, classes of this rank, ...] and class indices (int64) "
                 "[N, ...]; class probabilities as the target are not supported");
  SMP_CHECK_WITH(UsageError,
                 !weight.defined() || (weight.dim() == 1 && weight.size(0) == settings.classes),
                 "smp::tp_cross_entropy: the weight of the classes has sizes ", weight.sizes(),
                 ", but the logits of all ranks have ", settings.classes,
                 " classes. Give every rank the weights of all classes");
  SMP_CHECK_WITH(UsageError, settings.label_smoothing >= 0 && settings.label_smoothing <= 1,
                 "smp::tp_cross_entropy: a label smoothing between 0 and 1 was expected, got ",
                 settings.label_smoothing);
  if (!target.is_cpu() || target.numel() == 0) return;
  const Tensor wrong = target.ne(settings.ignore_index)
                           .logical_and_(target.lt(0).logical_or_(target.ge(settings.classes)));
  SMP_CHECK_WITH(UsageError, !wrong.any().item<bool>(), "smp::tp_cross_entropy: target ",
                 target.masked_select(wrong)[0].item<int64_t>(), " is none of the ",
                 settings.classes, " classes of the logits of all ranks, nor ignore_index ",
                 settings.ignore_index);
}

at::ScalarType sum_type(const Tensor& logits) {
  const auto type = logits.scalar_type();
  return type == at::kHalf || type == at::kBFloat16 ? at::kFloat : type;
}

/// A weight [C] with the dimensions of logits.
Tensor along_classes(const Tensor& weight, int64_t dims) {
  std::vector<int64_t> sizes(dims, 1);
  sizes[1] = weight.size(0);
  return weight.view(sizes);
}

/// Where targets are among this rank's classes, and which of them they are (0 elsewhere).
struct Own {
  Tensor here, index;

  Own(const Tensor& target, int64_t first, int64_t count) {
    const Tensor local = target - first;
    here = local.ge(0).logical_and_(local.lt(count));
    index = local.masked_fill(here.logical_not(), 0).unsqueeze(1);
  }
};

/// The weight of each sample: of its target, 0 if it is ignored.
Tensor sample_weights(const Tensor& target, const Tensor& weight, const Settings& settings,
                      at::ScalarType type) {
  const Tensor ignored = target.eq(settings.ignore_index);
  if (!weight.defined()) return ignored.logical_not().to(type);
  return weight.to(type)
      .index_select(0, target.masked_fill(ignored, 0).flatten())
      .view_as(target)
      .masked_fill_(ignored, 0);
}

/// This rank's part of `weight`, with the dimensions of `logits`.
Tensor own_weights(const Tensor& weight, const Tensor& logits, const Settings& settings) {
  return along_classes(weight.narrow(0, settings.first, logits.size(1)).to(sum_type(logits)),
                       logits.dim());
}

Tensor reduced(const Tensor& losses, const Tensor& samples, int64_t reduction) {
  if (reduction == at::Reduction::None) return losses;
  const Tensor sum = losses.sum();
  return reduction == at::Reduction::Sum ? sum : sum / samples.sum();
}

Loss compute(const Tensor& logits, const Tensor& target, const Tensor& weight,
             const Settings& settings) {
  check(logits, target, weight, settings);
  if (logits.is_meta()) {
    const bool is_number = settings.reduction != at::Reduction::None;
    return {at::empty(is_number ? at::IntArrayRef() : target.sizes(), logits.options()), {}};
  }
  const auto group = tensor_group();
  const Tensor x = logits.to(sum_type(logits));
  const Tensor max = x.amax(1, /*keepdim=*/true).contiguous();
  group->all_reduce(max, ReduceOp::kMax);
  const Tensor shifted = x - max;
  const Own own(target, settings.first, logits.size(1));
  // Not by a product, since a logit that is not the target's may be -inf.
  std::vector<Tensor> terms{
      shifted.gather(1, own.index).squeeze(1).masked_fill_(own.here.logical_not(), 0)};
  if (settings.label_smoothing > 0) {
    terms.push_back(
        (weight.defined() ? shifted * own_weights(weight, logits, settings) : shifted).sum(1));
  }
  Tensor probabilities = shifted.exp_();
  terms.push_back(probabilities.sum(1));
  const Tensor sums = at::stack(terms);
  group->all_reduce(sums);
  const Tensor total = sums[sums.size(0) - 1];
  const Tensor log_total = total.log();
  const Tensor samples = sample_weights(target, weight, settings, x.scalar_type());
  Tensor losses = (log_total - sums[0]) * samples * (1 - settings.label_smoothing);
  if (settings.label_smoothing > 0) {
    const Tensor of_all = weight.defined() ? log_total * weight.to(x.scalar_type()).sum() - sums[1]
                                           : log_total * settings.classes - sums[1];
    losses = losses + (of_all * (settings.label_smoothing / settings.classes))
                          .masked_fill_(target.eq(settings.ignore_index), 0);
  }
  // An ignored sample is 0 whatever its logits are.
  losses = losses.masked_fill(target.eq(settings.ignore_index), 0);
  return {reduced(losses, samples, settings.reduction).to(logits.scalar_type()),
          probabilities.div_(total.unsqueeze(1)).to(logits.scalar_type())};
}

Tensor gradient_of(const Tensor& gradient, const Tensor& probabilities, const Tensor& target,
                   const Tensor& weight, const Settings& settings) {
  const auto type = sum_type(probabilities);
  const Tensor ignored = target.eq(settings.ignore_index);
  const Tensor samples = sample_weights(target, weight, settings, type);
  Tensor scale = gradient.to(type);
  if (settings.reduction == at::Reduction::Mean) scale = scale / samples.sum();
  scale = scale.expand_as(target).masked_fill(ignored, 0);
  const Tensor of_target = samples * (1 - settings.label_smoothing) * scale;
  const double share = settings.label_smoothing / static_cast<double>(settings.classes);
  const Tensor of_all =
      weight.defined() ? scale * (weight.to(type).sum() * share) : scale * settings.label_smoothing;
  Tensor result = probabilities.to(type) * (of_target + of_all).unsqueeze(1);
  if (share > 0) {
    const Tensor each = scale.unsqueeze(1) * share;
    result =
        result - (weight.defined() ? each * own_weights(weight, probabilities, settings) : each);
  }
  const Own own(target, settings.first, probabilities.size(1));
  result.scatter_add_(1, own.index, (of_target * own.here).neg_().unsqueeze(1));
  return result.to(probabilities.scalar_type());
}

Settings settings_of(const Tensor& logits, int64_t reduction, int64_t ignore_index,
                     double label_smoothing) {
  const auto group = tensor_group();
  const int64_t count = logits.dim() >= 2 ? logits.size(1) : 0;
  return {reduction, ignore_index, label_smoothing, group->rank() * count, group->size() * count};
}

Tensor cross_entropy(const Tensor& logits, const Tensor& target,
                     const std::optional<Tensor>& weight, int64_t reduction, int64_t ignore_index,
                     double label_smoothing) {
  const Settings settings = settings_of(logits, reduction, ignore_index, label_smoothing);
  return compute(logits, target, weight.value_or(Tensor()), settings).value;
}

struct CrossEntropy : torch::autograd::Function<CrossEntropy> {
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& logits,
                        const Tensor& target, const std::optional<Tensor>& weight,
                        int64_t reduction, int64_t ignore_index, double label_smoothing) {
    const at::AutoDispatchBelowADInplaceOrView below;
    const Settings settings = settings_of(logits, reduction, ignore_index, label_smoothing);
    const Tensor given = weight.value_or(Tensor());
    Loss loss = compute(logits, target, given, settings);
    context->save_for_backward({loss.probabilities, target, given});
    auto& saved = context->saved_data;
    saved["reduction"] = reduction;
    saved["ignore_index"] = ignore_index;
    saved["label_smoothing"] = label_smoothing;
    saved["first"] = settings.first;
    saved["classes"] = settings.classes;
    return loss.value;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    SMP_CHECK_WITH(UsageError, !at::GradMode::is_enabled(),
                   "smp::tp_cross_entropy: its gradient cannot be differentiated again. Call "
                   "backward() without create_graph");
    auto& saved = context->saved_data;
    const Settings settings{saved["reduction"].toInt(), saved["ignore_index"].toInt(),
                            saved["label_smoothing"].toDouble(), saved["first"].toInt(),
                            saved["classes"].toInt()};
    const auto tensors = context->get_saved_variables();
    return {gradient_of(gradients[0], tensors[0], tensors[1], tensors[2], settings),
            Tensor(),
            Tensor(),
            Tensor(),
            Tensor(),
            Tensor()};
  }
};

Tensor cross_entropy_autograd(const Tensor& logits, const Tensor& target,
                              const std::optional<Tensor>& weight, int64_t reduction,
                              int64_t ignore_index, double label_smoothing) {
  return CrossEntropy::apply(logits, target, weight, reduction, ignore_index, label_smoothing);
}

/// Casts as aten::cross_entropy_loss does, whose inner operators autocast runs in float32.
template <c10::DispatchKey key, c10::DeviceType device>
Tensor cross_entropy_autocast(const Tensor& logits, const Tensor& target,
                              const std::optional<Tensor>& weight, int64_t reduction,
                              int64_t ignore_index, double label_smoothing) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(key);
  static const auto op =
      typed_operator<Tensor(const Tensor&, const Tensor&, const std::optional<Tensor>&, int64_t,
                            int64_t, double)>("smp::tp_cross_entropy");
  const auto cast = [](const Tensor& tensor) {
    return at::autocast::cached_cast(at::kFloat, tensor, device);
  };
  return op.call(cast(logits), target, weight.has_value() ? std::optional(cast(*weight)) : weight,
                 reduction, ignore_index, label_smoothing);
}

TORCH_LIBRARY_FRAGMENT(smp, m) {
  m.def(
      "tp_cross_entropy(Tensor logits, Tensor target, Tensor? weight, int reduction,"
      " int ignore_index, float label_smoothing) -> Tensor");
}

TORCH_LIBRARY_IMPL(smp, CompositeExplicitAutograd, m) {
  m.impl("tp_cross_entropy", &cross_entropy);
}

TORCH_LIBRARY_IMPL(smp, Autograd, m) { m.impl("tp_cross_entropy", &cross_entropy_autograd); }

TORCH_LIBRARY_IMPL(smp, AutocastCPU, m) {
  m.impl("tp_cross_entropy", &cross_entropy_autocast<c10::DispatchKey::AutocastCPU, at::kCPU>);
}

TORCH_LIBRARY_IMPL(smp, AutocastCUDA, m) {
  m.impl("tp_cross_entropy", &cross_entropy_autocast<c10::DispatchKey::AutocastCUDA, at::kCUDA>);
}

}  // namespace
}  // namespace smp::nn
