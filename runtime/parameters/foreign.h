// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <utility>
#include <vector>

#include "graph/absent.h"
#include "graph/graph.h"
#include "runtime/runtime.h"

// Parameters that other ranks of the pipeline own, and buffers that steps write there, between
// steps. They and the gradients are absent tensors (graph/absent.h), so that code of the program
// does this rank's part on each rank, or is refused. So are parameters that sharded data
// parallelism divides. Internal.
namespace smp::runtime {

/// The words of errors about such a tensor.
graph::AbsencePtr absence_of(const ParameterTable::Entry& entry);

/// Makes tensors that other ranks own, and those that sharded data parallelism divides, absent
/// where this rank has numbers of it, from the program (`set_data`), `model->cpu()` or the time
/// before steps wrote it: before a step that trains, which leaves these behind.
void forget_copies(const Runtime& runtime);

/// Parameters and what their `.grad` is after a step that trains: absent, not undefined.
using ForeignGradients = std::vector<std::pair<at::Tensor, at::Tensor>>;

/// Those of a graph that other ranks own.
ForeignGradients foreign_gradients(const Runtime& runtime, const graph::Graph& graph);

/// Whether another rank of the pipeline owns the tensor, and it is no constant.
bool is_foreign(const Runtime& runtime, const ParameterTable::Entry& entry);

/// Leaves the gradient that a foreign parameter had before partitioning to its owner.
void release_gradient(const Runtime& runtime, const ParameterTable::Entry& entry);

}  // namespace smp::runtime
