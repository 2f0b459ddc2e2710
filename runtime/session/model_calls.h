// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "runtime/model.h"
#include "smp/join.h"

// The calls of `smp::ModelCore`, where they are documented, that need more than the model.
// Internal.
namespace smp::runtime {

void backward(const Model& model, const std::vector<at::Tensor>& tensors,
              const std::vector<at::Tensor>& gradients);

Model::TensorDict virtual_named_parameters(const Model& model);

Model::TensorDict state_dict(const Model& model, bool gather_to_rank0);
Model::TensorDict local_state_dict(const Model& model);
void load_state_dict(Model& model, const Model::TensorDict& state, bool strict);
void load_local_state_dict(Model& model, const Model::TensorDict& state, bool strict);

void gather_on_cpu(Model& model);
Join join_replicas(const Model& model, const JoinOptions& options);

/// Before the module is called outside a step function: which number the call has among those
/// that the ranks of a tensor-parallel group make together; nothing if this rank computes alone.
/// Throws as `smp::detail::ModelCall`.
std::optional<uint64_t> begin_shared_call(Model& model, const std::vector<at::Tensor>& inputs);

}  // namespace smp::runtime
