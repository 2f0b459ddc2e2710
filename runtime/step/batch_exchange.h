// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "comm/communicator.h"

namespace smp::runtime {

/// The inputs of a step by rank of a tensor-parallel group, whose ranks are each given a batch and
/// run all of them. Collective over the group. Throws a `UsageError` on all of its ranks where
/// inputs differ in number, sizes or type; `step_name` is for it. Internal.
std::vector<std::vector<at::Tensor>> exchange_batches(comm::Communicator& group,
                                                      const std::vector<at::Tensor>& mine,
                                                      const std::string& step_name);

/// The tensors that the first rank of a pipeline passes to a step, on all of its ranks. Collective
/// over the pipeline. Throws `UsageError` on all of them where shapes or types differ. Internal.
std::vector<at::Tensor> take_first_batch(comm::Communicator& group,
                                         const std::vector<at::Tensor>& mine,
                                         const std::string& step_name);

}  // namespace smp::runtime
