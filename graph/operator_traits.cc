// SPDX-License-Identifier: Apache-2.0
#include "graph/operator_traits.h"

#include <algorithm>
#include <unordered_map>

#include "graph/random.h"

namespace smp::graph {
namespace {

const std::unordered_map<std::string, OperatorTrait>& table() {
  using Trait = OperatorTrait;
  static const std::unordered_map<std::string, Trait> traits = {
      {"aten::_batch_norm_impl_index", Trait::kUpdatesStatistics},
      {"aten::_has_compatible_shallow_copy_type", Trait::kReplacesStorage},
      {"aten::batch_norm", Trait::kUpdatesStatistics},
      {"aten::batch_norm_gather_stats", Trait::kUpdatesStatistics},
      {"aten::batch_norm_gather_stats_with_counts", Trait::kUpdatesStatistics},
      {"aten::batch_norm_update_stats", Trait::kUpdatesStatistics},
      {"aten::can_cast", Trait::kReadsMetadata},
      {"aten::cudnn_batch_norm", Trait::kUpdatesStatistics},
      {"aten::cudnn_is_acceptable", Trait::kReadsMetadata},
      {"aten::detach", Trait::kCutsHistory},
      {"aten::detach_", Trait::kCutsHistory},
      {"aten::empty", Trait::kLeavesUninitialised},
      {"aten::empty_like", Trait::kLeavesUninitialised},
      {"aten::empty_permuted", Trait::kLeavesUninitialised},
      {"aten::empty_quantized", Trait::kLeavesUninitialised},
      {"aten::empty_strided", Trait::kLeavesUninitialised},
      {"aten::group_norm", Trait::kLaysOutByDevice},
      {"aten::instance_norm", Trait::kUpdatesStatistics},
      {"aten::is_complex", Trait::kReadsMetadata},
      {"aten::is_floating_point", Trait::kReadsMetadata},
      {"aten::is_inference", Trait::kReadsMetadata},
      {"aten::is_same_size", Trait::kReadsMetadata},
      {"aten::is_signed", Trait::kReadsMetadata},
      {"aten::max_pool1d", Trait::kLaysOutByDevice},
      {"aten::miopen_batch_norm", Trait::kUpdatesStatistics},
      {"aten::native_batch_norm", Trait::kUpdatesStatistics},
      {"aten::new_empty", Trait::kLeavesUninitialised},
      {"aten::new_empty_strided", Trait::kLeavesUninitialised},
      {"aten::pad", Trait::kLaysOutByDevice},
      {"aten::pixel_shuffle", Trait::kLaysOutByDevice},
      {"aten::pixel_unshuffle", Trait::kLaysOutByDevice},
      {"aten::promote_types", Trait::kReadsMetadata},
      {"aten::reflection_pad3d", Trait::kLaysOutByDevice},
      {"aten::resize_", Trait::kReplacesStorage},
      {"aten::resize_as_", Trait::kReplacesStorage},
      {"aten::result_type", Trait::kReadsMetadata},
      {"aten::scaled_dot_product_attention", Trait::kLaysOutByDevice},
      {"aten::set_", Trait::kReplacesStorage},
      {"aten::size", Trait::kReadsMetadata},
      {"aten::stride", Trait::kReadsMetadata},
      {"aten::sym_numel", Trait::kReadsMetadata},
      {"aten::sym_size", Trait::kReadsMetadata},
      {"aten::sym_stride", Trait::kReadsMetadata},
      {"aten::variable_data", Trait::kCutsHistory},
      {"smp::requires_grad", Trait::kCutsHistory},
  };
  return traits;
}

bool is_tensor_type(const c10::TypePtr& type) {
  return type->isSubtypeOf(*c10::TensorType::get()) ||
         type->isSubtypeOf(*c10::ListType::ofTensors());
}

}  // namespace

bool has_trait(const std::string& name, OperatorTrait trait) {
  const auto found = table().find(name);
  return found != table().end() && found->second == trait;
}

bool returns_host_value(const c10::FunctionSchema& schema) {
  for (const auto& result : schema.returns()) {
    if (!is_tensor_type(result.type())) return true;
  }
  return false;
}

bool has_tensor_argument(const c10::FunctionSchema& schema) {
  for (const auto& argument : schema.arguments()) {
    auto type = argument.type();
    if (type->kind() == c10::TypeKind::OptionalType) {
      type = type->expectRef<c10::OptionalType>().getElementType();
    }
    if (is_tensor_type(type)) return true;
  }
  return false;
}

bool host_may_write(const c10::OperatorHandle& op) {
  return !is_random(op) && !has_tensor_argument(op.schema());
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
