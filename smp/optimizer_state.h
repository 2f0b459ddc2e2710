// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace smp {

/// The state of an optimizer keyed by parameter name, independent of the order of parameters,
/// of addresses, and of which parameters a rank holds.
struct OptimizerState {
  /// State of one parameter.
  struct Param {
    std::vector<int64_t> shape;                 ///< Shape of the parameter.
    std::map<std::string, at::Tensor> tensors;  ///< Tensors by field, for example "exp_avg".
    /// The other fields, text of a JSON object: {"step":3}; empty without any.
    std::string scalars;
  };

  /// A param group.
  struct Group {
    std::string type;                 ///< C++ type of its options.
    std::string options;              ///< Text of a JSON object: "lr" and the others.
    std::vector<std::string> params;  ///< Names of its parameters.
  };

  std::map<std::string, Param> params;  ///< Parameters without state are absent.
  std::vector<Group> groups;
};

}  // namespace smp
