// SPDX-License-Identifier: Apache-2.0
#include "graph/graph.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/StringUtil.h>
#include <xxhash.h>

#include <map>
#include <sstream>

#include "graph/content.h"
#include "graph/devices.h"
#include "graph/leaf.h"
#include "graph/operator_traits.h"
#include "graph/partition_scope.h"

namespace smp::graph {
namespace {

const char* short_name(at::ScalarType type) {
  static const std::map<at::ScalarType, const char*> names = {
      {at::kFloat, "f32"}, {at::kDouble, "f64"}, {at::kHalf, "f16"},  {at::kBFloat16, "bf16"},
      {at::kLong, "i64"},  {at::kInt, "i32"},    {at::kShort, "i16"}, {at::kChar, "i8"},
      {at::kByte, "u8"},   {at::kBool, "bool"}};
  const auto found = names.find(type);
  return found == names.end() ? c10::toString(type) : found->second;
}

bool is_contiguous(const TensorMeta& meta) {
  int64_t expected = 1;
  for (size_t i = meta.sizes.size(); i-- > 0;) {
    if (meta.sizes[i] != 1 && meta.strides[i] != expected) return false;
    expected *= meta.sizes[i];
  }
  return true;
}

uint64_t hash(const std::string& text, uint64_t seed = 0) {
  return XXH64(text.data(), text.size(), seed);
}

/// "cuda": ranks compare texts, and each has a device of its own.
std::string kind_of(at::Device device) {
  return c10::DeviceTypeName(device.type(), /*lower_case=*/true);
}

std::string value_text(ValueId id) { return id == kUndefined ? "_" : c10::str("%", id); }

std::string values_text(const c10::SmallVector<ValueId, 1>& values) {
  std::vector<std::string> texts;
  for (ValueId id : values) texts.push_back(value_text(id));
  return c10::Join(", ", texts);
}

std::string argument_text(const c10::FunctionSchema& schema, size_t index,
                          const Argument& argument) {
  const std::string prefix = schema.arguments()[index].name() + "=";
  switch (argument.kind) {
    case Argument::Kind::kTensor:
      return prefix + value_text(argument.values[0]);
    case Argument::Kind::kConstant:
      return prefix + (is_patchable(schema, index) ? "$" : constant_to_string(argument.constant));
    default:
      return prefix + "[" + values_text(argument.values) + "]";
  }
}

}  // namespace

TensorMeta TensorMeta::of(const at::Tensor& tensor) {
  TensorMeta meta;
  meta.sizes.assign(tensor.sizes().begin(), tensor.sizes().end());
  meta.strides.assign(tensor.strides().begin(), tensor.strides().end());
  meta.dtype = tensor.scalar_type();
  meta.device = tensor.device();
  meta.requires_grad = tensor.requires_grad();
  return meta;
}

int64_t TensorMeta::numel() const {
  int64_t count = 1;
  for (int64_t size : sizes) count *= size;
  return count;
}

int64_t TensorMeta::nbytes() const { return numel() * static_cast<int64_t>(elementSize(dtype)); }

std::string TensorMeta::to_string() const {
  std::string text = c10::str(short_name(dtype), "[", c10::Join(", ", sizes), "]");
  if (!is_contiguous(*this)) text += "{" + c10::Join(", ", strides) + "}";
  if (!device.is_cpu()) text += "@" + kind_of(device);
  return text;
}

bool TensorMeta::operator==(const TensorMeta& other) const {
  return sizes == other.sizes && strides == other.strides && dtype == other.dtype &&
         device == other.device && requires_grad == other.requires_grad;
}

const char* to_string(ValueKind kind) {
  constexpr const char* names[] = {"input", "parameter", "buffer", "constant", "literal", "result"};
  return names[static_cast<size_t>(kind)];
}

ExecutionMode ExecutionMode::current() {
  ExecutionMode mode;
  mode.grad = at::GradMode::is_enabled();
  mode.inference = c10::InferenceMode::is_enabled();
  // Inference excludes autograd as well.
  const c10::DispatchKeySet excluded = c10::impl::tls_local_dispatch_key_set().excluded_;
  mode.below_autograd = !mode.inference && excluded.has(c10::DispatchKey::AutogradFunctionality);
  mode.below_views = excluded.has(c10::DispatchKey::ADInplaceOrView);
  const at::DeviceType accelerator = accelerator_type();
  mode.autocast_cpu = at::autocast::is_autocast_enabled(at::kCPU);
  mode.autocast_accelerator = at::autocast::is_autocast_enabled(accelerator);
  mode.autocast_cpu_dtype = at::autocast::get_autocast_dtype(at::kCPU);
  mode.autocast_accelerator_dtype = at::autocast::get_autocast_dtype(accelerator);
  mode.autocast_cache = at::autocast::is_autocast_cache_enabled();
  mode.default_dtype = c10::get_default_dtype_as_scalartype();
  mode.partition = current_partition();
  return mode;
}

bool ExecutionMode::runs_like(const ExecutionMode& other) const {
  return grad == other.grad && inference == other.inference &&
         below_autograd == other.below_autograd && below_views == other.below_views &&
         default_dtype == other.default_dtype && autocast_cpu == other.autocast_cpu &&
         autocast_accelerator == other.autocast_accelerator &&
         (!autocast_cpu || autocast_cpu_dtype == other.autocast_cpu_dtype) &&
         (!autocast_accelerator ||
          autocast_accelerator_dtype == other.autocast_accelerator_dtype) &&
         ((!autocast_cpu && !autocast_accelerator) || autocast_cache == other.autocast_cache);
}

bool ExecutionMode::operator==(const ExecutionMode& other) const {
  return runs_like(other) && after_backward == other.after_backward && partition == other.partition;
}

std::string ExecutionMode::to_string() const {
  std::vector<std::string> parts;
  if (inference) {
    parts.push_back("inference");
  } else if (!grad) {
    parts.push_back("no_grad");
  }
  if (below_autograd) parts.push_back("below_autograd");
  if (below_views) parts.push_back("below_views");
  if (autocast_cpu) parts.push_back(c10::str("autocast_cpu(", short_name(autocast_cpu_dtype), ")"));
  if (autocast_accelerator) {
    parts.push_back(c10::str("autocast_accelerator(", short_name(autocast_accelerator_dtype), ")"));
  }
  const bool casts = autocast_cpu || autocast_accelerator;
  if (casts && !autocast_cache) parts.push_back("no_autocast_cache");
  if (default_dtype != at::kFloat) {
    parts.push_back(c10::str("default_dtype ", short_name(default_dtype)));
  }
  if (after_backward > 0) {
    parts.push_back(after_backward == 1 ? "after_backward"
                                        : c10::str("after_backward ", after_backward));
  }
  if (partition >= 0) parts.push_back(c10::str("partition ", partition));
  return c10::Join(" ", parts);
}

std::string Operator::name() const {
  const auto& full = handle.operator_name();
  return full.overload_name.empty() ? full.name : full.name + "." + full.overload_name;
}

std::string Graph::line(size_t index) const {
  const Operator& op = operators[index];
  const auto& schema = op.handle.schema();
  std::vector<std::string> results, metas, arguments;
  for (ValueId id : op.results) {
    results.push_back(value_text(id));
    metas.push_back(id == kUndefined ? "_" : values[id].meta.to_string());
  }
  for (size_t i = 0; i < op.arguments.size(); ++i) {
    arguments.push_back(argument_text(schema, i, op.arguments[i]));
  }
  std::string text = c10::str(c10::Join(", ", results), results.empty() ? "" : " = ", op.name(),
                              "(", c10::Join(", ", arguments), ") : ", c10::Join(", ", metas));
  if (makes_literal(op)) text += " literal";
  const std::string mode = op.mode.to_string();
  if (!mode.empty()) text += " " + mode;
  if (!op.scope.empty()) text += "  # " + op.scope;
  return text;
}

std::string Graph::to_string() const {
  std::ostringstream out;
  for (size_t id = 0; id < values.size(); ++id) {
    const Value& value = values[id];
    if (value.producer >= 0) continue;
    out << "%" << id << " = " << graph::to_string(value.kind) << " " << value.name << " : "
        << value.meta.to_string() << (value.meta.requires_grad ? " grad" : "") << "\n";
  }
  for (size_t i = 0; i < operators.size(); ++i) out << line(i) << "\n";
  for (const BackwardRoot& root : roots) {
    out << "backward " << value_text(root.value);
    if (root.gradient != kUndefined) out << " with " << value_text(root.gradient);
    const std::string mode = root.mode.to_string();
    if (!mode.empty()) out << " " << mode;
    out << "\n";
  }
  std::vector<std::string> returned;
  for (ValueId id : outputs) returned.push_back(value_text(id));
  out << "return " << c10::Join(", ", returned) << "\n";
  return out.str();
}

at::Device Graph::device() const {
  for (const Value& value : values) {
    if (!value.meta.device.is_cpu()) return value.meta.device;
  }
  return at::kCPU;
}

uint64_t Graph::fingerprint() const { return hash(to_string()); }

uint64_t Graph::constants_fingerprint() const {
  uint64_t result = 0;
  for (const Operator& op : operators) {
    const auto& schema = op.handle.schema();
    for (size_t i = 0; i < op.arguments.size(); ++i) {
      if (op.arguments[i].kind == Argument::Kind::kConstant && is_patchable(schema, i)) {
        result = hash(constant_to_string(op.arguments[i].constant), result);
      }
    }
  }
  for (const Value& value : values) {
    if (value.content.defined()) result = hash_content(value.content, result);
  }
  return result;
}

bool is_patchable(const c10::FunctionSchema& schema, size_t index) {
  const auto& argument = schema.arguments()[index];
  const c10::TypePtr type = without_optional(argument.type());
  // A leaf's call (a capsule) brings the arguments of each run along.
  const bool number = type->kind() == c10::TypeKind::NumberType ||
                      type->kind() == c10::TypeKind::FloatType ||
                      type->kind() == c10::TypeKind::CapsuleType;
  if (!number) return false;
  return has_tensor_argument(schema) || argument.name() == "fill_value";
}

std::string constant_to_string(const c10::IValue& value) {
  if (value.isDouble()) {
    // 17 digits tell any two doubles apart.
    std::ostringstream out;
    out.precision(17);
    out << value.toDouble();
    return out.str();
  }
  if (value.isBool()) return value.toBool() ? "true" : "false";
  if (value.isString()) return "\"" + value.toStringRef() + "\"";
  if (value.isDevice()) return kind_of(value.toDevice());
  // Ranks compare these texts, so it has no address.
  if (value.isCapsule()) return leaf_call(value)->module + "(" + leaf_call(value)->numbers + ")";
  std::ostringstream out;
  out.precision(17);
  out << value;
  return out.str();
}

}  // namespace smp::graph
