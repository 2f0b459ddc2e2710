// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/flat_hash_map.h>

#include <cstdint>

#include "core/tensor_lists.h"

namespace smp::runtime {

/// Copies in float32 of parameters, or pieces of them, in half precision: an optimizer updates them
/// in place of the parameters, so that updates smaller than a half-precision number's last digit
/// add up (Micikevicius et al., "Mixed Precision Training", 2018). Internal.
class MasterWeights {
 public:
  /// Whether a tensor, or those of a type, need masters: they are of float16 or bfloat16.
  static bool concerns(at::ScalarType dtype) {
    return dtype == at::kHalf || dtype == at::kBFloat16;
  }
  static bool concerns(const at::Tensor& tensor) { return concerns(tensor.scalar_type()); }

  /// The master of a tensor, made of its values at the first call: a leaf with its sizes and
  /// strides.
  const at::Tensor& make(const at::Tensor& tensor);
  /// Undefined if there is none.
  at::Tensor find(const c10::TensorImpl* tensor) const;
  /// Replaces the values of a tensor's master, which is made if there is none.
  void set(const at::Tensor& tensor, const at::Tensor& values);
  /// Has `updates` round the master's values into the tensor.
  void write_back(const at::Tensor& tensor, core::TensorUpdates& updates) const;
  /// Gives all masters the values that their tensors have now.
  void reload();
  void clear() { entries_.clear(); }

 private:
  struct Entry {
    at::Tensor tensor;  // which keeps the address from being used again
    at::Tensor master;
  };

  ska::flat_hash_map<const c10::TensorImpl*, Entry> entries_;
};

}  // namespace smp::runtime
