// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <map>
#include <optional>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "smp/detail/structure.h"
#include "smp/step_output.h"

/// Makes what a step returns of what its function returned. Internal.
namespace smp::detail {

/// What a step returns for a result of type T: tensors become `StepOutput`s in the same nesting,
/// anything else a list by microbatch.
template <class T, class = void>
struct Returned {
  using type = std::vector<T>;
};
template <class T>
struct Returned<T, std::enable_if_t<IsTensor<T>::value>> {
  using type = StepOutput;
};
template <class T>
struct Returned<std::vector<T>, std::enable_if_t<holds_tensors<T>()>> {
  using type = std::vector<typename Returned<T>::type>;
};
template <class K, class V, class C>
struct Returned<std::map<K, V, C>, std::enable_if_t<holds_tensors<V>()>> {
  using type = std::map<K, typename Returned<V>::type, C>;
};
template <class K, class V, class H, class E>
struct Returned<std::unordered_map<K, V, H, E>, std::enable_if_t<holds_tensors<V>()>> {
  using type = std::unordered_map<K, typename Returned<V>::type, H, E>;
};
template <class K, class V>
struct Returned<torch::OrderedDict<K, V>, std::enable_if_t<holds_tensors<V>()>> {
  using type = torch::OrderedDict<K, typename Returned<V>::type>;
};
template <class T, size_t N>
struct Returned<std::array<T, N>, std::enable_if_t<holds_tensors<T>()>> {
  using type = std::array<typename Returned<T>::type, N>;
};
template <class T>
struct Returned<std::optional<T>, std::enable_if_t<holds_tensors<T>()>> {
  using type = std::optional<typename Returned<T>::type>;
};
template <class... T>
struct Returned<std::tuple<T...>, std::enable_if_t<holds_tensors<std::tuple<T...>>()>> {
  using type = std::tuple<typename Returned<T>::type...>;
};
template <class A, class B>
struct Returned<std::pair<A, B>, std::enable_if_t<holds_tensors<std::pair<A, B>>()>> {
  using type = std::pair<typename Returned<A>::type, typename Returned<B>::type>;
};

template <class T, class Take, size_t... I>
typename Returned<T>::type gather_tuple(const std::vector<const T*>& results, const Take& take,
                                        std::index_sequence<I...>);

template <class Map, class Key>
const auto& element_of(const Map& map, const Key& key) {
  if constexpr (IsOrderedDict<Map>::value) {
    return map[key];
  } else {
    return map.at(key);
  }
}

/// Builds a step's result from the function's results by microbatch; `take()` gives the next
/// tensor's outputs, in the order in which `for_each_tensor` meets them.
template <class T, class Take>
typename Returned<T>::type gather(const std::vector<const T*>& results, const Take& take) {
  if constexpr (IsTensor<T>::value) {
    return StepOutput(take());
  } else if constexpr (!holds_tensors<T>()) {
    std::vector<T> list;
    for (const T* result : results) list.push_back(*result);
    return list;
  } else if constexpr (IsVector<T>::value) {
    typename Returned<T>::type list;
    for (size_t i = 0; i < results[0]->size(); ++i) {
      std::vector<const typename T::value_type*> elements;
      for (const T* result : results) elements.push_back(&(*result)[i]);
      list.push_back(gather(elements, take));
    }
    return list;
  } else if constexpr (IsMap<T>::value) {
    typename Returned<T>::type map;
    for_each_element(*results[0], [&](const auto& key, const auto&) {
      std::vector<const typename IsMap<T>::Mapped*> elements;
      for (const T* result : results) elements.push_back(&element_of(*result, key));
      auto gathered = gather(elements, take);
      if constexpr (IsOrderedDict<T>::value) {
        map.insert(key, std::move(gathered));
      } else {
        map.emplace(key, std::move(gathered));
      }
    });
    return map;
  } else if constexpr (IsOptional<T>::value) {
    // All microbatches ran the same operators, so all have it or none.
    if (!results[0]->has_value()) return std::nullopt;
    std::vector<const typename T::value_type*> elements;
    for (const T* result : results) elements.push_back(&**result);
    return typename Returned<T>::type(gather(elements, take));
  } else {
    return gather_tuple(results, take, std::make_index_sequence<std::tuple_size_v<T>>());
  }
}

template <size_t I, class T, class Take>
auto gather_element(const std::vector<const T*>& results, const Take& take) {
  std::vector<const std::tuple_element_t<I, T>*> elements;
  for (const T* result : results) elements.push_back(&std::get<I>(*result));
  return gather(elements, take);
}

template <class T, class Take, size_t... I>
typename Returned<T>::type gather_tuple(const std::vector<const T*>& results, const Take& take,
                                        std::index_sequence<I...>) {
  // Braces evaluate from left to right.
  return typename Returned<T>::type{gather_element<I>(results, take)...};
}

}  // namespace smp::detail
