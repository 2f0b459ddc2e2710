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
  using Tensors = std::vector<graph::ValueId>;
  using Constants = std::vector<c10::IValue>;

  virtual ~Emitter() = default;

  /// The tensor argument at a position of the call, in the layout that the treatment asks for.
  virtual graph::ValueId argument(int position) = 0;
  /// The same where `Call::position` may have found none.
  graph::ValueId argument_or_none(int position) {
    return position < 0 ? graph::kUndefined : argument(position);
  }
  /// Adds an operator; the form of its result follows from its arguments. Returns the result.
  virtual graph::ValueId call_with(const char* name, const char* overload,
                                   std::vector<graph::Argument> arguments) = 0;
  /// The same for one that takes tensors (`kUndefined`: none), then constants.
  graph::ValueId call(const char* name, const char* overload, const Tensors& tensors,
                      const Constants& constants = {}) {
    return call_with(name, overload, arguments_of(tensors, constants));
  }
  /// The same for an operator of ours, whose result is contiguous.
  virtual graph::ValueId call_own(const char* name, const Tensors& tensors,
                                  const Constants& constants, c10::IntArrayRef sizes,
                                  at::ScalarType dtype) = 0;
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
  static std::vector<graph::Argument> arguments_of(const Tensors& tensors,
                                                   const Constants& constants);

 private:
  std::map<graph::ValueId, graph::ValueId> wide_;  // the float32 value of each rounded one
};

}  // namespace smp::nn::rewrite
