// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <type_traits>
#include <utility>

#include "smp/detail/structure.h"
#include "smp/export.h"

namespace smp {

/// A tensor of which each microbatch gets the whole: see `whole`.
class WholeTensor : public at::Tensor {
 public:
  explicit WholeTensor(const at::Tensor& tensor) : at::Tensor(tensor) {}
};

/// An object of whose tensors each microbatch gets the whole: see `whole`.
template <class T>
class Whole {
 public:
  explicit Whole(T value) : value_(std::move(value)) {}
  const T& get() const { return value_; }

 private:
  T value_;
};

/// Says that a tensor is no part of a batch: each microbatch gets the whole of it. An argument of a
/// step function is not cut then, as with `StepOptions().non_split_inputs`; and a tensor that the
/// function captures may be of any size. Returns the tensor.
///
/// Throws `UsageError` for a tensor of a step function that runs: its arguments are cut already.
///
/// Example:
/// \code
///   auto train = smp::step([&](torch::Tensor x, torch::Tensor y, torch::Tensor mask) {
///     auto loss = torch::cross_entropy_loss(model(x, mask), y, smp::whole(class_weights));
///     model->backward(loss);
///     return loss;
///   });
///   train(x, y, smp::whole(mask));
/// \endcode
SMP_API WholeTensor whole(const at::Tensor& tensor);

/// The same for an argument that is no tensor and may hold some. Where it does not list its fields
/// the function gets it as it is.
template <class T, class = std::enable_if_t<!std::is_base_of_v<at::Tensor, std::decay_t<T>>>>
Whole<std::decay_t<T>> whole(T&& value) {
  return Whole<std::decay_t<T>>(std::forward<T>(value));
}

namespace detail {

template <class T>
struct IsWhole : std::is_base_of<WholeTensor, T> {};
template <class T>
struct IsWhole<Whole<T>> : std::true_type {};

template <class T>
struct ArgumentOf<Whole<T>> {
  using type = typename ArgumentOf<T>::type;
  static type from(const Whole<T>& whole) { return ArgumentOf<T>::from(whole.get()); }
};

}  // namespace detail

}  // namespace smp
