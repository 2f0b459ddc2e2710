// SPDX-License-Identifier: Apache-2.0
#include "graph/operator_traits.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/jit_type.h>

#include <algorithm>
#include <map>
#include <string>
#include <unordered_set>

#include "graph/random.h"

namespace smp::graph {
namespace {

/// The operators of each trait, which have one at the most.
const std::map<OperatorTrait, std::unordered_set<std::string>>& table() {
  using Trait = OperatorTrait;
  static const std::map<Trait, std::unordered_set<std::string>> operators = {
      {Trait::kReadsMetadata,
       {"aten::can_cast", "aten::cudnn_is_acceptable", "aten::is_complex",
        "aten::is_floating_point", "aten::is_inference", "aten::is_same_size", "aten::is_signed",
        "aten::promote_types", "aten::result_type", "aten::size", "aten::stride", "aten::sym_numel",
        "aten::sym_size", "aten::sym_stride"}},
      {Trait::kUpdatesStatistics,
       {"aten::_batch_norm_impl_index", "aten::batch_norm", "aten::batch_norm_gather_stats",
        "aten::batch_norm_gather_stats_with_counts", "aten::batch_norm_update_stats",
        "aten::cudnn_batch_norm", "aten::instance_norm", "aten::miopen_batch_norm",
        "aten::native_batch_norm"}},
      {Trait::kReplacesStorage,
       {"aten::_has_compatible_shallow_copy_type", "aten::resize_", "aten::resize_as_",
        "aten::set_"}},
      {Trait::kLeavesUninitialised,
       {"aten::empty", "aten::empty_like", "aten::empty_permuted", "aten::empty_quantized",
        "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided"}},
      {Trait::kCutsHistory,
       {"aten::detach", "aten::detach_", "aten::variable_data", "smp::requires_grad"}},
      {Trait::kLaysOutByDevice,
       {"aten::group_norm", "aten::max_pool1d", "aten::pad", "aten::pixel_shuffle",
        "aten::pixel_unshuffle", "aten::reflection_pad3d", "aten::scaled_dot_product_attention"}}};
  return operators;
}

bool is_tensor_type(const c10::TypePtr& type) {
  return type->isSubtypeOf(*c10::TensorType::get()) ||
         type->isSubtypeOf(*c10::ListType::ofTensors());
}

}  // namespace

bool has_trait(const std::string& name, OperatorTrait trait) {
  return table().at(trait).count(name) > 0;
}

bool returns_host_value(const c10::FunctionSchema& schema) {
  for (const auto& result : schema.returns()) {
    if (!is_tensor_type(result.type())) return true;
  }
  return false;
}

bool has_tensor_argument(const c10::FunctionSchema& schema) {
  for (const auto& argument : schema.arguments()) {
    if (is_tensor_type(without_optional(argument.type()))) return true;
  }
  return false;
}

bool host_may_write(const c10::OperatorHandle& op) {
  return !is_random(op) && !has_tensor_argument(op.schema());
}

bool concerns_autocast(const c10::OperatorHandle& op, at::DeviceType type) {
  return op.hasKernelForDispatchKey(
             at::autocast::get_autocast_dispatch_key_from_device_type(type)) ||
         op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
}

c10::TypePtr without_optional(const c10::TypePtr& type) {
  const auto* optional = type->castRaw<c10::OptionalType>();
  return optional == nullptr ? type : optional->getElementType();
}

int storage_offset_argument(const c10::FunctionSchema& schema) {
  if (schema.name().rfind("aten::as_strided", 0) != 0) return -1;
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    if (schema.arguments()[i].name() == "storage_offset") return static_cast<int>(i);
  }
  return -1;
}

bool is_running_statistic(const c10::FunctionSchema& schema, size_t index) {
  return has_trait(schema.name(), OperatorTrait::kUpdatesStatistics) &&
         schema.arguments()[index].name().rfind("running_", 0) == 0;
}

std::optional<size_t> training_argument(const c10::FunctionSchema& schema) {
  const auto& arguments = schema.arguments();
  const auto found = std::find_if(arguments.begin(), arguments.end(), [](const auto& argument) {
    return argument.name() == "training" || argument.name() == "use_input_stats";
  });
  if (found == arguments.end()) return std::nullopt;
  return static_cast<size_t>(found - arguments.begin());
}

}  // namespace smp::graph
