// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include "comm/communicator.h"
#include "smp/nn/parameter_split.h"

namespace smp::runtime {

/// The whole of a tensor that has the sizes of a part on each rank of a tensor-parallel group, on
/// all of them. Collective over the group.
at::Tensor join_on_all(comm::Communicator& group, const nn::ParameterSplit& split,
                       const at::Tensor& part);

/// The same on rank `root` of the group, undefined on the others.
at::Tensor join_on(int root, comm::Communicator& group, const nn::ParameterSplit& split,
                   const at::Tensor& part);

}  // namespace smp::runtime
