// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include "graph/absent.h"

namespace smp::graph {

// Parts: tensors of which this rank has some of the numbers, in the sizes of these. Operators on
// them (below_autograd.h) compute as ever where they go element by element, or over parts alone.
// One that combines a part with other tensors in another way (`linear`, `embedding`) would give
// wrong numbers, and throws a `UsageError` that names the part and the remedy. Views of a part, and
// what was computed from its elements, are parts, too.

/// From now on operators find a tensor a part; `absence` names the whole and the reason.
void become_part(const at::Tensor& tensor, AbsencePtr absence);
/// False for an undefined tensor, and for a hidden part.
bool is_part(const at::Tensor& tensor);
/// Until `stay_part`, operators find a part a tensor like any other.
void hide_part(const at::Tensor& part);
/// Ends that. Returns whether the tensor has ever become a part.
bool stay_part(const at::Tensor& tensor);

}  // namespace smp::graph
