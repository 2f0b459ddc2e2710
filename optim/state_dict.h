// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>
#include <torch/ordered_dict.h>

#include <cstdint>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "smp/detail/optimizer_traits.h"
#include "smp/optimizer_state.h"

namespace smp::optim {

/// The name of each parameter, by identity: a tied parameter has one.
using ParameterNames = std::map<const c10::TensorImpl*, std::string>;

/// The state of any optimizer whose options and states implement libtorch's `serialize`, with its
/// own tensors, which the next step changes. Throws UsageError for LBFGS, and for parameters
/// without a name.
OptimizerState share_state(const torch::optim::Optimizer& optimizer, const ParameterNames& names);

/// Gives a state tensors of its own.
OptimizerState copy_of(OptimizerState state);

/// Takes parameters out of a state: the entries of them, and their names in the groups.
void erase_params(OptimizerState& state, const std::function<bool(const std::string&)>& which);

/// Throws `UsageError` for LBFGS, which has one state for all parameters together.
void check_state_per_parameter(const torch::optim::Optimizer& optimizer);

/// Restores `state`: the options of all groups (learning rate included) and the state of every
/// parameter, made where there is none and removed where the saved run had none and the parameter
/// has elements. Names that only one of them has belong to other ranks, or keep their options and
/// have no state. Tensors go to their parameter's device; those that are elementwise by `layouts`
/// and have its shape get its strides. Throws CheckpointError that lists, sorted, all unnamed
/// parameters, other shapes and groups that do not match; then nothing has changed.
void set_state(torch::optim::Optimizer& optimizer, const OptimizerState& state,
               const ParameterNames& names, detail::ParamStateFactory make_state,
               const FieldLayouts& layouts = {});

/// Throws the errors of `set_state`, and changes nothing.
void check_state(torch::optim::Optimizer& optimizer, const OptimizerState& state,
                 const ParameterNames& names, detail::ParamStateFactory make_state);

/// The fields in a text of an `OptimizerState`. Throws CheckpointError for one that is no JSON
/// object.
nlohmann::json parse_fields(const std::string& text);
/// The inverse.
std::string text_of(const nlohmann::json& fields);

/// Everything of `state` but its tensors, the "optimizer" section of a checkpoint's index:
/// {"param_groups": [{"type", "options", "params"}], "state": {name: {"shape", "scalars"}}}.
nlohmann::json to_json(const OptimizerState& state);

/// The tensors of `state` by "parameter/field".
std::map<std::string, at::Tensor> tensors_of(const OptimizerState& state);

/// The inverse of the two above. Throws CheckpointError for JSON of another form.
OptimizerState from_parts(const nlohmann::json& json,
                          const std::map<std::string, at::Tensor>& tensors);

}  // namespace smp::optim
