// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "nn/rewrite/call.h"

namespace smp::nn::rewrite {

/// Makes the operators of the divided graph that stand for one of the whole graph. They run in its
/// mode and scope, and share its cost; random ones draw from its stream.
class Emitter {
 public:
  virtual ~Emitter() = default;

  /// The tensor argument at a position of the call, in the layout that the treatment asks for.
  virtual graph::ValueId argument(int position) = 0;
  /// Adds an operator; the form of its result follows from its arguments. Returns the result.
  virtual graph::ValueId call(const char* name, const char* overload,
                              std::vector<graph::Argument> arguments) = 0;
  /// The same for an operator of ours, whose result is contiguous.
  virtual graph::ValueId call(const char* name, std::vector<graph::Argument> arguments,
                              c10::IntArrayRef sizes, at::ScalarType dtype) = 0;
  /// The sum over the ranks of a value of the divided graph.
  virtual graph::ValueId reduce(graph::ValueId value) = 0;
  /// Each rank's part of that sum, along a dimension.
  virtual graph::ValueId reduce_scatter(graph::ValueId value, int dim) = 0;
  virtual const graph::TensorMeta& meta(graph::ValueId value) const = 0;

  /// A number that the step function may change from step to step: argument `from` of the call is
  /// argument `to` of the operator added last, after `change` (null: as it is).
  virtual void follow(const char* from, int to,
                      std::function<c10::IValue(const c10::IValue&)> change = nullptr) = 0;
  /// Such a number that this form of the operator needs as it is.
  virtual void require(const char* from) = 0;

  /// A value in another type; itself if it has that.
  graph::ValueId converted(graph::ValueId value, at::ScalarType type);
  /// The same of a value that is kept: `widened` of the result returns it.
  graph::ValueId rounded(graph::ValueId value, at::ScalarType type);
  /// Half precision in float32: as it was before it was rounded, if `rounded` did that. Other types
  /// as they are.
  graph::ValueId widened(graph::ValueId value);

  static graph::Argument tensor(graph::ValueId value);
  static graph::Argument constant(c10::IValue value);

 private:
  std::map<graph::ValueId, graph::ValueId> wide_;  // the float32 value of each rounded one
};

}  // namespace smp::nn::rewrite
