// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <cstdint>
#include <functional>

#include "smp/nn/parameter_split.h"

namespace smp::nn {

/// The dispatcher's operator of this name ("smp::tp_copy") and C++ signature.
template <class Signature>
c10::TypedOperatorHandle<Signature> typed_operator(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

/// Names of operators that move tensors.
inline constexpr char kCopy[] = "smp::tp_copy", kReduce[] = "smp::tp_reduce",
                      kScatter[] = "smp::tp_scatter", kGather[] = "smp::tp_gather",
                      kAllGather[] = "smp::tp_all_gather",
                      kReduceScatter[] = "smp::tp_reduce_scatter",
                      kAllToAll[] = "smp::tp_all_to_all";

/// An operator of this folder with its numbers, for calls through the dispatcher: below autograd,
/// or to differentiate again. It is looked up once.
template <const char* kName, class... Numbers>
std::function<at::Tensor(const at::Tensor&)> dispatched(Numbers... numbers) {
  static const auto op = typed_operator<at::Tensor(const at::Tensor&, Numbers...)>(kName);
  return [=](const at::Tensor& x) { return op.call(x, numbers...); };
}

/// `dim` counted from the start. Throws `UsageError` unless `x` has it.
int64_t normal_dim(const char* what, const at::Tensor& x, int64_t dim);

/// How `x` is divided among `ranks`, if it is the whole (`split_of_whole`) or a part
/// (`split_of_part`). Both throw `UsageError` if it cannot be.
ParameterSplit split_of_whole(const at::Tensor& x, int64_t dim, int64_t blocks, int ranks);
ParameterSplit split_of_part(const at::Tensor& x, int64_t dim, int64_t blocks, int ranks);

}  // namespace smp::nn
