// SPDX-License-Identifier: Apache-2.0
#include "partitioner/partition.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>
#include <vector>

#include "core/check.h"
#include "partitioner/complete.h"
#include "partitioner/cost.h"
#include "partitioner/cuts.h"
#include "partitioner/data_flow.h"
#include "partitioner/format.h"
#include "partitioner/gradient_flow.h"
#include "partitioner/recompute.h"
#include "partitioner/split.h"
#include "partitioner/verify.h"
#include "partitioner/weight_casts.h"

namespace smp::partitioner {
namespace {

using graph::Graph;
using graph::kUndefined;
using graph::ValueId;
using graph::ValueKind;

/// Costs are compared as integers, so that equal sums are equal in any order of summation. The
/// time of the whole graph for one microbatch is this many units.
constexpr double kCostUnits = 1e12;

/// The search ends when no split can be better by more than this: far below the precision of costs.
constexpr double kSearchGap = 1e-4;

/// Operators that stay together, numbered in program order.
struct Pieces {
  std::vector<int> of_operator;
  std::vector<int> first_operator;  ///< per piece

  Pieces(const std::vector<bool>& cuts, size_t operators) {
    for (size_t i = 0; i < operators; ++i) {
      if (i == 0 || cuts[i - 1]) first_operator.push_back(static_cast<int>(i));
      of_operator.push_back(count() - 1);
    }
  }

  int count() const { return static_cast<int>(first_operator.size()); }
};

/// A bound on the position of a cut, and the pin it comes from; none: the number of pieces.
struct Bound {
  int position = 0;
  const Pin* from = nullptr;
};

/// Where each cut may lie, given the pins and that every stage needs a piece.
struct Bounds {
  std::vector<Bound> earliest;
  std::vector<Bound> latest;

  Bounds(const Pieces& pieces, const std::vector<Pin>& pins, int stages, int min_length)
      : earliest(stages - 1), latest(stages - 1, Bound{pieces.count()}) {
    for (const Pin& pin : pins) {
      const int piece = pieces.of_operator[pin.operator_index];
      for (int j = pin.stage; j + 1 < stages; ++j) {
        if (piece + 1 > earliest[j].position) earliest[j] = {piece + 1, &pin};
      }
      for (int j = 0; j < pin.stage; ++j) {
        if (piece < latest[j].position) latest[j] = {piece, &pin};
      }
    }
    for (int j = 0; j + 1 < stages; ++j) {
      const Bound before = j > 0 ? earliest[j - 1] : Bound();
      if (before.position + min_length > earliest[j].position) {
        earliest[j] = {before.position + min_length, before.from};
      }
    }
    for (int j = stages - 2; j >= 0; --j) {
      const Bound after = j + 2 < stages ? latest[j + 1] : Bound{pieces.count()};
      if (after.position - min_length < latest[j].position) {
        latest[j] = {after.position - min_length, after.from};
      }
    }
  }

  /// The first cut that no position satisfies, -1 if there is none.
  int conflict() const {
    for (size_t j = 0; j < earliest.size(); ++j) {
      if (earliest[j].position > latest[j].position) return static_cast<int>(j);
    }
    return -1;
  }
};

/// How many modules two operators have in common: "a.b.c" and "a.b.d" two.
int common_depth(const std::string& a, const std::string& b) {
  int depth = 0;
  for (size_t i = 0; i <= a.size() && i <= b.size(); ++i) {
    const bool a_ends = i == a.size() || a[i] == '.';
    const bool b_ends = i == b.size() || b[i] == '.';
    if (a_ends && b_ends && i > 0) ++depth;
    if (i == a.size() || i == b.size() || a[i] != b[i]) break;
  }
  return depth;
}

class Partitioner {
 public:
  Partitioner(const Graph& graph, const PartitionOptions& options)
      : graph_(graph),
        options_(options),
        link_(options.step().costs().slowest()),
        operators_(graph.operators.size()),
        min_length_(options.allow_empty_stages() ? 0 : 1),
        why_illegal_(why_illegal(graph)),
        split_weights_(split_weights(graph)),
        costs_(operator_costs(graph, options.memory_weight())),
        uses_(value_uses(graph)),
        casts_(weight_casts(graph)),
        constraints_(find_constraints(graph, options)) {
    add_leading_default();
    rank_of_stage_ = list_stages(constraints_.pins, options.partitions(), options.placement());
    double total_us = 0;
    for (const graph::Operator& op : graph.operators) total_us += operator_time_us(graph, op);
    units_per_us_ = kCostUnits / (total_us > 0 ? total_us : static_cast<double>(operators_));
  }

  Plan run() const {
    const std::vector<int> stage_of_operator = options_.auto_partition() ? balance() : follow();
    Plan plan = finish(stage_of_operator);
    plan.reason_of_operator = reasons(stage_of_operator);
    verify_plan(graph_, plan);
    if (!options_.auto_partition() || stages() == 1) check_memory(plan);
    return plan;
  }

 private:
  int stages() const { return static_cast<int>(rank_of_stage_.size()); }

  /// Bytes that each rank needs besides those that its stages keep.
  int64_t working() const {
    const StepModel& step = options_.step();
    const int64_t region = graph_.trains() ? step.largest_region() : 0;
    return region + working_bytes(graph_, step);
  }

  Plan finish(const std::vector<int>& stage_of_operator) const {
    Owners fixed = options_.owner();
    fixed.insert(options_.pinned().begin(), options_.pinned().end());
    return complete_plan(graph_, rank_of_stage_, stage_of_operator, fixed);
  }

  // ---- Automatic: balanced stages ----

  std::vector<int> balance() const {
    if (stages() == 1 || (operators_ == 0 && min_length_ == 0)) {
      return std::vector<int>(operators_, 0);
    }
    for (const bool split_weights : {false, true}) {
      const Pieces pieces(usable_cuts(split_weights), operators_);
      const Bounds bounds(pieces, constraints_.pins, stages(), min_length_);
      if (bounds.conflict() >= 0) continue;
      const SplitProblem problem = make_problem(pieces, bounds);
      const auto cuts = split(problem);
      if (!cuts) continue;
      auto stages = stages_of(pieces, keep_previous(problem, pieces, *cuts));
      if (limit() == 0 || most_memory(finish(stages)) <= limit()) return stages;
    }
    return with_least_memory();
  }

  /// Where the search found nothing under the limit: it reckons with bytes of one stage, and of
  /// units that are not those of each plan. Throws unless the plan fits.
  std::vector<int> with_least_memory() const {
    const Pieces pieces(usable_cuts(/*split_weights=*/true), operators_);
    if (pieces.count() < stages() && min_length_ > 0) explain_too_few(pieces.count());
    const Bounds bounds(pieces, constraints_.pins, stages(), min_length_);
    const int cut = bounds.conflict();
    if (cut >= 0) explain_pins(bounds.earliest[cut].from, bounds.latest[cut].from);
    SplitProblem problem = make_problem(pieces, bounds);
    const std::optional<int64_t> least = smallest_memory_limit(problem);
    SMP_INTERNAL_ASSERT(least.has_value(), "no split although all bounds can be kept");
    problem.memory_limit = *least;
    auto stages = stages_of(pieces, *split(problem));
    const int64_t bytes = most_memory(finish(stages));
    if (bytes <= limit()) return stages;
    fail_memory(finish(stages),
                fmt::format("the least limit that would do is {} bytes, with which", bytes));
  }

  std::vector<bool> usable_cuts(bool split_weights) const {
    std::vector<bool> cuts;
    for (size_t i = 0; i < why_illegal_.size(); ++i) {
      cuts.push_back(!why_illegal_[i] && (split_weights || split_weights_[i] == kUndefined));
    }
    return cuts;
  }

  static std::vector<int> stages_of(const Pieces& pieces, const std::vector<int>& cuts) {
    std::vector<int> stages;
    for (int piece : pieces.of_operator) {
      const auto after = std::upper_bound(cuts.begin(), cuts.end(), piece);
      stages.push_back(static_cast<int>(after - cuts.begin()));
    }
    return stages;
  }

  int64_t units(double us) const { return std::llround(us * units_per_us_); }

  SplitProblem make_problem(const Pieces& pieces, const Bounds& bounds) const {
    SplitProblem problem;
    problem.rank_of_stage = rank_of_stage_;
    problem.allow_empty = options_.allow_empty_stages();
    problem.microbatches = options_.step().microbatches();
    problem.gap = kSearchGap;
    if (limit() > 0) {
      problem.memory_limit = std::max(limit() - working(), int64_t{1});
    }
    for (int s = 0; s < stages(); ++s) {
      problem.in_flight.push_back(
          microbatches_in_flight(options_.step(), graph_.trains(), s, stages()));
    }
    for (const Bound& bound : bounds.earliest) problem.earliest.push_back(bound.position);
    for (const Bound& bound : bounds.latest) problem.latest.push_back(bound.position);
    add_costs(problem, pieces);
    add_penalties(problem, pieces);
    add_all_uses(problem, pieces);
    return problem;
  }

  void add_costs(SplitProblem& problem, const Pieces& pieces) const {
    problem.cost.assign(pieces.count(), 0);
    problem.kept.assign(pieces.count(), 0);
    problem.fixed.assign(pieces.count(), 0);
    for (size_t i = 0; i < operators_; ++i) {
      const int piece = pieces.of_operator[i];
      problem.cost[piece] += std::llround(costs_[i] * kCostUnits);
      problem.kept[piece] += graph_.operators[i].cost.saved_bytes;
    }
    for (size_t v = 0; v < graph_.values.size(); ++v) {
      if (graph_.values[v].kind != ValueKind::kParameter || uses_[v].empty()) continue;
      problem.fixed[pieces.of_operator[uses_[v].front()]] +=
          ParameterMemory(graph_, graph_.values[v], options_.step()).total();
    }
    for (const WeightCast& cast : casts_) {
      problem.fixed[pieces.of_operator[cast.operators.front()]] += cast.bytes;
    }
  }

  /// A cut costs more the deeper the modules that it divides. All cuts together cost less than
  /// `tolerance` of a step.
  void add_penalties(SplitProblem& problem, const Pieces& pieces) const {
    std::vector<int> depth(pieces.count(), 0);
    for (int p = 1; p < pieces.count(); ++p) {
      const int first = pieces.first_operator[p];
      depth[p] = common_depth(graph_.operators[first - 1].scope, graph_.operators[first].scope);
    }
    const int deepest = std::max(*std::max_element(depth.begin(), depth.end()), 1);
    const SplitScore balanced{0, std::llround(kCostUnits),
                              std::llround(kCostUnits / options_.partitions()), 0};
    const double dearest = options_.tolerance() *
                           static_cast<double>(balanced.step(problem.microbatches)) /
                           (stages() - 1);
    for (int of_cut : depth) problem.penalty.push_back(std::llround(dearest * of_cut / deepest));
  }

  void add_all_uses(SplitProblem& problem, const Pieces& pieces) const {
    const std::vector<bool> repeatable = repeatable_operators(graph_);
    const GradientFlow gradients(graph_);
    for (size_t v = 0; v < graph_.values.size(); ++v) {
      const auto value = static_cast<ValueId>(v);
      const graph::Value& tensor = graph_.values[v];
      if (tensor.kind == ValueKind::kResult) {
        add_result(problem, pieces, value, repeatable[tensor.producer], gradients);
      } else if (tensor.kind == ValueKind::kParameter && uses_[v].size() > 1) {
        add_replicas(problem, pieces, value);
      }
    }
    for (const WeightCast& cast : casts_) add_cast(problem, pieces, cast);
    for (ValueId value : constraints_.better_local) add_owned(problem, pieces, value);
    PieceUse boundary;  // the messages themselves, whatever is in them
    boundary.cost = units(message_us(link_, graph_.trains()));
    for (boundary.piece = 1; boundary.piece < pieces.count(); ++boundary.piece) {
      boundary.previous = boundary.piece - 1;
      problem.uses.push_back(boundary);
    }
    std::stable_sort(problem.uses.begin(), problem.uses.end(),
                     [](const PieceUse& a, const PieceUse& b) { return a.piece < b.piece; });
  }

  /// A result crosses, with its gradient if a later use gives one, or is made again if that is
  /// cheaper.
  void add_result(SplitProblem& problem, const Pieces& pieces, ValueId value, bool repeatable,
                  const GradientFlow& gradients) const {
    const int producer = graph_.values[value].producer;
    const int64_t bytes = graph_.values[value].meta.nbytes();
    const std::vector<int>& of_gradient = gradients.gradient_uses(value);
    const int last_gradient = of_gradient.empty() ? -1 : of_gradient.front();
    PieceUse use;
    use.kept = graph_.trains() ? bytes : 0;
    use.sent = message_bytes(options_.step(), bytes);
    use.previous = pieces.of_operator[producer];
    for (int index : uses_[value]) {
      use.piece = pieces.of_operator[index];
      if (use.piece == use.previous) continue;
      const bool needs_gradient = last_gradient >= index;
      double us = transfer_us(link_, bytes, needs_gradient);
      if (repeatable) us = std::min(us, graph_.operators[producer].cost.forward_us / 2);
      use.cost = units(us);
      use.fixed = needs_gradient ? use.sent : 0;
      problem.uses.push_back(use);
      use.previous = use.piece;
    }
  }

  void add_replicas(SplitProblem& problem, const Pieces& pieces, ValueId value) const {
    PieceUse use;
    const graph::Value& parameter = graph_.values[value];
    const bool is_trained = graph_.trains() && parameter.meta.requires_grad;
    use.fixed = replica_bytes(graph_, parameter);
    if (is_trained) use.fixed += message_bytes(options_.step(), parameter.meta.nbytes());
    use.previous = pieces.of_operator[uses_[value].front()];
    add_uses(problem, pieces, use, uses_[value]);
  }

  /// Each further stage that reads it makes one of its own.
  static void add_cast(SplitProblem& problem, const Pieces& pieces, const WeightCast& cast) {
    PieceUse use;
    use.fixed = cast.bytes;
    use.previous = pieces.of_operator[cast.operators.front()];
    add_uses(problem, pieces, use, cast.operators);
  }

  void add_owned(SplitProblem& problem, const Pieces& pieces, ValueId value) const {
    PieceUse use;
    use.owner = options_.owner().at(graph_.values[value].name);
    use.foreign = graph_.values[value].meta.nbytes();
    add_uses(problem, pieces, use, uses_[value]);
  }

  /// One for each of the operators that lies in another piece than the one before it.
  static void add_uses(SplitProblem& problem, const Pieces& pieces, PieceUse use,
                       const std::vector<int>& operators) {
    for (int index : operators) {
      use.piece = pieces.of_operator[index];
      if (use.piece == use.previous) continue;
      problem.uses.push_back(use);
      use.previous = use.piece;
    }
  }

  /// The cuts of the previous plan, unless it cannot be kept or the new ones are clearly better.
  std::vector<int> keep_previous(const SplitProblem& problem, const Pieces& pieces,
                                 const std::vector<int>& best) const {
    const Plan* previous = options_.previous().get();
    if (previous == nullptr || previous->rank_of_stage != rank_of_stage_ ||
        previous->stage_of_operator.size() != operators_) {
      return best;
    }
    const std::vector<int>& stage_of = previous->stage_of_operator;
    std::vector<int> cuts;
    for (int stage = 0; stage + 1 < stages(); ++stage) {
      const auto end = std::upper_bound(stage_of.begin(), stage_of.end(), stage);
      const auto index = static_cast<size_t>(end - stage_of.begin());
      cuts.push_back(index == operators_ ? pieces.count() : pieces.of_operator[index]);
    }
    if (stages_of(pieces, cuts) != stage_of) return best;  // one of them is not usable any more
    for (size_t j = 0; j < cuts.size(); ++j) {
      if (cuts[j] < problem.earliest[j] || cuts[j] > problem.latest[j]) return best;
    }
    const SplitScore before = score_split(problem, cuts), now = score_split(problem, best);
    const bool fits = problem.memory_limit == 0 || before.memory <= problem.memory_limit;
    const auto bound = static_cast<double>(now.step(problem.microbatches)) * (1 + options_.keep());
    const bool close = static_cast<double>(before.step(problem.microbatches)) <= bound;
    return fits && close && before.foreign <= now.foreign ? cuts : best;
  }

  // ---- Manual: pinned operators, and the others follow ----

  /// Without automatic partitioning operators before all pins go to the default partition too, if a
  /// legal cut allows it.
  void add_leading_default() {
    if (options_.auto_partition() || operators_ == 0) return;
    std::vector<Pin>& pins = constraints_.pins;
    const int rank = options_.default_partition();
    const int first = pins.empty() ? static_cast<int>(operators_) : pins.front().operator_index;
    if (first == 0 || (!pins.empty() && pins.front().rank == rank)) return;
    if (!pins.empty() && cut_between(0, first) < 0) return;
    pins.insert(pins.begin(), Pin{0, rank, PinSource::kDefault, kUndefined});
  }

  /// The last cut that separates two operators, one that splits no weight if possible: the first
  /// operator after it. -1 if they cannot be separated.
  int cut_between(int first, int last) const {
    for (const bool split_weights : {false, true}) {
      for (int i = last - 1; i >= first; --i) {
        if (!why_illegal_[i] && (split_weights || split_weights_[i] == kUndefined)) {
          return i + 1;
        }
      }
    }
    return -1;
  }

  std::vector<int> follow() const {
    const std::vector<Pin>& pins = constraints_.pins;
    std::vector<int> stage_of_operator(operators_, pins.empty() ? 0 : pins[0].stage);
    for (size_t p = 1; p < pins.size(); ++p) {
      const Pin &before = pins[p - 1], &pin = pins[p];
      if (pin.stage == before.stage) continue;
      const int cut = cut_between(before.operator_index, pin.operator_index);
      if (cut < 0) explain_no_cut(before, pin);
      std::fill(stage_of_operator.begin() + cut, stage_of_operator.end(), pin.stage);
    }
    return stage_of_operator;
  }

  // ---- Errors ----

  /// The illegal cuts between two operators, in words; empty if there are none.
  std::string illegal_between(size_t first, size_t last) const {
    const auto is_illegal = [](const core::Refusal& refusal) { return refusal.has_value(); };
    const auto begin = why_illegal_.begin() + first, end = why_illegal_.begin() + last;
    const auto found = std::find_if(begin, end, is_illegal);
    if (found == end) return "";
    const auto i = found - why_illegal_.begin();
    return fmt::format("{} of the {} cuts between them are illegal, the first of these {}|{}: {}",
                       std::count_if(found, end, is_illegal), last - first, i, i + 1, **found);
  }

  [[noreturn]] void explain_too_few(int possible) const {
    std::string why = illegal_between(0, why_illegal_.size());
    std::string remedy;
    if (!why.empty()) {
      remedy =
          ", or change what keeps operators together: let one that works in place return a new "
          "tensor, or differentiate (autograd::grad) with respect to a later one";
    } else {
      why = "a stage has at least one";
    }
    core::fail<PartitionError>(
        fmt::format("cannot divide {} operators into {} stages: at most {} are possible, since {}. "
                    "Ask for fewer stages (\"partitions\"; of smp_plan --stages){}.",
                    operators_, stages(), possible, why, remedy));
  }

  /// `low` keeps a cut late, `high` keeps it early; either may be null, but not both.
  [[noreturn]] void explain_pins(const Pin* low, const Pin* high) const {
    if (low != nullptr && high != nullptr) {
      if (cut_between(low->operator_index, high->operator_index) < 0) {
        explain_no_cut(*low, *high);
      }
      const std::string illegal = illegal_between(low->operator_index, high->operator_index);
      core::fail<PartitionError>(fmt::format(
          "cannot keep the pins: {}, but {}, and between the two there are too few operators for "
          "the {} stages that come between them{}{}. Pin fewer operators, or ask for fewer "
          "partitions.",
          describe(graph_, *low), describe(graph_, *high), high->stage - low->stage - 1,
          illegal.empty() ? "" : ": ", illegal));
    }
    const bool late = low != nullptr;
    const Pin& pin = late ? *low : *high;
    const int others = late ? stages() - 1 - pin.stage : pin.stage;
    core::fail<PartitionError>(fmt::format(
        "cannot keep the pins: {}, with too few operators {} it for the {} {} partition{}. Pin it "
        "elsewhere, or ask for fewer partitions.",
        describe(graph_, pin), late ? "after" : "before", others, late ? "later" : "earlier",
        others == 1 ? "" : "s"));
  }

  [[noreturn]] void explain_no_cut(const Pin& before, const Pin& after) const {
    const int last = after.operator_index - 1;
    core::fail<PartitionError>(fmt::format(
        "cannot keep the pins: {}, but {}; every cut between them is illegal, the last, {}|{}, "
        "because {}. Pin both to one partition, or replace operators that work in place by ones "
        "that return a new tensor.",
        describe(graph_, before), describe(graph_, after), last, last + 1, *why_illegal_[last]));
  }

  /// Bytes of the rank that needs most.
  int64_t most_memory(const Plan& plan) const {
    const auto memory = predict(graph_, plan, options_.step()).rank_memory;
    return *std::max_element(memory.begin(), memory.end());
  }

  /// Where there is no choice, unlike in `balance`.
  void check_memory(const Plan& plan) const {
    if (limit() > 0 && most_memory(plan) > limit())
      fail_memory(plan, "as the operators are pinned");
  }

  [[noreturn]] void fail_memory(const Plan& plan, const std::string& how) const {
    const Prediction prediction = predict(graph_, plan, options_.step());
    const auto largest =
        std::max_element(prediction.rank_memory.begin(), prediction.rank_memory.end());
    const auto rank = static_cast<int>(largest - prediction.rank_memory.begin());
    core::fail<PartitionError>(fmt::format(
        "no division into {} partitions keeps the memory limit of {} ({} bytes): {}, partition {} "
        "needs {}. Raise \"memory_limit_mb\", use more partitions or smaller microbatches, or "
        "lower "
        "\"active_microbatches\".",
        options_.partitions(), format_bytes(limit()), limit(), how, rank,
        describe_memory(plan, prediction, rank)));
  }

  // ---- Reasons ----

  std::vector<std::string> reasons(const std::vector<int>& stage_of_operator) const {
    std::vector<double> share(stages(), 0);
    double total = 0;
    for (size_t i = 0; i < operators_; ++i) {
      share[stage_of_operator[i]] += costs_[i];
      total += costs_[i];
    }
    std::vector<std::string> result;
    for (size_t i = 0; i < operators_; ++i) {
      result.push_back(with_neighbour(static_cast<int>(i))
                           .value_or(fmt::format("balance: {:.1f}% of cost",
                                                 100 * share[stage_of_operator[i]] / total)));
    }
    for (const Pin& pin : constraints_.pins) result[pin.operator_index] = reason(graph_, pin);
    return result;
  }

  /// Why an operator is with the one before it, if it has to be.
  std::optional<std::string> with_neighbour(int i) const {
    if (i == 0) return std::nullopt;
    if (why_illegal_[i - 1]) {
      return fmt::format("cut {}|{} illegal: {}", i - 1, i, *why_illegal_[i - 1]);
    }
    if (!options_.auto_partition()) return fmt::format("follows operator {}", i - 1);
    const ValueId weight = split_weights_[i - 1];
    if (weight == kUndefined || stages() == 1) return std::nullopt;
    return fmt::format("cut {}|{} would send a view of {}", i - 1, i, graph_.values[weight].name);
  }

  int64_t limit() const { return options_.step().memory_limit(); }

  const Graph& graph_;
  const PartitionOptions& options_;
  const Link link_;  // one for all cuts: their ranks are not known yet
  const size_t operators_;
  const int min_length_;
  const std::vector<core::Refusal> why_illegal_;
  const std::vector<ValueId> split_weights_;
  const std::vector<double> costs_;
  const std::vector<std::vector<int>> uses_;
  const std::vector<WeightCast> casts_;
  Constraints constraints_;
  std::vector<int> rank_of_stage_;
  double units_per_us_ = 1;
};

}  // namespace

Plan partition(const Graph& graph, const PartitionOptions& options) {
  SMP_CHECK_WITH(ConfigError, options.partitions() >= 1,
                 "partition: partitions: expected at least 1, got ", options.partitions(), ".");
  SMP_CHECK_WITH(ConfigError, options.tolerance() >= 0,
                 "partition: tolerance: expected at least 0, got ", options.tolerance(), ".");
  return Partitioner(graph, options).run();
}

}  // namespace smp::partitioner
