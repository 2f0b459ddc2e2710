#include "graph/operator_traits.h"

#include <set>

#include "graph/random.h"

namespace smp::graph {
namespace {

bool is_tensor_type(const c10::TypePtr& type) {
  return type->isSubtypeOf(*c10::TensorType::get()) ||
         type->isSubtypeOf(*c10::ListType::ofTensors());
}

}  // namespace

bool returns_host_value(const c10::FunctionSchema& schema) {
  for (const auto& result : schema.returns()) {
    if (!is_tensor_type(result.type())) return true;
  }
  return false;
}

bool reads_only_metadata(const std::string& name) {
  static const std::set<std::string> names = {
      "aten::is_same_size", "aten::is_floating_point",  "aten::is_complex",    "aten::is_signed",
      "aten::result_type",  "aten::can_cast",           "aten::promote_types", "aten::size",
      "aten::stride",       "aten::sym_size",           "aten::sym_stride",    "aten::sym_numel",
      "aten::is_inference", "aten::cudnn_is_acceptable"};
  return names.count(name) > 0;
}

bool writes_running_statistics(const std::string& name) {
  static const std::set<std::string> names = {"aten::batch_norm", "aten::instance_norm",
                                              "aten::native_batch_norm",
                                              "aten::_batch_norm_impl_index"};
  return names.count(name) > 0;
}

bool replaces_storage(const std::string& name) {
  return name == "aten::set_" || name == "aten::resize_" || name == "aten::resize_as_" ||
         name == "aten::_has_compatible_shallow_copy_type";
}

int storage_offset_argument(const c10::FunctionSchema& schema) {
  if (schema.name().rfind("aten::as_strided", 0) != 0) return -1;
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    if (schema.arguments()[i].name() == "storage_offset") return static_cast<int>(i);
  }
  return -1;
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

bool is_uninitialised_factory(const std::string& name) {
  return name.rfind("aten::empty", 0) == 0 || name.rfind("aten::new_empty", 0) == 0;
}

}  // namespace smp::graph
