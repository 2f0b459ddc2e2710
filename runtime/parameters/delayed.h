// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "runtime/runtime.h"

namespace torch::nn {
class Module;
}  // namespace torch::nn

namespace smp::runtime {

/// How the first step treats tensors that were constructed under `model_creation`. Internal.

/// True if some parameter or buffer has no data yet: the same on all ranks, once their models have
/// been compared.
bool has_delayed(const ParameterTable& table);

/// Compares the ranks' recordings of the construction of their models, and gives every rank the
/// random numbers of world rank 0. Collective over the world. Throws `UsageError` when the models
/// were constructed in different ways.
void agree_on_construction(const Runtime& runtime);

/// Makes on this rank the tensors that all ranks need: buffers, and tensors that are registered
/// nowhere, which a step function may read as constants.
void make_shared_tensors(const Runtime& runtime);

/// Makes the values of a parameter or buffer, in host memory, if they have not been made yet.
void make_values(const ParameterTable::Entry& entry);

/// Makes the module's parameters and buffers that have no data yet, on this rank, as if they had
/// been constructed plainly.
void materialize(const torch::nn::Module& module);

}  // namespace smp::runtime
