// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "dp/parameter_slices.h"
#include "runtime/runtime.h"

// Tensors of a model that ranks have together, as `Entry::sharding` says: of the values, or with
// `shard_optimizer_state` only of the state for updates. Internal.
namespace smp::runtime {

/// How parameters are divided among replicas, of all models that have some.
std::vector<std::shared_ptr<dp::ParameterSlices>> slices_of(const Runtime& runtime);

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

/// The ranks over which a cut lies.
comm::CommunicatorPtr group_along(const Runtime& runtime, const core::Axis& axis);

/// Undoes the last cut of a tensor, of which this rank has `own`, or nothing. The result is on the
/// rank at position `root` of those over which the cut lies, or on all. Collective over them.
at::Tensor join(const Runtime& runtime, const comm::Sharding& sharding, const at::Tensor& own,
                const at::TensorOptions& options, std::optional<int> root = std::nullopt);

/// A tensor of a parameter: its gradient, a field of its state.
struct Held {
  const ParameterTable::Entry* entry;
  comm::Sharding lies;
  at::Tensor own;        ///< undefined where this rank has nothing
  at::ScalarType dtype;  ///< dtype of `own`, known to all ranks
  bool exists;           ///< some rank has something; the same on all that have some of it
};
using UseOfHeld = std::function<void(size_t index, const at::Tensor& tensor)>;

/// Puts each of `held` together and calls `use` on one of the ranks that have it together, bucket
/// by bucket, so that none needs the memory for all. A tensor without cuts is used by all that have
/// it. Collective over the ranks that have some of it together, which give the same list.
void for_each_whole(const Runtime& runtime, const std::vector<Held>& held, const UseOfHeld& use);

}  // namespace smp::runtime
