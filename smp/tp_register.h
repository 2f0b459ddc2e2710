// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/ivalue.h>
#include <c10/util/ArrayRef.h>

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "smp/export.h"
#include "smp/nn/layout.h"

namespace smp {

namespace nn::rewrite {
class Call;
}  // namespace nn::rewrite

/// How an operator runs on the parts that a rank has.
struct TpTreatment {
  std::vector<nn::Layout> arguments;  ///< how it needs each tensor argument
  std::vector<nn::Layout> results;    ///< how each result then lies
  /// Arguments that name sizes of the whole, by name: their values on a rank.
  std::map<std::string, c10::IValue> constants;
};

/// A call of an operator, and how its arguments lie on the ranks at present: a rule decides by it.
/// Belongs to the call of the rule.
class SMP_API TpCall {
 public:
  explicit TpCall(const nn::rewrite::Call& call) : call_(call) {}

  /// "ns::name": without overload, and without the underscore of an operator that works in place.
  const std::string& name() const;
  /// The size of the tensor-parallel group.
  int ranks() const;
  /// The defined tensors among the arguments are numbered in their order, lists taken apart.
  int num_tensors() const;
  int num_results() const;
  /// Sizes of the whole.
  c10::IntArrayRef sizes(int tensor) const;
  c10::IntArrayRef result_sizes(int result = 0) const;
  const nn::Layout& layout(int tensor) const;
  /// The number of the tensor argument of that name; -1: undefined or none.
  int position(const char* argument) const;
  /// An argument that is no tensor; None if there is none of that name.
  c10::IValue constant(const char* argument) const;

 private:
  const nn::rewrite::Call& call_;
};

/// Says how an operator runs on parts. A value; copies share their content.
class SMP_API TpRule {
 public:
  /// Given how the arguments lie, says how the operator is run; nothing if it needs them whole. It
  /// is asked when an argument is divided or a partial sum, must depend on the call alone, and
  /// promises, for the layouts that it returns:
  ///  - on each rank's part of the arguments (a whole or shared one is there as it is) the operator
  ///    computes that rank's part of the results (for `partial`: terms whose sum is the result);
  ///  - its gradients, likewise, are those of the layouts (`nn::Layout::Kind` says which).
  using Decide = std::function<std::optional<TpTreatment>(const TpCall& call)>;

  explicit TpRule(Decide decide);

  /// Each element of the results follows from one element of each argument, after broadcasting: the
  /// rule of `mul`, `gelu` or `where`.
  static TpRule elementwise();
  /// The first argument is worked on along its last `count` dimensions, the others hold numbers for
  /// these (weights, biases): the rule of `layer_norm`.
  static TpRule along_last(int count);
  /// The dimensions that the constant `argument` names (all, if it is None) are worked along, and
  /// stay (or stay with size 1) unless `keepdim` or the result's sizes say otherwise: the rule of
  /// `softmax` and `sum`.
  static TpRule along_dims(std::string argument);

 private:
  class Impl;
  explicit TpRule(std::shared_ptr<const Impl> impl);
  std::shared_ptr<const Impl> impl_;

  friend void tp_register(const std::string& operator_name, const TpRule& rule);
};

/// Says how an operator of your own runs on the parts of tensors that the ranks of a
/// tensor-parallel group have: "ns::name", for all its overloads, or "ns::name.overload". To be
/// called on every rank before the first step; it comes before the rules of this library. Without a
/// rule an operator gets whole tensors. In place of SMP's `smp.tp_register`, which replaces
/// modules.
///
/// Example:
/// \code
///   smp::tp_register("my::swish", smp::TpRule::elementwise());
/// \endcode
SMP_API void tp_register(const std::string& operator_name, const TpRule& rule);

}  // namespace smp
