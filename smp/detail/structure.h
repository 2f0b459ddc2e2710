// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <algorithm>
#include <array>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <variant>
#include <vector>

#include "smp/export.h"
#include "smp/fields.h"

namespace torch::data {
template <typename Dataset, typename Batch, typename BatchRequest>
class DataLoaderBase;
}  // namespace torch::data

namespace torch {
template <typename Key, typename Value>
class OrderedDict;
namespace nn {
class Module;
}  // namespace nn
namespace detail {
struct ModuleHolderIndicator;
}  // namespace detail
}  // namespace torch

/// Finds the tensors in arguments and results, whatever containers and structs they lie in.
/// Internal.
namespace smp::detail {

template <class... T>
struct TypeList {};

template <class T>
struct IsTensor : std::is_base_of<at::Tensor, T> {};

template <class T, class = void>
struct IsComplete : std::false_type {};
template <class T>
struct IsComplete<T, std::void_t<decltype(sizeof(T))>> : std::true_type {};

/// A user's type that cuts itself: `T smp_slice(int64_t num_microbatches, int64_t microbatch,
/// int64_t axis) const`.
template <class T, class = void>
struct SlicesItself : std::false_type {};
template <class T>
struct SlicesItself<
    T, std::void_t<decltype(std::declval<const T&>().smp_slice(int64_t{}, int64_t{}, int64_t{}))>>
    : std::true_type {};

/// How a type is made of others.
enum class Shape {
  kOpaque,    ///< it is not known how
  kSequence,  ///< any number of one type
  kMap,       ///< the same, by keys
  kHolder,    ///< one or none: optionals and pointers
  kProduct,   ///< one of each: tuples, arrays and structs that list their fields
  kChoice,    ///< one of several: variants
};

/// The parts of a type. `Types` lists theirs, and `visit(value, f)` calls `f` for each, which may
/// change it unless the value is constant. Parts that others may share are copied before that.
/// `With<T...>` has parts of these types in the same structure, or in the standard library's.
/// Products and choices have `kCount` parts, and `get<I>(value)`.
template <class T, class = void>
struct Parts {
  static constexpr Shape kShape = Shape::kOpaque;
};

/// Stands for a part of type T that is out of reach.
template <class T>
struct OutOfReach {};

template <template <class...> class Sequence, class T>
struct SequenceParts {
  static constexpr Shape kShape = Shape::kSequence;
  using Types = TypeList<T>;
  template <class... U>
  using With = Sequence<U...>;
  template <class V, class Visit>
  static void visit(V& sequence, const Visit& visit) {
    for (auto&& element : sequence) visit(element);
  }
};
template <class T, class A>
struct Parts<std::vector<T, A>> : SequenceParts<std::vector, T> {};
template <class T, class A>
struct Parts<std::deque<T, A>> : SequenceParts<std::deque, T> {};
template <class T, class A>
struct Parts<std::list<T, A>> : SequenceParts<std::list, T> {};

template <class T>
struct Parts<c10::List<T>> {
  static constexpr Shape kShape = Shape::kSequence;
  using Types = TypeList<T>;
  template <class... U>
  using With = std::vector<U...>;
  template <class Visit>
  static void visit(const c10::List<T>& list, const Visit& visit) {
    for (size_t i = 0; i < list.size(); ++i) {
      const T element = list.get(i);
      visit(element);
    }
  }
  template <class Visit>
  static void visit(c10::List<T>& list, const Visit& visit) {
    list = list.copy();
    for (size_t i = 0; i < list.size(); ++i) {
      T element = list.get(i);
      visit(element);
      list.set(i, std::move(element));
    }
  }
};

/// Maps have `visit_items(map, f)`, too, which calls `f(key, element)` in an order that depends on
/// the keys only: copies of a `std::unordered_map` and other ranks may keep the same elements in
/// another.
template <class M, class V>
struct MapParts {
  static constexpr Shape kShape = Shape::kMap;
  using Types = TypeList<V>;
  template <class U, class Visit>
  static void visit(U& map, const Visit& visit) {
    Parts<M>::visit_items(map, [&](const auto&, auto& element) { visit(element); });
  }
};
template <class K, class V, class C, class A>
struct Parts<std::map<K, V, C, A>> : MapParts<std::map<K, V, C, A>, V> {
  template <class... U>
  using With = std::map<K, U..., C>;
  template <class U, class Visit>
  static void visit_items(U& map, const Visit& visit) {
    for (auto& [key, element] : map) visit(key, element);
  }
};
template <class K, class V, class H, class E, class A>
struct Parts<std::unordered_map<K, V, H, E, A>> : MapParts<std::unordered_map<K, V, H, E, A>, V> {
  template <class... U>
  using With = std::unordered_map<K, U..., H, E>;
  template <class U, class Visit>
  static void visit_items(U& map, const Visit& visit) {
    using Entry = std::remove_reference_t<decltype(*map.begin())>;
    std::vector<Entry*> entries;
    for (Entry& entry : map) entries.push_back(&entry);
    std::sort(entries.begin(), entries.end(),
              [](const Entry* a, const Entry* b) { return a->first < b->first; });
    for (Entry* entry : entries) visit(entry->first, entry->second);
  }
};
template <class K, class V>
struct Parts<torch::OrderedDict<K, V>> : MapParts<torch::OrderedDict<K, V>, V> {
  template <class... U>
  using With = torch::OrderedDict<K, U...>;
  template <class U, class Visit>
  static void visit_items(U& map, const Visit& visit) {
    for (auto& item : map) visit(item.key(), item.value());
  }
};
template <class K, class V>
struct Parts<c10::Dict<K, V>,
             std::enable_if_t<std::is_arithmetic_v<K> || std::is_same_v<K, std::string>>>
    : MapParts<c10::Dict<K, V>, V> {
  template <class... U>
  using With = std::map<K, U...>;
  static std::map<K, V> sorted(const c10::Dict<K, V>& dict) {
    std::map<K, V> elements;
    for (const auto& entry : dict) elements.emplace(entry.key(), entry.value());
    return elements;
  }
  template <class Visit>
  static void visit_items(const c10::Dict<K, V>& dict, const Visit& visit) {
    const std::map<K, V> elements = sorted(dict);
    for (const auto& [key, element] : elements) visit(key, element);
  }
  template <class Visit>
  static void visit_items(c10::Dict<K, V>& dict, const Visit& visit) {
    std::map<K, V> elements = sorted(dict);
    dict = dict.copy();
    for (auto& [key, element] : elements) {
      visit(key, element);
      dict.insert_or_assign(key, element);
    }
  }
};

template <class T>
struct Parts<std::optional<T>> {
  static constexpr Shape kShape = Shape::kHolder;
  using Types = TypeList<T>;
  template <class... U>
  using With = std::optional<U...>;
  template <class V, class Visit>
  static void visit(V& value, const Visit& visit) {
    if (value) visit(*value);
  }
};
/// Whether a pointee can be copied: a copy as its base class would lose the rest of an object.
template <class T>
constexpr bool can_be_copied() {
  if constexpr (!IsComplete<T>::value) {
    return false;
  } else {
    return std::is_copy_constructible_v<T> && !std::is_polymorphic_v<T>;
  }
}
template <class T>
struct Parts<std::shared_ptr<T>, std::enable_if_t<can_be_copied<T>()>> {
  static constexpr Shape kShape = Shape::kHolder;
  using Types = TypeList<std::remove_const_t<T>>;
  template <class... U>
  using With = std::shared_ptr<U...>;
  template <class Visit>
  static void visit(const std::shared_ptr<T>& pointer, const Visit& visit) {
    if (pointer) visit(std::as_const(*pointer));
  }
  template <class Visit>
  static void visit(std::shared_ptr<T>& pointer, const Visit& visit) {
    if (!pointer) return;
    auto own = std::make_shared<std::remove_const_t<T>>(*pointer);
    visit(*own);
    pointer = std::move(own);
  }
};

template <class T>
struct ReferredTypes;
template <class... T>
struct ReferredTypes<std::tuple<T&...>> {
  using Types = TypeList<std::remove_const_t<T>...>;
};

/// `F::of(value)` gives references to the parts.
template <class T, class F>
struct ProductParts {
  static constexpr Shape kShape = Shape::kProduct;
  using References = decltype(F::of(std::declval<T&>()));
  static constexpr size_t kCount = std::tuple_size_v<References>;
  using Types = typename ReferredTypes<References>::Types;
  template <class... U>
  using With = std::tuple<U...>;
  template <size_t I>
  static const auto& get(const T& value) {
    return std::get<I>(F::of(value));
  }
  template <class V, class Visit>
  static void visit(V& value, const Visit& visit) {
    std::apply([&](auto&... part) { (visit(part), ...); }, F::of(value));
  }
};

struct TupleFields {
  template <class U>
  static auto of(U& value) {
    return std::apply([](auto&... part) { return std::tie(part...); }, value);
  }
};

template <class... T>
struct Parts<std::tuple<T...>> : ProductParts<std::tuple<T...>, TupleFields> {};
template <class A, class B>
struct Parts<std::pair<A, B>> : ProductParts<std::pair<A, B>, TupleFields> {
  template <class... U>
  using With = std::pair<U...>;
};
/// Lists the type of its elements once, however many there are: a long one must compile, too.
template <class T, size_t N>
struct Parts<std::array<T, N>> {
  static constexpr Shape kShape = Shape::kProduct;
  static constexpr size_t kCount = N;
  using Types = TypeList<T>;
  template <class... U>
  using With = std::array<U..., N>;
  template <size_t I>
  static const auto& get(const std::array<T, N>& value) {
    return std::get<I>(value);
  }
  template <class V, class Visit>
  static void visit(V& array, const Visit& visit) {
    for (auto& element : array) visit(element);
  }
};

/// A struct that lists its fields.
template <class T>
struct Parts<T, std::void_t<decltype(Fields<T>::of(std::declval<T&>()))>>
    : ProductParts<T, Fields<T>> {};

template <class... T>
struct Parts<std::variant<T...>> {
  static constexpr Shape kShape = Shape::kChoice;
  static constexpr size_t kCount = sizeof...(T);
  using Types = TypeList<T...>;
  template <class... U>
  using With = std::variant<U...>;
  template <size_t I>
  static const auto& get(const std::variant<T...>& value) {
    return std::get<I>(value);
  }
  template <class V, class Visit>
  static void visit(V& value, const Visit& visit) {
    std::visit([&](auto& part) { visit(part); }, value);
  }
};

/// The parts of a value that refers to objects that others may see, or that cannot be replaced.
template <class T>
struct PartsOutOfReach {
  static constexpr Shape kShape = Shape::kOpaque;
  using Types = TypeList<OutOfReach<T>>;
};
template <class T>
struct Parts<T*> : PartsOutOfReach<T> {};
template <class T, class D>
struct Parts<std::unique_ptr<T, D>> : PartsOutOfReach<T> {};
template <class T>
struct Parts<std::shared_ptr<T>, std::enable_if_t<!can_be_copied<T>()>> : PartsOutOfReach<T> {};
template <class T>
struct Parts<std::reference_wrapper<T>> : PartsOutOfReach<T> {};
template <class T>
struct Parts<c10::ArrayRef<T>> : PartsOutOfReach<T> {};
template <class T, class C, class A>
struct Parts<std::set<T, C, A>> : PartsOutOfReach<T> {};
template <class T, class H, class E, class A>
struct Parts<std::unordered_set<T, H, E, A>> : PartsOutOfReach<T> {};

template <class T, class = void>
struct HasParts : std::false_type {};
template <class T>
struct HasParts<T, std::void_t<typename Parts<T>::Types>> : std::true_type {};

/// The places of tensors in the values of a type, as far as the type says.
struct Content {
  bool tensors = false;  ///< there may be some, in places that are known
  bool slices = false;   ///< there may be objects that slice themselves
  bool unknown = false;  ///< there may be tensors in places that are not

  constexpr Content operator|(Content other) const {
    return {tensors || other.tensors, slices || other.slices, unknown || other.unknown};
  }
  constexpr bool none() const { return !tensors && !slices && !unknown; }
};

template <class T>
constexpr Content content_of();

template <class T>
struct ContentOf {
  static constexpr Content get() { return content_of<T>(); }
};
template <class T>
struct ContentOf<OutOfReach<T>> {
  static constexpr Content get() {
    if constexpr (std::is_void_v<T> || std::is_function_v<T>) {
      return {};
    } else {
      return {false, false, !content_of<T>().none()};
    }
  }
};
template <class... T>
struct ContentOf<TypeList<T...>> {
  static constexpr Content get() { return (Content{} | ... | ContentOf<T>::get()); }
};

/// A class whose objects can hold no tensor, or whose tensors a step function knows by name.
template <class T>
constexpr bool is_known_class() {
  return std::is_empty_v<T> || std::is_trivially_copyable_v<T> ||
         std::is_base_of_v<torch::nn::Module, T> ||
         std::is_base_of_v<torch::detail::ModuleHolderIndicator, T>;
}

template <class T>
constexpr Content content_of() {
  using U = std::decay_t<T>;
  if constexpr (holds_no_tensors<U>) {
    return {};
  } else if constexpr (!std::is_class_v<U> && !std::is_union_v<U> && !std::is_pointer_v<U>) {
    return {};
  } else if constexpr (!IsComplete<U>::value) {
    return {false, false, true};
  } else if constexpr (IsTensor<U>::value || std::is_same_v<U, c10::IValue>) {
    return {true, false, false};
  } else if constexpr (SlicesItself<U>::value) {
    return {false, true, false};
  } else if constexpr (HasParts<U>::value) {
    return ContentOf<typename Parts<U>::Types>::get();
  } else {
    return {false, false, !is_known_class<U>()};
  }
}

/// True for a type whose values may hold tensors somewhere inside.
template <class T>
constexpr bool holds_tensors() {
  return content_of<T>().tensors;
}

template <class D, class B, class R>
std::true_type derives_from_data_loader(const torch::data::DataLoaderBase<D, B, R>*);
std::false_type derives_from_data_loader(...);

template <class T>
struct IsDataLoader : decltype(derives_from_data_loader(std::declval<T*>())) {};
template <class T, class D>
struct IsDataLoader<std::unique_ptr<T, D>> : IsDataLoader<T> {};

/// How an argument of type T is kept: tensors of derived classes and expressions as plain values.
template <class T>
struct ArgumentOf {
  using type = std::conditional_t<IsTensor<T>::value, at::Tensor, T>;
  template <class A>
  static type from(A&& argument) {
    return std::forward<A>(argument);
  }
};
/// A list that others own, such as `at::TensorList`: its tensors as a list of its own.
template <class T>
struct ArgumentOf<c10::ArrayRef<T>> {
  using type =
      std::conditional_t<content_of<T>().none(), c10::ArrayRef<T>, std::vector<std::decay_t<T>>>;
  static type from(const c10::ArrayRef<T>& list) { return type(list.begin(), list.end()); }
};

template <class T>
using AsArgument = typename ArgumentOf<std::decay_t<T>>::type;

template <class A>
AsArgument<A> as_argument(A&& argument) {
  return ArgumentOf<std::decay_t<A>>::from(std::forward<A>(argument));
}

/// The result type of a step function that returns nothing.
struct Nothing {};

/// Throws `UsageError` unless results of microbatches have the `same` structure.
SMP_API void check_same_structure(bool same);

/// The tensors in `value`, in an order that depends on its structure only. Throws `UsageError` for
/// an object of TorchScript and the like, whose tensors are out of reach.
SMP_API std::vector<at::Tensor> tensors_in(const c10::IValue& value);
/// A copy of `value` with these tensors in the places of its own.
SMP_API c10::IValue with_tensors(const c10::IValue& value, const std::vector<at::Tensor>& tensors);

template <class Visit>
void for_each_tensor_in(const c10::IValue& value, const Visit& visit) {
  for (const at::Tensor& tensor : tensors_in(value)) visit(tensor);
}
template <class Visit>
void for_each_tensor_in(c10::IValue& value, const Visit& visit) {
  std::vector<at::Tensor> tensors = tensors_in(value);
  for (at::Tensor& tensor : tensors) visit(tensor);
  value = with_tensors(value, tensors);
}

/// Calls `visit` for every tensor in `value` and every object that slices itself. It may replace
/// them unless the value is constant; then shared objects stay as they are, and `value` gets a
/// copy.
template <class T, class Visit>
void for_each_leaf(T& value, const Visit& visit) {
  using U = std::remove_const_t<T>;
  constexpr Content content = content_of<U>();
  if constexpr (!content.tensors && !content.slices) {
    return;
  } else if constexpr (std::is_same_v<U, c10::IValue>) {
    for_each_tensor_in(value, visit);
  } else if constexpr (IsTensor<U>::value || SlicesItself<U>::value) {
    visit(value);
  } else {
    Parts<U>::visit(value, [&](auto& part) { for_each_leaf(part, visit); });
  }
}

/// The same for tensors alone.
template <class T, class Visit>
void for_each_tensor(T& value, const Visit& visit) {
  for_each_leaf(value, [&](auto& leaf) {
    if constexpr (IsTensor<std::remove_const_t<std::remove_reference_t<decltype(leaf)>>>::value) {
      visit(leaf);
    }
  });
}

/// The same for objects that slice themselves.
template <class T, class Visit>
void for_each_slice(T& value, const Visit& visit) {
  if constexpr (content_of<T>().slices) {
    for_each_leaf(value, [&](auto& leaf) {
      if constexpr (SlicesItself<
                        std::remove_const_t<std::remove_reference_t<decltype(leaf)>>>::value) {
        visit(leaf);
      }
    });
  }
}

}  // namespace smp::detail
