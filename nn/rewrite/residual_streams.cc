// SPDX-License-Identifier: Apache-2.0
#include "nn/rewrite/residual_streams.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <optional>
#include <set>
#include <utility>

namespace smp::nn::rewrite {
namespace {

using graph::Graph;
using graph::Value;
using graph::ValueId;

class ResidualStreamChooser {
 public:
  ResidualStreamChooser(Propagation& propagation, const Constraints& constraints,
                        const DivideOptions& options)
      : propagation_(propagation), graph_(propagation.graph()), options_(options) {
    best_ = {constraints, propagation.run(constraints)};
    considered_.resize(graph_.values.size());
  }

  ResidualStreams run() {
    for (ValueId seed : seeds()) {
      if (considered_[seed] == 0 && best_.outcome.in_stream[seed] == 0) consider(seed);
    }
    return {std::move(best_.outcome), std::move(decisions_)};
  }

 private:
  const Call& call(size_t index) const { return propagation_.calls()[index]; }

  double cost_of(const Outcome& outcome) const {
    return outcome.us + static_cast<double>(outcome.kept_bytes) * options_.activation_us_per_byte;
  }

  /// Values that could be divided for their own sake, in program order: sums over the ranks that
  /// are made whole, and inputs that products with divided weights read whole. (For a value without
  /// gradient every rank has the input that it is made of.)
  std::vector<ValueId> seeds() const {
    std::vector<ValueId> found;
    std::set<ValueId> seen;
    const auto add = [&](ValueId value) {
      const Value& own = graph_.values[value];
      const bool counts = !graph_.trains() || propagation_.requires_grad_at_end(value);
      const bool fits = own.producer >= 0 && own.meta.sizes.size() >= 2 && counts &&
                        c10::isFloatingType(own.meta.dtype) && !comes_from_parameter(graph_, value);
      if (fits && seen.insert(value).second) found.push_back(value);
    };
    for (size_t i = 0; i < graph_.operators.size(); ++i) {
      const Treatment& treatment = *best_.outcome.treatments[i];
      const bool multiplies = is_product(call(i).base_name());
      for (size_t p = 0; p < call(i).tensors().size(); ++p) {
        const ValueId value = call(i).tensors()[p];
        const Layout& wanted = treatment.arguments[p];
        const bool is_all = wanted.is_whole() || wanted == Layout::shared();
        const bool is_sum = best_.outcome.layouts[value].is_partial() && is_all;
        const bool is_read = multiplies && works_on_parts(treatment) && is_all;
        if (is_sum || is_read) add(value);
      }
      if (multiplies && treatment.reduced_bytes > 0) add(call(i).results()[0]);
    }
    return found;
  }

  void consider(ValueId seed) {
    const auto& sizes = graph_.values[seed].meta.sizes;
    std::optional<Try> cheapest;
    bool can_be_divided = false, joins_parameters = false;
    int best_dim = -1;
    for (int dim = 0; dim + 1 < static_cast<int>(sizes.size()); ++dim) {
      if (!can_divide(sizes, dim, 1, options_.ranks)) continue;
      can_be_divided = true;
      std::optional<Try> grown = grow(seed, Layout::divided(dim));
      if (!grown) continue;
      for (size_t v = 0; v < considered_.size(); ++v) {
        considered_[v] = static_cast<char>(considered_[v] | grown->outcome.in_stream[v]);
      }
      if (grown->outcome.joined_parameters > best_.outcome.joined_parameters) {
        joins_parameters = true;
        continue;
      }
      const double bound = cheapest ? cost_of(cheapest->outcome) * (1 - kTie)
                                    : std::numeric_limits<double>::infinity();
      if (cost_of(grown->outcome) >= bound) continue;
      cheapest = std::move(grown);
      best_dim = dim;
    }
    if (cheapest && cost_of(cheapest->outcome) < cost_of(best_.outcome) * (1 - kTie)) {
      const auto [first, last] = ends_of(*cheapest);
      note(seed, first, last, best_dim, std::nullopt);
      best_ = std::move(*cheapest);
      return;
    }
    std::string reason = "the operators around it work on whole values";
    if (!can_be_divided) {
      reason =
          c10::str("no dimension before its last can be divided among ", options_.ranks, " ranks");
    } else if (cheapest) {
      reason = too_dear(cheapest->outcome);
    } else if (joins_parameters) {
      reason = "in parts, divided parameters would have to be joined for each microbatch";
    }
    note(seed, seed, seed, -1, reason);
  }

  std::string too_dear(const Outcome& outcome) const {
    return c10::str("in parts, a microbatch is predicted to take ",
                    static_cast<int64_t>(outcome.us), " us instead of ",
                    static_cast<int64_t>(best_.outcome.us), ", and a rank to keep ",
                    outcome.kept_bytes, " B of it instead of ", best_.outcome.kept_bytes);
  }

  /// Divides a value and all that meets it, element for element; nothing if no operator can make it
  /// so.
  std::optional<Try> grow(ValueId seed, const Layout& layout) {
    Try made = {best_.constraints, {}};
    propagation_.recall(best_.outcome);
    visited_.clear();
    constrain_origins(seed, layout, best_.outcome, made.constraints, 0);
    if (made.constraints.size() == best_.constraints.size()) return std::nullopt;
    for (size_t before = best_.constraints.size(); made.constraints.size() > before;) {
      before = made.constraints.size();
      made.outcome = propagation_.run(made.constraints);
      propagation_.recall(made.outcome);
      visited_.clear();
      for (const Wish& wish : made.outcome.wishes) {
        if (!wish.by_stream || !wish.layout.is_divided()) continue;
        constrain_origins(wish.value, wish.layout, made.outcome, made.constraints, 0);
      }
    }
    return made;
  }

  /// Constrains the values that an activation is made of, element for element, where they come
  /// from: from a sum over the ranks, from a value that is divided otherwise, or from an operator
  /// that needs its arguments whole. False: no operator can make it so.
  bool constrain_origins(ValueId value, const Layout& layout, const Outcome& outcome,
                         Constraints& constraints, int depth) {
    const Value& made = graph_.values[value];
    if (made.producer < 0 || comes_from_parameter(graph_, value)) return false;
    const Layout& home = outcome.layouts[value];
    if (constraints.count(value) > 0 || home == layout) return true;
    if (!visited_.insert(value).second) return false;
    const bool begins = !home.is_whole() || outcome.treatments[made.producer]->reduced_bytes > 0;
    const bool can_begin = can_be_brought(value, layout);
    bool constrained = false;
    if (!(begins && can_begin) && depth < kReach) {
      for (const auto& [argument, own] : origins(value, layout)) {
        constrained |= constrain_origins(argument, own, outcome, constraints, depth + 1);
      }
    }
    if (constrained || !can_begin) return constrained;
    constraints[value] = layout;
    return true;
  }

  /// The arguments of which the value has all elements, as they must be divided for it to be.
  std::vector<std::pair<ValueId, Layout>> origins(ValueId value, const Layout& layout) {
    std::vector<std::pair<ValueId, Layout>> found;
    const Value& made = graph_.values[value];
    const Call& made_by = call(made.producer);
    for (size_t p = 0; p < made_by.tensors().size(); ++p) {
      const ValueId argument = made_by.tensors()[p];
      const Value& own = graph_.values[argument];
      if (own.producer < 0 || own.meta.numel() != made.meta.numel() ||
          comes_from_parameter(graph_, argument)) {
        continue;
      }
      for (const Layout& option : options_of(own.meta.sizes, layout, made.meta.sizes)) {
        const auto result = propagation_.carried(made.producer, static_cast<int>(p), option, value);
        if (!result || *result != layout) continue;
        found.emplace_back(argument, option);
        break;
      }
    }
    return found;
  }

  /// How an argument may be divided for a result to be divided so: in the same way, as a view of
  /// it, or along any dimension.
  std::vector<Layout> options_of(c10::IntArrayRef sizes, const Layout& layout,
                                 c10::IntArrayRef of_result) const {
    std::vector<Layout> options;
    if (sizes == of_result) options.push_back(layout);
    if (const auto view = through_view(of_result, layout, sizes, options_.ranks)) {
      options.push_back(*view);
    }
    for (int dim = 0; dim < static_cast<int>(sizes.size()); ++dim) {
      options.push_back(layout.along(dim));
    }
    const auto fits = [&](const Layout& option) {
      return can_divide(sizes, option.dim, option.blocks, options_.ranks);
    };
    options.erase(std::remove_if(options.begin(), options.end(), std::not_fn(fits)), options.end());
    return options;
  }

  /// Parts can be made of it where it is made: it lies on a storage of its own.
  bool can_be_brought(ValueId value, const Layout& layout) const {
    const Value& made = graph_.values[value];
    const Call& made_by = call(made.producer);
    if (!can_divide(made.meta.sizes, layout.dim, layout.blocks, options_.ranks) ||
        !made_by.op().writes.empty()) {
      return false;
    }
    if (propagation_.needs_strides(made.alias_set)) return false;
    const auto& tensors = made_by.tensors();
    return std::none_of(tensors.begin(), tensors.end(), [&](ValueId argument) {
      return graph_.values[argument].alias_set == made.alias_set;
    });
  }

  const std::string& scope_of(ValueId value) const {
    return graph_.operators[graph_.values[value].producer].scope;
  }

  /// The values of the constraints that a try adds which come first and last in the program.
  std::pair<ValueId, ValueId> ends_of(const Try& made) const {
    std::set<std::pair<int, ValueId>> added;
    for (const auto& [value, layout] : made.constraints) {
      if (best_.constraints.count(value) == 0) added.emplace(graph_.values[value].producer, value);
    }
    return {added.begin()->second, added.rbegin()->second};
  }

  /// Notes what was decided of a value, together with the one before if that is alike.
  void note(ValueId seed, ValueId first, ValueId last, int dim, core::Refusal why_whole) {
    const auto& sizes = graph_.values[seed].meta.sizes;
    ResidualStreamDecision decision{
        scope_of(first),     scope_of(last), 1, {sizes.begin(), sizes.end()}, dim,
        std::move(why_whole)};
    if (!decisions_.empty()) {
      ResidualStreamDecision& before = decisions_.back();
      if (before.sizes == decision.sizes && before.dim == decision.dim &&
          before.why_whole == decision.why_whole) {
        before.last = decision.last;
        ++before.alike;
        return;
      }
    }
    decisions_.push_back(std::move(decision));
  }

  Propagation& propagation_;
  const Graph& graph_;
  const DivideOptions& options_;
  Try best_;
  std::vector<char> considered_;  // whether each value was tried in parts
  std::set<ValueId> visited_;
  std::vector<ResidualStreamDecision> decisions_;
};

}  // namespace

ResidualStreams choose_residual_streams(Propagation& propagation, const Constraints& constraints,
                                        const DivideOptions& options) {
  return ResidualStreamChooser(propagation, constraints, options).run();
}

}  // namespace smp::nn::rewrite
