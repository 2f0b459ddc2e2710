// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "dp/parameter_pieces.h"
#include "runtime/runtime.h"

// Tensors of a model that ranks have together, as `Entry::sharding` says: of the values, or with
// `shard_optimizer_state` only of the state for updates. Internal.
namespace smp::runtime {

/// How parameters are divided among replicas, of all models that have some.
std::vector<std::shared_ptr<dp::ParameterPieces>> pieces_of(const Runtime& runtime);

/// Throws `UsageError` where the program has written this replica's piece of a parameter that the
/// replicas have whole, and no update has given it to the others since.
void check_pieces_unwritten(const Runtime& runtime);

/// A copy of the values of a parameter or buffer, in host memory, on all ranks or on the first of
/// each model, undefined on others. Before partitioning they are those with which training begins,
/// of world rank 0. Collective over the pipeline and the ranks that have the tensor together;
/// before partitioning over the world.
at::Tensor whole_copy(const Runtime& runtime, const ParameterTable::Entry& entry, bool to_first);

/// The values on one of the ranks that have them, undefined on all others; in host memory, if
/// several have them together. These take turns, so that none needs the memory for all of several:
/// `turn` counts these. Among replicas that have the same, `replica` gives it. Collective over the
/// ranks that have the tensor together.
at::Tensor whole_on_one(const Runtime& runtime, const ParameterTable::Entry& entry, size_t turn,
                        int replica = 0);

/// Undoes the cuts of a tensor, the last first, of which this rank has `own`, or nothing. The whole
/// is on one rank, undefined on others, or on all. Ranks take turns: the digits of `turn`, in the
/// order in which cuts are undone, are the rank's positions along their axes. Collective over
/// these.
at::Tensor join(const Runtime& runtime, comm::Sharding lies, at::Tensor own,
                const at::TensorOptions& options, std::optional<size_t> turn = std::nullopt);

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
