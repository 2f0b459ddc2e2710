// SPDX-License-Identifier: Apache-2.0
#include "tests/ops/sample.h"

#include <ATen/ScalarOps.h>
#include <torch/torch.h>

#include <fstream>
#include <limits>

#include "checkpoint/safetensors.h"
#include "core/check.h"

namespace smp::op_samples {
namespace {

using nlohmann::json;

json parse(const std::string& path) {
  std::ifstream file(path);
  SMP_CHECK(file.good(), "cannot read ", path,
            ". Name a folder that tests/ops/write_samples.py has written.");
  return json::parse(file);
}

std::string without_extension(const std::string& path) { return path.substr(0, path.rfind('.')); }

at::Tensor leaf_of(const json& entry, const checkpoint::SafetensorsReader& reader) {
  at::Tensor dense = reader.read(entry.at("data"));
  if (entry.at("complex")) dense = at::view_as_complex(dense);
  const auto sizes = entry.at("sizes").get<std::vector<int64_t>>();
  const auto strides = entry.at("strides").get<std::vector<int64_t>>();
  at::Tensor tensor = at::empty_strided(sizes, strides, dense.options());
  tensor.copy_(dense);
  return tensor.requires_grad_(entry.at("requires_grad"));
}

at::Tensor expected(const json& name, const checkpoint::SafetensorsReader& reader) {
  return name.is_null() ? at::Tensor() : reader.read(name);
}

Call call_of(const json& entry) {
  const std::string name = entry.at(0);
  const std::string overload = entry.at(1);
  return {c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str()),
          entry.at(2), entry.at(3)};
}

Sample sample_of(const json& entry, const checkpoint::SafetensorsReader& reader) {
  Sample sample;
  sample.name = entry.at("name");
  for (const json& leaf : entry.at("tensors")) sample.leaves.push_back(leaf_of(leaf, reader));
  for (const json& call : entry.at("calls")) sample.calls.push_back(call_of(call));
  sample.outputs = entry.at("outputs").get<std::vector<int>>();
  sample.random = entry.at("random");
  for (const json& name : entry.at("expected_outputs")) {
    sample.expected_outputs.push_back(expected(name, reader));
  }
  for (const json& name : entry.at("expected_gradients")) {
    sample.expected_gradients.push_back(expected(name, reader));
  }
  return sample;
}

/// A value that JSON has as an object of one member: the kind, and the content.
c10::IValue special_value(const std::string& kind, const json& content, const Tensors& values) {
  if (kind == "tensor") return values.at(content.get<size_t>());
  if (kind == "float") {
    const std::string text = content;
    if (text == "nan") return std::numeric_limits<double>::quiet_NaN();
    const double infinity = std::numeric_limits<double>::infinity();
    return text == "inf" ? infinity : -infinity;
  }
  if (kind == "complex") return c10::complex<double>(content.at(0), content.at(1));
  if (kind == "dtype") return c10::getStringToDtypeMap().at(content);
  if (kind == "device") return c10::Device(content.get<std::string>());
  if (kind == "layout") return at::kStrided;
  if (content == "preserve_format") return at::MemoryFormat::Preserve;
  if (content == "channels_last") return at::MemoryFormat::ChannelsLast;
  if (content == "channels_last_3d") return at::MemoryFormat::ChannelsLast3d;
  return at::MemoryFormat::Contiguous;
}

/// A number like the 2 in `x * 2`, which Python sees as a number.
at::Tensor wrapped_number(const json& value) {
  const at::Scalar scalar = value.is_boolean()        ? at::Scalar(value.get<bool>())
                            : value.is_number_float() ? at::Scalar(value.get<double>())
                                                      : at::Scalar(value.get<int64_t>());
  at::Tensor tensor = c10::scalar_to_tensor(scalar);
  tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
  return tensor;
}

/// A JSON value as an argument of this type.
c10::IValue value_of(const json& value, c10::TypePtr type, const Tensors& values) {
  if (value.is_null()) return {};
  if (const auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
  if (value.is_object()) return special_value(value.begin().key(), *value.begin(), values);
  if (const auto list = type->cast<c10::ListType>()) {
    c10::TypePtr element = list->getElementType();
    if (element->kind() == c10::TypeKind::SymIntType) element = c10::IntType::get();
    c10::impl::GenericList result(element);
    for (const json& each : value) result.push_back(value_of(each, element, values));
    return result;
  }
  if (type->kind() == c10::TypeKind::TensorType) return wrapped_number(value);
  if (value.is_boolean()) return value.get<bool>();
  if (value.is_string()) return value.get<std::string>();
  if (value.is_number_float() || type->kind() == c10::TypeKind::FloatType) {
    return value.get<double>();
  }
  return value.get<int64_t>();
}

torch::jit::Stack stack_of(const Call& call, const Tensors& values) {
  torch::jit::Stack stack;
  const auto& arguments = call.op.schema().arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto& argument = arguments[i];
    if (i < call.arguments.size()) {
      stack.push_back(value_of(call.arguments[i], argument.type(), values));
    } else if (const auto found = call.keywords.find(argument.name());
               found != call.keywords.end()) {
      stack.push_back(value_of(*found, argument.type(), values));
    } else {
      stack.push_back(argument.default_value().value_or(c10::IValue()));
    }
  }
  return stack;
}

void add_tensors(const c10::IValue& value, Tensors& values) {
  if (value.isTensor()) values.push_back(value.toTensor());
  if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) values.push_back(tensor);
  }
}

}  // namespace

std::string Sample::subject() const {
  const std::string without_number = name.substr(0, name.rfind(' '));
  return without_number.substr(0, without_number.rfind(' '));
}

std::vector<Sample> read_samples(const std::string& path) {
  const checkpoint::SafetensorsReader reader(without_extension(path) + ".safetensors");
  std::vector<Sample> samples;
  for (const json& entry : parse(path)) samples.push_back(sample_of(entry, reader));
  return samples;
}

std::vector<Skipped> read_skipped(const std::string& path) {
  std::vector<Skipped> skipped;
  for (const json& entry : parse(path)) {
    skipped.push_back({entry.at("name"), entry.at("reason"), entry.at("samples")});
  }
  return skipped;
}

Tensors execute(const Sample& sample, const Tensors& inputs) {
  return execute(sample, inputs,
                 [](const Call& call, torch::jit::Stack& stack) { call.op.callBoxed(stack); });
}

Tensors execute(const Sample& sample, const Tensors& inputs,
                const std::function<void(const Call&, torch::jit::Stack&)>& run) {
  Tensors values = inputs;
  for (const Call& call : sample.calls) {
    torch::jit::Stack stack = stack_of(call, values);
    run(call, stack);
    for (const c10::IValue& result : stack) add_tensors(result, values);
  }
  Tensors outputs;
  for (int output : sample.outputs) outputs.push_back(values.at(output));
  return outputs;
}

at::Tensor weighted_sum(const Tensors& outputs) {
  at::Tensor loss;
  const auto add = [&](const at::Tensor& part) {
    const at::Tensor weights = ((at::arange(part.numel()) * 7) % 13 + 1).reshape(part.sizes()) / 16;
    const at::Tensor term = (part * weights.to(part.scalar_type())).sum().to(at::kDouble);
    loss = loss.defined() ? loss + term : term;
  };
  for (const at::Tensor& output : outputs) {
    if (!output.requires_grad()) continue;
    if (output.is_complex()) {
      add(at::real(output));
      add(at::imag(output));
    } else {
      add(output);
    }
  }
  return loss;
}

}  // namespace smp::op_samples
