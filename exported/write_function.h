// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/ivalue.h>

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "exported/export_plan.h"
#include "exported/export_request.h"
#include "exported/program.h"
#include "exported/write_values.h"
#include "graph/graph.h"

namespace smp::exported {

/// An input of a program's function.
struct WrittenInput {
  Input::Kind kind;
  std::string name;                          ///< in the program
  std::string target;                        ///< dotted path, or name of a constant
  graph::ValueId value = graph::kUndefined;  ///< that operators read; none for one not used
  nlohmann::json meta;                       ///< meta of a tensor
  c10::IValue fixed;                         ///< value of an argument that is no tensor
};

/// The inputs of a program: parameters, buffers, constants, arguments.
std::vector<WrittenInput> inputs_of(const ExportRequest& request, const ExportPlan& plan,
                                    Names& names);

/// A program's function, as the schema's "graph".
struct WrittenFunction {
  nlohmann::json graph;
  std::vector<nlohmann::json> outputs;  ///< one for each leaf of the result
};

/// Writes the operators of the plan. Operators without gradients or under autocast become functions
/// of their own, which the wrappers of torch.export call. Adds to `report`.
WrittenFunction write_function(const ExportRequest& request, const ExportPlan& plan,
                               const std::vector<WrittenInput>& inputs, Names& names,
                               ExportReport& report);

}  // namespace smp::exported
