// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/ivalue.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "exported/program.h"
#include "graph/module_scope.h"

namespace smp::exported {

/// The state and options that a program runs with.
struct Environment {
  std::string file;                       ///< the program's name in errors
  at::DeviceType exported_on = at::kCPU;  ///< the program's device
  at::Device device = at::kCPU;           ///< stands for it
  graph::RunningModule root;  ///< the program's module: `parameter` and its name, if it has one
  /// Makes an object that keeps autocast in force as long as it lives.
  std::function<std::shared_ptr<void>(at::ScalarType, at::DeviceType, bool enabled)> autocast;
};

/// One run of a function: its values, as far as they are there.
struct Frame {
  const Function& function;
  const Environment& environment;
  std::vector<c10::IValue> values;  ///< values by slot
};

/// An argument's value in a run.
c10::IValue value_of(const Argument& argument, const Frame& frame);

/// Throws a `CheckpointError` that names file, function and node: "exported program "m.pt2": node
/// "relu_1" (torch.ops.aten.relu.default) ...".
[[noreturn]] void refuse(const std::string& file, const Node& node, const std::string& what,
                         const std::string& remedy);

/// Actions for operators of libtorch's dispatcher, for Python's arithmetic on sizes, and for
/// higher-order nodes, which run a function; null where the target is none of those. Each throws
/// `CheckpointError` for arguments that its target does not take.
Action operator_action(const std::string& file, const Node& node, const Function& function);
Action number_action(const std::string& file, const Node& node, const Function& function);
Action region_action(const std::string& file, const Node& node, const Function& function);

/// Gives all nodes of a function their actions, those of functions that they call included. Throws
/// `CheckpointError` for an unknown target, which it names.
void bind_actions(const std::string& file, Function& function);

/// Runs a function whose actions are bound; returns its results.
std::vector<c10::IValue> run_function(const Function& function, std::vector<c10::IValue> inputs,
                                      const Environment& environment);

}  // namespace smp::exported
