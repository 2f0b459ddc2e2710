// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <limits>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "graph/graph.h"
#include "nn/rewrite/attention_form.h"
#include "nn/rewrite/layout.h"

namespace smp::nn::rewrite {

class Emitter;
class Call;
struct Treatment;

/// Layouts that are given, by value: that of a parameter, divided or whole, and that to which the
/// result of an operator is brought where it is made.
using Constraints = std::map<graph::ValueId, Layout>;

/// The layouts of a graph's values, as far as they are known.
struct Layouts {
  std::vector<Layout> of;  ///< layout of each value
  bool are_local = false;  ///< the graph is divided: sizes and numbers in it are a rank's
  /// The parts are microbatches: all numbers but sizes are the same for all of them at once, and
  /// random operators may draw others for these.
  bool of_microbatches = false;
  /// Whether each value is of a residual stream: an activation that is divided because a constraint
  /// says so, or because its sources are, element for element.
  std::vector<char> in_stream;
  const Constraints* constraints = nullptr;
  /// Storages that are written so that they must not be divided, whatever a constraint says.
  std::set<int> whole_sets;
  std::vector<char> free;  ///< a parameter that the first operator to need it may divide
  /// The operators that read each value, ascending; at last `kAtEnd` if it is returned or
  /// differentiated.
  std::vector<std::vector<int>> users;
  static constexpr int kAtEnd = std::numeric_limits<int>::max();
  /// The operator after which each value requires grad, see `graph::RequiresGrad::since`. That is
  /// later than it was made if something that requires grad is written into a view of it.
  std::vector<int> requires_grad_since;
};

/// How an operator is run on the parts that a rank has.
struct Treatment {
  /// Makes the operators that stand for the call, and returns the values that stand for its results
  /// (as many, `kUndefined` where they are).
  using Emit = std::vector<graph::ValueId> (*)(Emitter&, const Call&, const Treatment&);

  /// An argument that costs communication because it is not divided as the others are.
  struct Wish {
    int position;   ///< among the tensors
    Layout layout;  ///< in which it would cost nothing
  };

  /// The form in which the operator needs each tensor argument (as `Call::tensors` numbers them).
  std::vector<Layout> arguments;
  /// The form of each defined result (as `Call::results` numbers them).
  std::vector<Layout> results;
  /// Constants that name sizes, by position in the schema: their values on a rank.
  std::vector<std::pair<int, c10::IValue>> constants;
  /// Null: the same operator on the local arguments.
  Emit emit = nullptr;
  /// `emit` writes the same values as the operator: without this it must not stand for one that
  /// writes.
  bool emit_writes = false;
  /// The pass tries to divide the makers of these.
  std::vector<Wish> wishes;
  /// The bytes that are summed over the ranks inside `emit` in the forward, to parts if the result
  /// is divided.
  int64_t reduced_bytes = 0;
  /// The argument whose parts `emit` gathers, again in the backward pass; -1: none.
  int gathered = -1;
  /// Parameters that it needs in parts are cut, not divided for good: for a stream's sake, which
  /// may be divided otherwise in later graphs.
  bool cuts_parameters = false;
  /// The number of parts into which a view that needs a divided argument whole could divide it;
  /// else 0.
  int64_t obstacle_parts = 0;
};

/// True if elements lie in memory in their order, without gaps.
bool is_contiguous(const graph::TensorMeta& meta);

/// True if the ranks share the work: an argument or a result is divided or partial.
bool works_on_parts(const Treatment& treatment);

/// One operator of the whole graph, and how its arguments lie on the ranks at present. Rules decide
/// by it.
class Call {
 public:
  Call(const graph::Graph& graph, size_t index, int ranks, const Layouts& layouts,
       const AttentionForm& form = {}, bool is_residual_sum = false);

  const graph::Graph& graph() const { return graph_; }
  const graph::Operator& op() const { return graph_.operators[index_]; }
  size_t index() const { return index_; }
  int ranks() const { return ranks_; }
  /// How it is computed, if it is attention.
  const AttentionForm& attention_form() const { return form_; }
  /// Whether it is a residual sum that is kept in float32 (`residual_sums`).
  bool is_residual_sum() const { return is_residual_sum_; }
  /// "aten::linear": without overload, and without the underscore of one that works in place.
  const std::string& base_name() const { return base_name_; }
  bool in_place() const { return in_place_; }

  /// The defined tensors among the arguments in their order, lists taken apart; and the results.
  const std::vector<graph::ValueId>& tensors() const { return tensors_; }
  const std::vector<graph::ValueId>& results() const { return results_; }
  const graph::TensorMeta& meta(int position) const {
    return graph_.values[tensors_[position]].meta;
  }
  const graph::TensorMeta& result_meta(int index = 0) const {
    return graph_.values[results_[index]].meta;
  }
  int dim(int position) const { return static_cast<int>(meta(position).sizes.size()); }

  /// The position among `tensors` of the schema's argument of that name; -1: undefined or none.
  int position(const char* argument) const;
  /// The position of the argument in the schema; -1: none.
  int argument(const char* name) const;
  /// A constant argument; None if there is none of that name.
  c10::IValue constant(const char* name) const;
  /// The integers of a constant: of a number one, of None nothing.
  std::optional<std::vector<int64_t>> integers(const char* name) const;
  bool is_set(const char* name) const;
  /// A dimension counted from the front of the first tensor.
  std::optional<int> dimension(const char* name) const;

  const Layout& layout(int position) const { return layouts_.of[tensors_[position]]; }
  const Layout& layout_of(graph::ValueId value) const { return layouts_.of[value]; }
  bool divided(int position) const { return layout(position).is_divided(); }
  bool divided_along(int position, int dim) const {
    return divided(position) && layout(position).dim == dim;
  }
  /// The size of a dimension on a rank, while the argument lies as it does.
  int64_t local_size(int position, int dim) const {
    const int64_t size = meta(position).sizes[dim];
    return layouts_.are_local || !divided_along(position, dim) ? size : size / ranks_;
  }
  /// See `Layouts`.
  bool of_microbatches() const { return layouts_.of_microbatches; }
  /// See `Layouts::in_stream`.
  bool in_stream(int position) const { return layouts_.in_stream[tensors_[position]] != 0; }
  /// The layout to which a result will be brought; nothing if it stays as it is made.
  std::optional<Layout> constraint(int index = 0) const;
  /// A parameter that is not used otherwise yet, and that may be divided so.
  bool may_become(int position, const Layout& layout) const;
  /// It is whole and no gradient flows back to it: a part of it costs nothing.
  bool is_free_of_gradient(int position) const;
  /// Whether the argument requires grad when the operator is called.
  bool requires_grad(int position) const {
    return layouts_.requires_grad_since[tensors_[position]] < static_cast<int>(index_);
  }
  /// And this operator sends a gradient back to it.
  bool has_gradient(int position) const {
    return graph_.trains() && op().mode.grad && requires_grad(position);
  }
  /// The same of a result.
  bool result_has_gradient(int index = 0) const {
    return graph_.trains() && op().mode.grad &&
           layouts_.requires_grad_since[results_[index]] <= static_cast<int>(index_);
  }
  /// The first divided argument; -1: none.
  int first_divided() const;
  /// The operators that read the argument, this one among them.
  const std::vector<int>& users(int position) const { return layouts_.users[tensors_[position]]; }
  const std::vector<int>& result_users() const { return layouts_.users[results_[0]]; }

  /// All arguments and results whole.
  Treatment all_whole() const;
  /// All arguments shared, results whole: to be changed by a rule.
  Treatment all_shared() const;

 private:
  const graph::Graph& graph_;
  const size_t index_;
  const int ranks_;
  const Layouts& layouts_;
  const AttentionForm form_;
  const bool is_residual_sum_;
  std::string base_name_;
  bool in_place_ = false;
  std::vector<graph::ValueId> tensors_;
  std::vector<graph::ValueId> results_;
  std::vector<int> first_position_;  // first position of each argument of the schema
};

/// True for float16 and bfloat16.
bool is_half(at::ScalarType type);

/// True for a product of matrices, a convolution or attention ("aten::linear").
bool is_product(const std::string& base_name);

/// True for an operator ("aten::transpose") whose results have the elements of its first argument.
bool is_rearrangement(const std::string& base_name);

/// Names of operators each element of whose results follows from one element of each argument,
/// after broadcasting, and of those whose argument `dim` names the dimensions that they work along.
const std::vector<const char*>& elementwise_operators();
const std::vector<const char*>& operators_along_dim();

/// The dimensions of the first tensor in the order in which the result of `permute`, `transpose`
/// and the like has them; none if the operator is not understood.
std::vector<int> order_of(const Call& call);

/// True for a parameter, and for a value that only rearranges one.
bool comes_from_parameter(const graph::Graph& graph, graph::ValueId value);

}  // namespace smp::nn::rewrite
