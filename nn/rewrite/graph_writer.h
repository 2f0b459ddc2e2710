// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <set>
#include <string>
#include <vector>

#include "nn/rewrite/conversion.h"
#include "nn/rewrite/emitter.h"
#include "nn/rewrite/propagate.h"
#include "nn/rewrite/shape_run.h"

namespace smp::nn::rewrite {

/// Writes operators and values of the divided graph: those that rules emit, and those that turn one
/// layout into another. A derived class sets `call_` and `treatment_`, for which the written
/// operators stand.
class GraphWriter : public Emitter {
 public:
  graph::ValueId call_with(const char* name, const char* overload,
                           std::vector<graph::Argument> arguments) override;
  graph::ValueId call_own(const char* name, const Tensors& tensors, const Constants& constants,
                          c10::IntArrayRef sizes, at::ScalarType dtype) override;
  graph::ValueId reduce(graph::ValueId value) override;
  graph::ValueId reduce_scatter(graph::ValueId value, int dim) override;
  const graph::TensorMeta& meta(graph::ValueId value) const override {
    return result_.graph.values[value].meta;
  }
  void follow(const char* from, int to,
              std::function<c10::IValue(const c10::IValue&)> change) override;
  void require(const char* from) override;

 protected:
  GraphWriter(const Propagation& propagation, const DivideOptions& options)
      : propagation_(propagation), whole_(propagation.graph()), options_(options) {}

  graph::Graph& graph() { return result_.graph; }

  graph::ValueId add_value(graph::Value value, const graph::TensorMeta& meta, int producer,
                           int alias_set);
  /// Notes how a value of the divided graph lies.
  void place(graph::ValueId value, const Layout& layout);
  /// Finds out how the values lie of which nothing was noted: those between the operators that a
  /// rule writes. To be called at the end.
  void place_the_rest();
  /// Adds an operator whose results follow from its arguments.
  std::vector<graph::ValueId> add_on_shapes(graph::Operator op);
  /// Adds an operator with results of these shapes, in these alias sets.
  std::vector<graph::ValueId> append(graph::Operator op, const std::vector<ShapeResult>& results,
                                     const std::vector<int>& sets);
  /// An operator in the place of the call.
  graph::Operator like_call(c10::OperatorHandle handle) const;
  /// Notes the storages that an operator writes, by its schema.
  void note_writes(graph::Operator& op) const;
  void count(const std::string& scope, const Traffic& moved);

  /// The gradients of a value where it is read.
  struct Gradient {
    bool required;  ///< it requires grad
    bool sent;      ///< and its reader sends one back
  };
  /// Adds the operators that turn `from`, which stands for a value of the whole graph, into another
  /// layout.
  graph::ValueId convert(graph::ValueId value, const Conversion& step, graph::ValueId from,
                         Gradient gradient);

  const Propagation& propagation_;
  const graph::Graph& whole_;
  const DivideOptions& options_;
  DividedGraph result_;
  std::vector<char> placed_;                // whether it was noted how each value lies
  std::set<graph::ValueId> requires_grad_;  // in the divided graph, though made without
  const Call* call_ = nullptr;              // null: at the end
  const Treatment* treatment_ = nullptr;

 private:
  const graph::Operator* reader() const { return call_ == nullptr ? nullptr : &call_->op(); }
  std::vector<graph::GraphMap::Number>& places_of(const char* number);
  std::vector<ShapeResult> shapes_of(graph::Operator& op) const;
  void set_reads_parameter(graph::Operator& op) const;
  bool any_requires_grad(const graph::Operator& op) const;
  graph::ValueId add_own(graph::Operator op, const graph::TensorMeta& meta, const Traffic& moved);
  graph::ValueId add_sum(graph::ValueId terms, const Layout& to, Collective collective);
  bool is_written_later(graph::ValueId value) const;
  graph::ValueId add_clone(graph::ValueId value, graph::ValueId from, Gradient gradient);
  graph::ValueId add_conversion(graph::Operator op, const graph::TensorMeta& meta, int alias_set,
                                int64_t output_bytes);
};

/// The same tensor with other sizes, contiguous.
graph::TensorMeta contiguous(graph::TensorMeta meta, c10::IntArrayRef sizes);

}  // namespace smp::nn::rewrite
