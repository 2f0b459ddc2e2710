// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "exported/size_formula.h"
#include "graph/graph.h"

namespace smp::exported {

/// A program to write: the captured graphs, and the model's tensors.
struct ExportRequest {
  /// A parameter or buffer under one of its names.
  struct Tensor {
    std::string name;  ///< dotted path
    bool is_parameter;
    at::Tensor tensor;
  };
  /// An axis of an input that has a dynamic size.
  struct Axis {
    size_t input;
    int64_t axis;
    size_t size;  ///< its number among the dynamic ones
  };

  std::string file;             ///< its name in errors
  std::vector<Tensor> tensors;  ///< parameters, then buffers, in the model's order
  std::vector<std::pair<std::string, std::string>> modules;  ///< dotted paths and types
  std::vector<std::string> argument_names;
  std::vector<c10::IValue> arguments;  ///< those that the first capture had
  c10::IValue result;                  ///< result of that capture; its tensors mean their places
                                       ///< only
  SizeGrid grid;
  std::vector<SizeGrid::Range> sizes;  ///< the dynamic ones
  std::vector<Axis> axes;
  std::vector<std::shared_ptr<const graph::Graph>> graphs;  ///< graphs by capture of the grid

  /// The graph at the sizes given.
  const graph::Graph& graph() const { return *graphs.front(); }
};

/// The parts that a written program has of its own, by the place where it is used.
struct ExportReport {
  size_t nodes = 0;
  std::vector<std::string> constants;
  std::vector<std::string> numbers;
  std::map<std::string, std::string>
      renamed;  ///< parameters and buffers with other names in Python
};

}  // namespace smp::exported
