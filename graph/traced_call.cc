// SPDX-License-Identifier: Apache-2.0
#include "graph/traced_call.h"

#include "graph/operator_traits.h"

namespace smp::graph {
namespace {

Argument read_argument(TracedCall& call, const c10::IValue& value,
                       c10::function_ref<ValueId(const at::Tensor&)> value_of) {
  Argument argument;
  const auto add = [&](const at::Tensor& tensor) {
    const ValueId id = value_of(tensor);
    argument.values.push_back(id);
    call.ids.push_back(id);
    call.tensors.push_back(tensor);
  };
  if (value.isTensor()) {
    argument.kind = Argument::Kind::kTensor;
    add(value.toTensor());
  } else if (value.isTensorList()) {
    argument.kind = Argument::Kind::kTensorList;
    for (const at::Tensor& tensor : value.toTensorVector()) add(tensor);
  } else if (value.isOptionalTensorList()) {
    argument.kind = Argument::Kind::kOptionalTensorList;
    for (const auto& tensor : value.toOptionalTensorVector()) add(tensor.value_or(at::Tensor()));
  } else {
    argument.constant = value;
  }
  return argument;
}

}  // namespace

void TracedCall::read(const c10::OperatorHandle& op, const torch::jit::Stack& stack,
                      c10::function_ref<ValueId(const at::Tensor&)> value_of) {
  const size_t count = op.schema().arguments().size();
  this->op = &op;
  arguments.reserve(count);
  for (size_t i = stack.size() - count; i < stack.size(); ++i) {
    arguments.push_back(read_argument(*this, stack[i], value_of));
  }
}

void TracedCall::make_offset_relative(const TensorTable& table) {
  const int index = storage_offset_argument(op->schema());
  if (index < 0 || ids[0] == kUndefined) return;
  c10::IValue& offset = arguments[index].constant;
  if (table.find(tensors[0]) != nullptr || !offset.isInt()) return;
  absolute_offset = true;
  if (offset.toInt() == tensors[0].storage_offset()) offset = c10::IValue();
}

c10::SmallVector<ValueId, 1> TracedCall::written() const {
  const auto constant = [&](size_t i) -> const c10::IValue& { return arguments[i].constant; };
  c10::SmallVector<ValueId, 1> written;
  for (size_t i : written_arguments(op->schema(), constant)) {
    for (ValueId id : arguments[i].values) {
      if (id != kUndefined) written.push_back(id);
    }
  }
  return written;
}

void TracedCall::clear() {
  arguments.clear();
  tensors.clear();
  ids.clear();
  absolute_offset = false;
}

}  // namespace smp::graph
