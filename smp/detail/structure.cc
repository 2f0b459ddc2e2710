// SPDX-License-Identifier: Apache-2.0
#include "smp/detail/structure.h"

#include "core/check.h"

namespace smp::detail {
namespace {

bool is_out_of_reach(const c10::IValue& value) {
  return value.isObject() || value.isPyObject() || value.isCapsule() || value.isFuture() ||
         value.isAwait() || value.isRRef() || value.isStorage() || value.isBlob();
}

/// A copy of a value in which `replace(tensor)` stands for each tensor.
template <class Replace>
c10::IValue replaced(const c10::IValue& value, const Replace& replace) {
  SMP_CHECK_WITH(UsageError, !is_out_of_reach(value), "a c10::IValue of type ", value.tagKind(),
                 " is an argument or a result of a step function, which cannot find the tensors in "
                 "it. Use tensors, numbers, strings, and lists, tuples and dictionaries of them");
  if (value.isTensor()) return replace(value.toTensor());
  if (value.isTuple()) {
    const auto tuple = value.toTuple();
    std::vector<c10::IValue> elements;
    for (const c10::IValue& element : tuple->elements()) {
      elements.push_back(replaced(element, replace));
    }
    return c10::ivalue::Tuple::createNamed(std::move(elements), tuple->type());
  }
  if (value.isList()) {
    c10::List<c10::IValue> list = value.toList().copy();
    for (size_t i = 0; i < list.size(); ++i) list.set(i, replaced(list.get(i), replace));
    return list;
  }
  if (value.isGenericDict()) {
    auto dict = value.toGenericDict().copy();
    for (const auto& entry : value.toGenericDict()) {
      dict.insert_or_assign(entry.key(), replaced(entry.value(), replace));
    }
    return dict;
  }
  return value;
}

}  // namespace

std::vector<at::Tensor> tensors_in(const c10::IValue& value) {
  std::vector<at::Tensor> tensors;
  replaced(value, [&](const at::Tensor& tensor) {
    tensors.push_back(tensor);
    return tensor;
  });
  return tensors;
}

c10::IValue with_tensors(const c10::IValue& value, const std::vector<at::Tensor>& tensors) {
  size_t next = 0;
  return replaced(value, [&](const at::Tensor&) { return tensors[next++]; });
}

void check_same_structure(bool same) {
  SMP_CHECK_WITH(
      UsageError, same,
      "a step function has returned a list, map, optional, pointer or variant of another "
      "kind or length for one microbatch than for another. Return the same structure "
      "for all microbatches of a call");
}

}  // namespace smp::detail
