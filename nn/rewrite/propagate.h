// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <memory>
#include <set>
#include <vector>

#include "graph/requires_grad.h"
#include "nn/rewrite/conversion.h"
#include "nn/rewrite/rule.h"
#include "nn/rewrite/saved_for_backward.h"

namespace smp::nn::rewrite {

/// An operator that had to have a divided value whole.
struct Obstacle {
  int operator_index;
  int64_t parts;  ///< see `Treatment::obstacle_parts`
};

/// A value that costs communication because it is not divided so.
struct Wish {
  graph::ValueId value;
  Layout layout;
  bool by_stream;  ///< it meets a value of one
};

/// How a graph runs with some parameters divided.
struct Outcome {
  double us = 0;  ///< predicted time of a microbatch, with the costs of parameters' memory
  /// Bytes of activations that a rank keeps of a microbatch until its backward pass: predicted.
  int64_t kept_bytes = 0;
  std::vector<std::shared_ptr<const Treatment>> treatments;  ///< treatment of each operator
  std::vector<Layout> layouts;  ///< layout of each value, as it is where it was made
  std::vector<char> in_stream;  ///< see `Layouts`
  std::vector<Wish> wishes;
  std::vector<Obstacle> obstacles;
  int joined_parameters = 0;  ///< how often a divided parameter has to be made whole
};

/// Constraints that are tried, and how the graph runs with them.
struct Try {
  Constraints constraints;
  Outcome outcome;
};

/// A prediction that is not better by this fraction is a tie.
constexpr double kTie = 1e-9;
/// How far a search follows the values of the graph.
constexpr int kReach = 12;

/// Finds out, operator by operator in program order, how a graph runs with some parameters divided.
/// A run goes on from the one before: it treats anew those operators only that other constraints,
/// or values that lie otherwise for them, concern.
class Propagation {
 public:
  Propagation(const graph::Graph& graph, const DivideOptions& options);

  Outcome run(const Constraints& constraints);
  /// From here on, with `DivideOptions::residual_streams`: whether operators on whole activations
  /// that could work on parts of them count the time of parts. So weights are divided as is best
  /// when activations between them are divided, too.
  void expect_residual_streams(bool on) {
    expects_residual_streams_ = on && options_.residual_streams;
    has_run_ = false;
  }

  /// How a result of an operator would be divided if the argument at that position were divided so,
  /// as a stream, and all others were as in the outcome last given to `recall`; nothing if the
  /// operator could not follow.
  std::optional<Layout> carried(size_t operator_index, int position, const Layout& layout,
                                graph::ValueId result);
  void recall(const Outcome& outcome);

  const graph::Graph& graph() const { return graph_; }
  const std::vector<Call>& calls() const { return calls_; }
  const std::vector<std::vector<int>>& users() const { return layouts_.users; }
  /// A parameter that may be divided where nothing is said about it.
  bool is_allowed(graph::ValueId value) const;
  bool requires_grad_at_end(graph::ValueId value) const {
    return layouts_.requires_grad_since[value] != graph::RequiresGrad::kNever;
  }
  /// True if an operator after that one writes a storage.
  bool is_written_after(int alias_set, size_t operator_index) const {
    return last_writes_[alias_set] > static_cast<int>(operator_index);
  }

  /// True of a storage that is written and was not made contiguous: views of contiguous parts, such
  /// as streams, may be copies that a write does not reach.
  bool needs_strides(int alias_set) const {
    if (alias_set < 0 || last_writes_[alias_set] < 0) return false;
    return !is_contiguous(graph_.values[alias_sets_[alias_set].front()].meta);
  }

 private:
  /// How an operator runs, without the conversions of its arguments and results.
  struct Step {
    std::shared_ptr<const Treatment> treatment;
    double us = 0;
    bool meets_stream = false;
    bool joins = false;  ///< it needs a divided argument whole
  };
  /// A value's costs: its conversions, the memory of a parameter, and the bytes of it that are
  /// kept.
  struct ValueCost {
    double us = 0;
    int64_t kept_bytes = 0;
    int joined_parameters = 0;
  };
  class ValueWalk;

  void note_operators();
  void note_values();
  void note_events();
  void note_all();
  void note_changes(const Constraints& constraints);
  bool treat_noted();
  bool renew(size_t index);
  void enter(const Call& call);
  Layout layout_at_start(graph::ValueId value) const;
  bool decides(const Call& call, graph::ValueId value) const;
  Treatment treat(size_t index);
  Treatment treat_as_captured(size_t index);
  bool respects_writes(const Call& call, const Treatment& treatment);
  bool cuts_views(const Call& call, const Treatment& treatment) const;
  bool is_read_after(const Call& call, graph::ValueId written) const;
  Step settle(const Call& call, Treatment treatment);
  void settle_result(const Call& call, const Treatment& treatment, size_t r, bool in_stream);
  double time_of(const Call& call, const Treatment& treatment) const;
  int64_t mask_bytes(const Call& call, const Treatment& treatment) const;
  ValueCost cost_of(graph::ValueId value) const;
  Outcome outcome() const;

  const graph::Graph& graph_;
  const DivideOptions& options_;
  Layouts layouts_;
  std::vector<Call> calls_;
  std::vector<Rule> rules_;
  std::vector<double> times_;                            // times of operators, undivided
  std::vector<SavedForBackward> kept_;                   // tensors that operators keep
  std::vector<char> is_activation_;                      // whether each value is one
  std::vector<char> may_be_in_stream_;                   // whether each result may be
  std::vector<char> comes_from_parameter_;               // whether each value does
  std::vector<std::vector<graph::ValueId>> alias_sets_;  // their values
  std::vector<bool> lasting_;                            // sets that outlive the microbatch
  std::vector<int> last_writes_;                         // last writer of each set, or -1
  std::vector<std::vector<int>> events_;  // operators that read each value, or write its storage
  const Constraints no_constraints_;
  bool expects_residual_streams_ = false;

  // The last run.
  bool has_run_ = false;
  Constraints constraints_;
  std::vector<Step> steps_;
  std::vector<ValueCost> costs_;
  std::vector<char> is_noted_;  // whether each operator is to be treated anew
  std::vector<char> is_stale_;  // whether the cost of each value is
  std::vector<Layout> of_;      // while another outcome is recalled
  std::vector<char> in_stream_;
  bool recalls_ = false;
};

}  // namespace smp::nn::rewrite
