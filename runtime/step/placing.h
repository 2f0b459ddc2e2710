// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <string>

#include "runtime/runtime.h"
#include "runtime/step/planning.h"
#include "smp/nn/parameter_split.h"

namespace smp::runtime {

/// Parameters by name, with how they are to be divided among the ranks of a tensor-parallel group.
using Splits = std::map<std::string, nn::ParameterSplit>;

/// Divides the models among the ranks by the first plan: settles owners, frees other ranks'
/// tensors, makes delayed parameters that this rank owns, divides them, moves them to its device,
/// keeps the report, and runs the post-partition hooks. Throws `PartitionError` where the device
/// has no room for them.
void apply_first_plan(Runtime& runtime, const PlannedGraph& planned, int microbatches,
                      const Splits& splits);

}  // namespace smp::runtime
