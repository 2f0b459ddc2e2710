// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Dict.h>
#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>

#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "smp/detail/structure.h"

/// Values of any structure as tuples, lists and dictionaries, which Python has. Internal.
namespace smp::detail {

template <class T>
c10::IValue as_ivalue(const T& value);

template <class T>
c10::IValue list_as_ivalue(const T& value) {
  c10::impl::GenericList list(c10::AnyType::get());
  Parts<T>::visit(value, [&](const auto& element) { list.push_back(as_ivalue(element)); });
  return list;
}

template <class T>
c10::IValue tuple_as_ivalue(const T& value) {
  std::vector<c10::IValue> elements;
  Parts<T>::visit(value, [&](const auto& element) { elements.push_back(as_ivalue(element)); });
  return c10::ivalue::Tuple::create(std::move(elements));
}

template <class T>
c10::IValue map_as_ivalue(const T& value) {
  std::vector<std::pair<c10::IValue, c10::IValue>> items;
  bool strings = true;
  Parts<T>::visit_items(value, [&](const auto& key, const auto& element) {
    using Key = std::decay_t<decltype(key)>;
    strings = std::is_convertible_v<Key, std::string>;
    if constexpr (std::is_integral_v<Key>) {
      items.emplace_back(static_cast<int64_t>(key), as_ivalue(element));
    } else {
      items.emplace_back(std::string(key), as_ivalue(element));
    }
  });
  c10::impl::GenericDict dict(
      strings ? c10::TypePtr(c10::StringType::get()) : c10::TypePtr(c10::IntType::get()),
      c10::AnyType::get());
  for (const auto& [key, element] : items) dict.insert(key, element);
  return dict;
}

template <class T>
c10::IValue held_as_ivalue(const T& value) {
  c10::IValue held;
  Parts<T>::visit(value, [&](const auto& part) { held = as_ivalue(part); });
  return held;
}

/// Tensors, numbers, strings, and containers, tuples, optionals and structs with SMP_FIELDS of
/// them. An undefined tensor and an empty optional are none, a struct is the tuple of its fields.
template <class T>
c10::IValue as_ivalue(const T& value) {
  constexpr Shape kShape = Parts<T>::kShape;
  if constexpr (IsTensor<T>::value) {
    return value.defined() ? c10::IValue(at::Tensor(value)) : c10::IValue();
  } else if constexpr (std::is_same_v<T, c10::IValue>) {
    return value;
  } else if constexpr (std::is_same_v<T, bool>) {
    return value;
  } else if constexpr (std::is_integral_v<T>) {
    return static_cast<int64_t>(value);
  } else if constexpr (std::is_floating_point_v<T>) {
    return static_cast<double>(value);
  } else if constexpr (std::is_convertible_v<T, std::string>) {
    return std::string(value);
  } else if constexpr (kShape == Shape::kSequence) {
    return list_as_ivalue(value);
  } else if constexpr (kShape == Shape::kMap) {
    return map_as_ivalue(value);
  } else if constexpr (kShape == Shape::kProduct) {
    return tuple_as_ivalue(value);
  } else if constexpr (kShape == Shape::kHolder || kShape == Shape::kChoice) {
    return held_as_ivalue(value);
  } else {
    static_assert(!std::is_same_v<T, T>,
                  "an argument or result of an exported program is of a class that Python does not "
                  "have. Use tensors, numbers, strings, containers and tuples of them, and structs "
                  "that list their fields: SMP_FIELDS(x, y)");
  }
}

}  // namespace smp::detail
