// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "smp/detail/structure.h"
#include "smp/step_output.h"

/// Makes the result of a step from that of its function. Internal.
namespace smp::detail {

/// The only type of a list.
template <class Types>
struct Only;
template <class T>
struct Only<TypeList<T>> {
  using type = T;
};

template <class T>
constexpr auto returned();

/// The type that a step returns for a result of type T: tensors become `StepOutput`s in the same
/// nesting, and a struct a tuple of its fields; anything else becomes a list by microbatch.
template <class T>
using ReturnedFor = typename Only<decltype(returned<T>())>::type;

template <class T, class... P>
constexpr auto returned_of_parts(TypeList<P...>) {
  return TypeList<typename Parts<T>::template With<ReturnedFor<P>...>>();
}

template <class T>
constexpr auto returned() {
  if constexpr (!holds_tensors<T>() || std::is_same_v<T, c10::IValue>) {
    return TypeList<std::vector<T>>();  // an IValue describes its own content, so it stays one
  } else if constexpr (IsTensor<T>::value) {
    return TypeList<StepOutput>();
  } else {
    return returned_of_parts<T>(typename Parts<T>::Types());
  }
}

template <class T, class Take>
ReturnedFor<T> gather(const std::vector<const T*>& results, const Take& take);

/// The elements of the microbatches' results at one place: those of `parts[m]` for microbatch m.
template <class E>
std::vector<const E*> at_place(const std::vector<std::vector<const E*>>& parts, size_t place) {
  std::vector<const E*> elements;
  for (const auto& of_microbatch : parts) {
    check_same_structure(of_microbatch.size() == parts[0].size());
    elements.push_back(of_microbatch[place]);
  }
  return elements;
}

template <class T>
using ElementOf = typename Only<typename Parts<T>::Types>::type;

/// The elements of containers and holders, by microbatch.
template <class T>
std::vector<std::vector<const ElementOf<T>*>> elements_of(const std::vector<const T*>& results) {
  std::vector<std::vector<const ElementOf<T>*>> elements;
  for (const T* result : results) {
    auto& own = elements.emplace_back();
    Parts<T>::visit(*result, [&](const ElementOf<T>& element) { own.push_back(&element); });
    check_same_structure(own.size() == elements[0].size());
  }
  return elements;
}

template <class T, class Take>
ReturnedFor<T> gather_sequence(const std::vector<const T*>& results, const Take& take) {
  const auto elements = elements_of(results);
  ReturnedFor<T> list;
  for (size_t i = 0; i < elements[0].size(); ++i)
    list.push_back(gather(at_place(elements, i), take));
  return list;
}

template <class Map, class K, class V>
void put(Map& map, const K& key, V value) {
  map.emplace(key, std::move(value));
}
template <class K, class V>
void put(torch::OrderedDict<K, V>& map, const K& key, V value) {
  map.insert(key, std::move(value));
}

template <class T, class Take>
ReturnedFor<T> gather_map(const std::vector<const T*>& results, const Take& take) {
  const auto elements = elements_of(results);
  ReturnedFor<T> map;
  size_t place = 0;
  Parts<T>::visit_items(*results[0], [&](const auto& key, const auto&) {
    put(map, key, gather(at_place(elements, place++), take));
  });
  return map;
}

template <class T, class Take>
ReturnedFor<T> gather_holder(const std::vector<const T*>& results, const Take& take) {
  const auto elements = elements_of(results);
  if (elements[0].empty()) return {};
  auto gathered = gather(at_place(elements, 0), take);
  if constexpr (std::is_constructible_v<ReturnedFor<T>, decltype(gathered)>) {
    return ReturnedFor<T>(std::move(gathered));
  } else {
    return std::make_shared<decltype(gathered)>(std::move(gathered));
  }
}

/// Gathers the part at I of each result.
template <size_t I, class T, class Take>
auto gather_part(const std::vector<const T*>& results, const Take& take) {
  using Part = std::decay_t<decltype(Parts<T>::template get<I>(*results[0]))>;
  std::vector<const Part*> parts;
  for (const T* result : results) parts.push_back(&Parts<T>::template get<I>(*result));
  return gather(parts, take);
}

template <class T, class Take, size_t... I>
ReturnedFor<T> gather_product(const std::vector<const T*>& results, const Take& take,
                              std::index_sequence<I...>) {
  // Braces evaluate from left to right.
  return ReturnedFor<T>{gather_part<I>(results, take)...};
}

template <class T, class Take, size_t... I>
ReturnedFor<T> gather_choice(const std::vector<const T*>& results, const Take& take,
                             std::index_sequence<I...>) {
  for (const T* result : results) check_same_structure(result->index() == results[0]->index());
  ReturnedFor<T> choice;
  const auto gather_if_chosen = [&](auto index) {
    constexpr size_t kIndex = decltype(index)::value;
    if (results[0]->index() == kIndex) {
      choice.template emplace<kIndex>(gather_part<kIndex>(results, take));
    }
  };
  (gather_if_chosen(std::integral_constant<size_t, I>()), ...);
  return choice;
}

/// The value of each microbatch, with its own tensors.
template <class Take>
std::vector<c10::IValue> gather_values(const std::vector<const c10::IValue*>& results,
                                       const Take& take) {
  std::vector<std::vector<at::Tensor>> tensors(results.size());
  const size_t count = tensors_in(*results[0]).size();
  for (size_t i = 0; i < count; ++i) {
    const std::vector<at::Tensor> outputs = take();
    for (size_t m = 0; m < results.size(); ++m) tensors[m].push_back(outputs[m]);
  }
  std::vector<c10::IValue> values;
  for (size_t m = 0; m < results.size(); ++m) {
    check_same_structure(tensors_in(*results[m]).size() == count);
    values.push_back(with_tensors(*results[m], tensors[m]));
  }
  return values;
}

/// Lists and dictionaries of c10 give copies of their elements, so they are gathered as these.
template <class T>
std::vector<T> as_standard(const c10::List<T>& list) {
  return list.vec();
}
template <class K, class V>
std::map<K, V> as_standard(const c10::Dict<K, V>& dict) {
  return Parts<c10::Dict<K, V>>::sorted(dict);
}

template <class T, class = void>
struct IsOfC10 : std::false_type {};
template <class T>
struct IsOfC10<T, std::void_t<decltype(as_standard(std::declval<const T&>()))>> : std::true_type {};

template <class T, class Take>
ReturnedFor<T> gather_standard(const std::vector<const T*>& results, const Take& take) {
  using Standard = decltype(as_standard(*results[0]));
  std::deque<Standard> copies;
  std::vector<const Standard*> pointers;
  for (const T* result : results) pointers.push_back(&copies.emplace_back(as_standard(*result)));
  return gather(pointers, take);
}

/// Builds a step's result from the function's results by microbatch; `take()` gives the next
/// tensor's outputs, in the order in which `for_each_tensor` meets them.
template <class T, class Take>
ReturnedFor<T> gather(const std::vector<const T*>& results, const Take& take) {
  constexpr Shape kShape = Parts<T>::kShape;
  if constexpr (!holds_tensors<T>()) {
    std::vector<T> list;
    for (const T* result : results) list.push_back(*result);
    return list;
  } else if constexpr (IsTensor<T>::value) {
    return StepOutput(take());
  } else if constexpr (std::is_same_v<T, c10::IValue>) {
    return gather_values(results, take);
  } else if constexpr (IsOfC10<T>::value) {
    return gather_standard(results, take);
  } else if constexpr (kShape == Shape::kSequence) {
    return gather_sequence(results, take);
  } else if constexpr (kShape == Shape::kMap) {
    return gather_map(results, take);
  } else if constexpr (kShape == Shape::kHolder) {
    return gather_holder(results, take);
  } else if constexpr (kShape == Shape::kChoice) {
    return gather_choice(results, take, std::make_index_sequence<Parts<T>::kCount>());
  } else {
    return gather_product(results, take, std::make_index_sequence<Parts<T>::kCount>());
  }
}

}  // namespace smp::detail
