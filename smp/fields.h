// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

/// Lists the fields of a struct inside of it, so that the library finds the tensors in them: a step
/// function cuts those of its arguments, and returns a `std::tuple` of the values that the fields
/// of its result become.
///
/// Example:
/// \code
///   struct Batch {
///     torch::Tensor images, labels;
///     double weight;
///     SMP_FIELDS(images, labels, weight)
///   };
/// \endcode
// NOLINTNEXTLINE(cppcoreguidelines-macro-usage)
#define SMP_FIELDS(...)                               \
  auto smp_fields() { return std::tie(__VA_ARGS__); } \
  auto smp_fields() const { return std::tie(__VA_ARGS__); }

namespace torch::data {
template <typename Data, typename Target>
struct Example;
}  // namespace torch::data

namespace c10 {
class Scalar;
}  // namespace c10

namespace at {
struct Generator;
}  // namespace at

namespace smp {

/// The fields of a struct that cannot be given `SMP_FIELDS`: specialise it with
/// `template <class T> static auto of(T& object)`, which returns references to them.
///
/// Example:
/// \code
///   template <>
///   struct smp::Fields<theirs::Batch> {
///     template <class T>
///     static auto of(T& batch) { return std::tie(batch.images, batch.labels); }
///   };
/// \endcode
template <class T, class = void>
struct Fields {};

template <class T>
struct Fields<T, std::void_t<decltype(std::declval<T&>().smp_fields())>> {
  template <class U>
  static auto of(U& object) {
    return object.smp_fields();
  }
};

template <class D, class T>
struct Fields<torch::data::Example<D, T>> {
  template <class U>
  static auto of(U& example) {
    return std::tie(example.data, example.target);
  }
};

template <class D>
struct Fields<torch::data::Example<D, void>> {
  template <class U>
  static auto of(U& example) {
    return std::tie(example.data);
  }
};

/// True for a class without tensors, whose objects are passed and returned as they are. Specialise
/// it for your own: numbers, enums, strings, standard containers of such and trivially copyable
/// classes are known to have none.
///
/// Example:
/// \code
///   template <>
///   inline constexpr bool smp::holds_no_tensors<Vocabulary> = true;
/// \endcode
template <class T>
inline constexpr bool holds_no_tensors = false;

template <class C, class T, class A>
inline constexpr bool holds_no_tensors<std::basic_string<C, T, A>> = true;
template <>
inline constexpr bool holds_no_tensors<c10::Scalar> = true;
template <>
inline constexpr bool holds_no_tensors<at::Generator> = true;

}  // namespace smp
