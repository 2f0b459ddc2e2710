// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <functional>
#include <vector>

#include "runtime/runtime.h"

// Tensors of a model that ranks have together. A whole is divided in up to two ways, one inside the
// other: the ranks of a tensor-parallel group have parts of it (`Entry::split`), and replicas
// pieces of their part (`Entry::slice`), of its values or only of the state kept for updates.
// Internal.
namespace smp::runtime {

/// A copy of the values of a parameter or buffer, in host memory, on all ranks. Collective over the
/// pipeline, and over the ranks that have the tensor together.
at::Tensor whole_on_all(const Runtime& runtime, const ParameterTable::Entry& entry);

/// The same on the first rank of the model, undefined on all others.
at::Tensor whole_on_first(const Runtime& runtime, const ParameterTable::Entry& entry);

/// The values on one of the ranks that have them, undefined on all others; in host memory, if
/// several have them together. These take turns, so that none needs the memory for all of several:
/// `turn` counts these. Among replicas that have the same, `replica` gives it. Collective over the
/// ranks that have the tensor together.
at::Tensor whole_on_one(const Runtime& runtime, const ParameterTable::Entry& entry, size_t turn,
                        int replica = 0);

/// A tensor that lies on the ranks as a parameter does where it is updated: its gradient, a state.
struct Held {
  const ParameterTable::Entry* entry;
  /// The part of this rank: a piece's elements, or in the sizes of `entry->tensor`; undefined where
  /// it has nothing.
  at::Tensor own;
  at::ScalarType dtype;  ///< dtype of `own`, known to all ranks
  bool exists;           ///< some rank has something; the same on all that have pieces of it
};

/// Puts each of `held` together and calls `use(index, whole)` on one of the ranks that have it
/// together, bucket by bucket, so that none needs the memory for all. An undivided tensor is used
/// by all ranks that have it. Collective over the ranks that have some of it together, which give
/// the same list.
void for_each_whole(const Runtime& runtime, const std::vector<Held>& held,
                    const std::function<void(size_t index, const at::Tensor& whole)>& use);

}  // namespace smp::runtime
