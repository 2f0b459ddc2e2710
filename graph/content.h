// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "graph/graph.h"

namespace smp::graph {

/// XXH64 of the elements in logical order; of any device and strides. A tensor without memory,
/// which stands for zeros, counts as these.
uint64_t hash_content(const at::Tensor& tensor, uint64_t seed = 0);

/// A hash of each tensor's content, made where it lies: of one on the CPU `hash_content`, of one on
/// another device a sum of its elements' bits, weighted by their places, so that only sums come to
/// the host, in one copy. One element that differs changes the sum for certain, several with a
/// chance of one in 2^32 at the most that they do not. Tensors of other devices lie on one.
std::vector<uint64_t> hashes_in_place(const std::vector<at::Tensor>& tensors);

/// True if sizes, dtype and the bytes of the elements are equal.
bool same_content(const at::Tensor& a, const at::Tensor& b);

/// True for a tensor whose content may be read each time that an operator uses it.
bool is_small_on_cpu(const TensorMeta& meta);

/// A copy without history that kernels cannot tell from the tensor: they may round otherwise on
/// other strides.
at::Tensor clone_content(const at::Tensor& tensor);

/// Whether a tensor is a number that libtorch wrapped: it does not decide the type of a sum. False
/// for an undefined one.
bool is_wrapped_number(const at::Tensor& tensor);
/// A number as libtorch wraps it.
at::Tensor wrapped_number(const at::Scalar& number);
/// Where `from` is a wrapped number, `to` is one, too.
void stay_wrapped_number(const at::Tensor& from, const at::Tensor& to);

/// Keeps the contents of tensors, and puts them back when it goes. A history that writes have left
/// on a tensor without one goes, too.
class ContentScope {
 public:
  ContentScope() = default;
  explicit ContentScope(const std::vector<at::Tensor>& tensors);
  ~ContentScope();
  ContentScope(const ContentScope&) = delete;
  ContentScope& operator=(const ContentScope&) = delete;

  /// Does nothing for a tensor that has been kept already.
  void keep(const at::Tensor& tensor);

 private:
  struct Kept {
    at::Tensor tensor;
    at::Tensor content;
    bool requires_grad;
  };

  std::unordered_map<const c10::TensorImpl*, Kept> kept_;
};

/// Fills a new tensor on the CPU, whose content is undefined, with a pattern that no program
/// writes by chance.
void mark_uninitialised(const at::Tensor& tensor);

}  // namespace smp::graph
