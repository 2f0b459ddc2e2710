// SPDX-License-Identifier: Apache-2.0
#include "nn/rewrite/emitter.h"

#include <utility>

namespace smp::nn::rewrite {

using graph::Argument;
using graph::ValueId;

Argument Emitter::tensor(ValueId value) {
  Argument argument;
  argument.kind = Argument::Kind::kTensor;
  argument.values = {value};
  return argument;
}

std::vector<Argument> Emitter::arguments_of(const Tensors& tensors, const Constants& constants) {
  std::vector<Argument> arguments;
  for (ValueId value : tensors) {
    arguments.push_back(value == graph::kUndefined ? Argument() : tensor(value));
  }
  for (const c10::IValue& value : constants) arguments.emplace_back().constant = value;
  return arguments;
}

ValueId Emitter::converted(ValueId value, at::ScalarType type) {
  if (meta(value).dtype == type) return value;
  return call("aten::to", "dtype", {value}, {type, false, false, c10::IValue()});
}

ValueId Emitter::rounded(ValueId value, at::ScalarType type) {
  const ValueId result = converted(value, type);
  wide_[result] = value;
  return result;
}

ValueId Emitter::widened(ValueId value) {
  const auto wide = wide_.find(value);
  if (wide != wide_.end()) return wide->second;
  return is_half(meta(value).dtype) ? converted(value, at::kFloat) : value;
}

}  // namespace smp::nn::rewrite
