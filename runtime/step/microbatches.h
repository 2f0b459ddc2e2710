// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "core/refusal.h"
#include "graph/graph.h"
#include "smp/detail/step_call.h"

namespace smp::runtime {

struct StepInputs;

/// Into how many microbatches a call's batch is cut: as many as divide it, `most` of them at most,
/// a multiple of `unit`, which divides `most`, where `unit` divides the batch. So all samples count
/// alike in a mean over microbatches, and one graph is that of all of them. Counts only tensors
/// that can be cut: `cut_microbatches` refuses the rest. Internal.
int64_t count_microbatches(const detail::StepCall& call, int64_t most, int64_t unit);

/// The call's tensors by microbatch. `count` is the result of `count_microbatches`, or a number
/// that divides it. Throws `UsageError` for tensors that cannot be cut; `step_name` is for it.
/// Internal.
std::vector<std::vector<at::Tensor>> cut_microbatches(const detail::StepCall& call, int64_t count,
                                                      const std::string& step_name);

/// Throws a `UsageError` unless `unit`, the gradient shards that a replica sums, divides the batch
/// of a call that trains. `cut_microbatches` does not check its number. Internal.
void check_shards(const detail::StepCall& call, int64_t unit, const std::string& step_name);

/// Throws a `UsageError` unless replicas cut their batches into as many microbatches; 0: a replica
/// has no batch. `reason` is the sentence that says why they must. Internal.
void check_same_microbatches(const std::vector<int64_t>& counts, const std::string& step_name,
                             const std::string& reason);

/// Why a step function whose batch is cut must be given a tensor that it captures: it looks like
/// the batch, and each microbatch would get the whole of it. Numbers may be captured, and tensors
/// that are the same for all microbatches by the words of the program or a step function.
core::Refusal why_no_constant(const detail::StepCall& call, const StepInputs& known,
                              const at::Tensor& tensor);

std::vector<graph::TensorMeta> metas_of(const std::vector<at::Tensor>& tensors);

}  // namespace smp::runtime
