// SPDX-License-Identifier: Apache-2.0
#include "tools/train/loss.h"

#include <ATen/Functions.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "core/check.h"
#include "core/text.h"
#include "smp/error.h"

namespace smp::tools::train {
namespace {

/// The parts of a tuple, list or dictionary, with the words that choose them.
std::vector<std::pair<std::string, c10::IValue>> parts_of(const c10::IValue& result) {
  std::vector<std::pair<std::string, c10::IValue>> parts;
  const auto add_numbered = [&](const auto& values) {
    for (const auto& value : values) parts.emplace_back(std::to_string(parts.size()), value);
  };
  if (result.isGenericDict()) {
    for (const auto& entry : result.toGenericDict()) {
      const auto& key = entry.key();
      parts.emplace_back(key.isString() ? key.toStringRef() : c10::str(key), entry.value());
    }
  } else if (result.isTuple()) {
    add_numbered(result.toTupleRef().elements());
  } else if (result.isList()) {
    add_numbered(result.toListRef());
  }
  return parts;
}

std::string names_of(const c10::IValue& result) {
  if (result.isTensor()) return "one tensor, which is taken without --output";
  std::string names;
  for (const auto& [name, value] : parts_of(result)) {
    names += (names.empty() ? "" : ", ") + core::printable(name, 60) +
             (value.isTensor() ? "" : " (no tensor)");
  }
  return names.empty() ? "no tensor" : names;
}

}  // namespace

at::Tensor pick_output(const c10::IValue& result, const std::string& output) {
  if (output.empty() && result.isTensor()) return result.toTensor();
  if (!output.empty()) {
    for (const auto& [name, value] : parts_of(result)) {
      if (name == output && value.isTensor()) return value.toTensor();
    }
  }
  core::fail<UsageError>("the model's result has no tensor \"", core::printable(output, 60),
                         "\" for the loss, it has: ", names_of(result),
                         ". Choose one of them by --output");
}

at::Tensor as_target(const LossOptions& options, const at::Tensor& target) {
  if (options.kind != LossKind::kCrossEntropy) return target;
  SMP_CHECK_WITH(UsageError, at::isIntegralType(target.scalar_type(), /*includeBool=*/true),
                 "--loss cross_entropy got a target of type ", target.scalar_type(),
                 ", and takes labels, which are integers. Choose another --target, or write it as "
                 "integers");
  return target.to(at::kLong);
}

at::Tensor counted(const LossOptions& options, const at::Tensor& target) {
  if (options.kind == LossKind::kCrossEntropy) return target.ne(options.ignore_index);
  return at::ones_like(target, at::kBool);
}

at::Tensor sum_of_losses(const LossOptions& options, const at::Tensor& output,
                         const at::Tensor& target) {
  constexpr auto kSum = at::Reduction::Sum;
  const bool has_classes = options.kind == LossKind::kCrossEntropy;
  const at::Tensor moved = has_classes ? output.movedim(options.class_axis, -1) : output;
  const int64_t compared = std::max<int64_t>(moved.dim() - (has_classes ? 1 : 0), 0);
  const at::IntArrayRef wanted = moved.sizes().slice(0, static_cast<size_t>(compared));
  SMP_CHECK_WITH(UsageError, wanted == target.sizes(), "the loss compares an output of shape ",
                 output.sizes(), " with a target of shape ", target.sizes(), ", and needs ", wanted,
                 ". Choose others by --output and --target, or the axis of the classes by "
                 "--class-axis");
  if (has_classes) {
    return at::cross_entropy_loss(moved.flatten(0, -2), target.flatten(), /*weight=*/{}, kSum,
                                  options.ignore_index);
  }
  const at::Tensor numbers = target.to(output.scalar_type());
  if (options.kind == LossKind::kMse) return at::mse_loss(output, numbers, kSum);
  if (options.kind == LossKind::kL1) return at::l1_loss(output, numbers, kSum);
  return at::binary_cross_entropy_with_logits(output, numbers, /*weight=*/{}, /*pos_weight=*/{},
                                              kSum);
}

}  // namespace smp::tools::train
