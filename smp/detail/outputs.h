// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

/// Finds the tensors in what a module's forward returns. Internal.
namespace smp::detail::outputs {

template <class T, class = void>
struct IsTupleLike : std::false_type {};
template <class T>
struct IsTupleLike<T, std::void_t<decltype(std::tuple_size<T>::value)>> : std::true_type {};

template <class T, class = void>
struct IsRange : std::false_type {};
template <class T>
struct IsRange<T, std::void_t<decltype(std::declval<const T&>().begin()),
                              decltype(std::declval<const T&>().end())>> : std::true_type {};

/// `std::optional`.
template <class T, class = void>
struct IsOptional : std::false_type {};
template <class T>
struct IsOptional<T, std::void_t<decltype(std::declval<const T&>().has_value())>> : std::true_type {
};

/// An item of a `torch::OrderedDict`.
template <class T, class = void>
struct IsItem : std::false_type {};
template <class T>
struct IsItem<T, std::void_t<decltype(std::declval<const T&>().key()),
                             decltype(std::declval<const T&>().value())>> : std::true_type {};

/// Appends the tensors in `value`: a tensor, or tuples, pairs, optionals, vectors, maps and other
/// ranges of what has some, in any nesting. Other types have none.
template <class T>
void collect_tensors(const T& value, std::vector<at::Tensor>& found) {
  if constexpr (std::is_base_of_v<at::Tensor, T>) {
    if (value.defined()) found.push_back(value);
  } else if constexpr (IsTupleLike<T>::value) {
    std::apply([&](const auto&... parts) { (collect_tensors(parts, found), ...); }, value);
  } else if constexpr (IsOptional<T>::value) {
    if (value.has_value()) collect_tensors(*value, found);
  } else if constexpr (IsItem<T>::value) {
    collect_tensors(value.value(), found);
  } else if constexpr (IsRange<T>::value && !std::is_same_v<T, std::string>) {
    for (const auto& part : value) collect_tensors(part, found);
  }
}

}  // namespace smp::detail::outputs
