// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <tuple>
#include <type_traits>
#include <utility>

#include "smp/detail/structure.h"

namespace smp::detail {

/// Casts the tensors in a value that are of type `from`.
template <class T>
void cast_tensors(T& value, at::ScalarType from, at::ScalarType to) {
  for_each_tensor(value, [&](at::Tensor& tensor) {
    if (tensor.defined() && tensor.scalar_type() == from) tensor = tensor.to(to);
  });
}

/// How an argument is kept on its way: values that may hold tensors as copies, the rest as they
/// are.
template <class T>
using Held = std::conditional_t<holds_tensors<T>(), std::decay_t<T>, T&&>;

template <class Module, class... Arguments, size_t... I>
auto forward_held(Module& module, std::tuple<Held<Arguments>...>& held, std::index_sequence<I...>) {
  return module.forward(static_cast<Arguments&&>(std::get<I>(held))...);
}

/// Calls a module that computes in `type`: tensors of float32 among the arguments are cast to it,
/// and results of that type to float32 (Megatron-LM's FP16_Module).
template <class Module, class... Arguments>
auto forward_in(at::ScalarType type, Module& module, Arguments&&... arguments) {
  std::tuple<Held<Arguments>...> held(std::forward<Arguments>(arguments)...);
  std::apply([&](auto&... argument) { (cast_tensors(argument, at::kFloat, type), ...); }, held);
  constexpr auto indices = std::index_sequence_for<Arguments...>();
  using Result = decltype(forward_held<Module, Arguments...>(module, held, indices));
  if constexpr (std::is_void_v<Result>) {
    forward_held<Module, Arguments...>(module, held, indices);
  } else {
    Result result = forward_held<Module, Arguments...>(module, held, indices);
    cast_tensors(result, type, at::kFloat);
    return result;
  }
}

}  // namespace smp::detail
