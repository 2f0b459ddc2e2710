// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

namespace torch::data {
template <typename Dataset, typename Batch, typename BatchRequest>
class DataLoaderBase;
}  // namespace torch::data

namespace torch {
template <typename Key, typename Value>
class OrderedDict;
}  // namespace torch

/// Finds the tensors in arguments and results, whatever tuples, vectors and maps they lie in.
/// Internal.
namespace smp::detail {

template <class T>
struct IsTensor : std::is_base_of<at::Tensor, T> {};

template <class T>
struct IsVector : std::false_type {};
template <class T, class A>
struct IsVector<std::vector<T, A>> : std::true_type {};

/// Maps of any kind; `Mapped` is the type of their elements.
template <class T>
struct IsMap : std::false_type {};
template <class K, class V, class C, class A>
struct IsMap<std::map<K, V, C, A>> : std::true_type {
  using Mapped = V;
};
template <class K, class V, class H, class E, class A>
struct IsMap<std::unordered_map<K, V, H, E, A>> : std::true_type {
  using Mapped = V;
};
template <class K, class V>
struct IsMap<torch::OrderedDict<K, V>> : std::true_type {
  using Mapped = V;
};

template <class T>
struct IsUnorderedMap : std::false_type {};
template <class K, class V, class H, class E, class A>
struct IsUnorderedMap<std::unordered_map<K, V, H, E, A>> : std::true_type {};

template <class T>
struct IsOrderedDict : std::false_type {};
template <class K, class V>
struct IsOrderedDict<torch::OrderedDict<K, V>> : std::true_type {};

template <class T>
struct IsOptional : std::false_type {};
template <class T>
struct IsOptional<std::optional<T>> : std::true_type {};

template <class T>
struct IsTuple : std::false_type {};
template <class... T>
struct IsTuple<std::tuple<T...>> : std::true_type {};
template <class A, class B>
struct IsTuple<std::pair<A, B>> : std::true_type {};
template <class T, size_t N>
struct IsTuple<std::array<T, N>> : std::true_type {};

/// True for a type whose values may hold tensors somewhere inside.
template <class T>
constexpr bool holds_tensors();

template <class T, size_t... I>
constexpr bool tuple_holds_tensors(std::index_sequence<I...>) {
  return (holds_tensors<std::tuple_element_t<I, T>>() || ...);
}

template <class T>
constexpr bool holds_tensors() {
  using U = std::decay_t<T>;
  if constexpr (IsTensor<U>::value) {
    return true;
  } else if constexpr (IsVector<U>::value || IsOptional<U>::value) {
    return holds_tensors<typename U::value_type>();
  } else if constexpr (IsMap<U>::value) {
    return holds_tensors<typename IsMap<U>::Mapped>();
  } else if constexpr (IsTuple<U>::value) {
    return tuple_holds_tensors<U>(std::make_index_sequence<std::tuple_size_v<U>>());
  } else {
    return false;
  }
}

/// A user's type that cuts itself: `T smp_slice(int64_t num_microbatches, int64_t microbatch,
/// int64_t axis) const`.
template <class T, class = void>
struct SlicesItself : std::false_type {};
template <class T>
struct SlicesItself<
    T, std::void_t<decltype(std::declval<const T&>().smp_slice(int64_t{}, int64_t{}, int64_t{}))>>
    : std::true_type {};

template <class D, class B, class R>
std::true_type derives_from_data_loader(const torch::data::DataLoaderBase<D, B, R>*);
std::false_type derives_from_data_loader(...);

template <class T, class = void>
struct IsDataLoader : std::false_type {};
template <class T>
struct IsDataLoader<T, std::enable_if_t<std::is_class_v<T>>>
    : decltype(derives_from_data_loader(std::declval<T*>())) {};
template <class T, class D>
struct IsDataLoader<std::unique_ptr<T, D>, void> : IsDataLoader<T> {};

/// How an argument is kept: tensors of derived classes and expressions as plain values.
template <class T>
using AsArgument =
    std::conditional_t<IsTensor<std::decay_t<T>>::value, at::Tensor, std::decay_t<T>>;

/// The result type of a step function that returns nothing.
struct Nothing {};

/// Calls `visit(key, element)` for every element of a map, in an order that depends on the keys
/// only: copies of a `std::unordered_map` and other ranks may keep the same elements in another.
template <class Map, class Visit>
void for_each_element(Map& map, const Visit& visit) {
  if constexpr (IsOrderedDict<std::decay_t<Map>>::value) {
    for (auto& item : map) visit(item.key(), item.value());
  } else if constexpr (IsUnorderedMap<std::decay_t<Map>>::value) {
    using Entry = std::remove_reference_t<decltype(*map.begin())>;
    std::vector<Entry*> entries;
    for (Entry& entry : map) entries.push_back(&entry);
    std::sort(entries.begin(), entries.end(),
              [](const Entry* a, const Entry* b) { return a->first < b->first; });
    for (Entry* entry : entries) visit(entry->first, entry->second);
  } else {
    for (auto& [key, element] : map) visit(key, element);
  }
}

/// Calls `visit(tensor)` for every tensor in `value`, which may replace it.
template <class T, class Visit>
void for_each_tensor(T& value, const Visit& visit) {
  using U = std::decay_t<T>;
  if constexpr (!holds_tensors<U>()) {
    return;
  } else if constexpr (IsTensor<U>::value) {
    visit(value);
  } else if constexpr (IsVector<U>::value) {
    for (auto& element : value) for_each_tensor(element, visit);
  } else if constexpr (IsMap<U>::value) {
    for_each_element(value, [&](const auto&, auto& element) { for_each_tensor(element, visit); });
  } else if constexpr (IsOptional<U>::value) {
    if (value) for_each_tensor(*value, visit);
  } else {
    std::apply([&](auto&... element) { (for_each_tensor(element, visit), ...); }, value);
  }
}

}  // namespace smp::detail
