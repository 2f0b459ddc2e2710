// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include "smp/detail/structure.h"
#include "smp/step_output.h"

/// Makes the result of a step from that of its function. Internal.
namespace smp::detail {

/// The type that a step returns for a result of type T: tensors become `StepOutput`s in the same
/// nesting, anything else a list by microbatch.
template <class T>
struct Returned;
template <class T>
using ReturnedFor = typename Returned<T>::type;

/// The same for a type that holds tensors.
template <class T, class = void>
struct ReturnedWithTensors;
template <class T>
struct ReturnedWithTensors<T, std::enable_if_t<IsTensor<T>::value>> {
  using type = StepOutput;
};
/// It describes its own content, so it stays an IValue.
template <>
struct ReturnedWithTensors<c10::IValue> {
  using type = std::vector<c10::IValue>;
};
template <class T, class A>
struct ReturnedWithTensors<std::vector<T, A>> {
  using type = std::vector<ReturnedFor<T>>;
};
template <class T, class A>
struct ReturnedWithTensors<std::deque<T, A>> {
  using type = std::deque<ReturnedFor<T>>;
};
template <class T, class A>
struct ReturnedWithTensors<std::list<T, A>> {
  using type = std::list<ReturnedFor<T>>;
};
template <class T>
struct ReturnedWithTensors<c10::List<T>> {
  using type = std::vector<ReturnedFor<T>>;
};
template <class K, class V, class C, class A>
struct ReturnedWithTensors<std::map<K, V, C, A>> {
  using type = std::map<K, ReturnedFor<V>, C>;
};
template <class K, class V, class H, class E, class A>
struct ReturnedWithTensors<std::unordered_map<K, V, H, E, A>> {
  using type = std::unordered_map<K, ReturnedFor<V>, H, E>;
};
template <class K, class V>
struct ReturnedWithTensors<torch::OrderedDict<K, V>> {
  using type = torch::OrderedDict<K, ReturnedFor<V>>;
};
template <class K, class V>
struct ReturnedWithTensors<c10::Dict<K, V>> {
  using type = std::map<K, ReturnedFor<V>>;
};
template <class T>
struct ReturnedWithTensors<std::optional<T>> {
  using type = std::optional<ReturnedFor<T>>;
};
template <class T>
struct ReturnedWithTensors<std::shared_ptr<T>> {
  using type = std::shared_ptr<ReturnedFor<std::remove_const_t<T>>>;
};
template <class T, size_t N>
struct ReturnedWithTensors<std::array<T, N>> {
  using type = std::array<ReturnedFor<T>, N>;
};
template <class A, class B>
struct ReturnedWithTensors<std::pair<A, B>> {
  using type = std::pair<ReturnedFor<A>, ReturnedFor<B>>;
};
template <class... T>
struct ReturnedWithTensors<std::tuple<T...>> {
  using type = std::tuple<ReturnedFor<T>...>;
};
template <class... T>
struct ReturnedWithTensors<std::variant<T...>> {
  using type = std::variant<ReturnedFor<T>...>;
};
/// A struct becomes a tuple of its fields.
template <class T>
struct ReturnedWithTensors<T, std::void_t<decltype(Fields<T>::of(std::declval<T&>()))>> {
  template <class Types>
  struct Tuple;
  template <class... F>
  struct Tuple<TypeList<F...>> {
    using type = std::tuple<ReturnedFor<F>...>;
  };
  using type = typename Tuple<typename Parts<T>::Types>::type;
};

template <class T, bool has_tensors>
struct ReturnedIf : ReturnedWithTensors<T> {};
template <class T>
struct ReturnedIf<T, false> {
  using type = std::vector<T>;
};
template <class T>
struct Returned : ReturnedIf<T, holds_tensors<T>()> {};

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

/// The only type of a list.
template <class Types>
struct Only;
template <class T>
struct Only<TypeList<T>> {
  using type = T;
};
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

template <class T, class = void>
struct HasFields : std::false_type {};
template <class T>
struct HasFields<T, std::void_t<decltype(Fields<T>::of(std::declval<T&>()))>> : std::true_type {};

template <size_t I, class T>
const auto& part_of(const T& value) {
  if constexpr (HasFields<T>::value) {
    return std::get<I>(Fields<T>::of(value));
  } else {
    return std::get<I>(value);
  }
}

/// Gathers the part at I of each result.
template <size_t I, class T, class Take>
auto gather_part(const std::vector<const T*>& results, const Take& take) {
  using Part = std::decay_t<decltype(part_of<I>(*results[0]))>;
  std::vector<const Part*> parts;
  for (const T* result : results) parts.push_back(&part_of<I>(*result));
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

template <class T>
constexpr size_t count_parts() {
  if constexpr (HasFields<T>::value) {
    return std::tuple_size_v<decltype(Fields<T>::of(std::declval<T&>()))>;
  } else if constexpr (Parts<T>::kShape == Shape::kChoice) {
    return std::variant_size_v<T>;
  } else {
    return std::tuple_size_v<T>;
  }
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
    return gather_choice(results, take, std::make_index_sequence<count_parts<T>()>());
  } else {
    return gather_product(results, take, std::make_index_sequence<count_parts<T>()>());
  }
}

}  // namespace smp::detail
