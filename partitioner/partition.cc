#include "partitioner/partition.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>
#include <vector>

#include "partitioner/complete.h"
#include "partitioner/cost.h"
#include "partitioner/cuts.h"
#include "partitioner/data_flow.h"
#include "partitioner/owners.h"
#include "partitioner/split.h"
#include "partitioner/verify.h"
#include "smp/core/error.h"

namespace smp::partitioner {
namespace {

using graph::Graph;
using graph::kUndefined;
using graph::ValueId;
using graph::ValueKind;

/// Costs are compared as integers, so that equal sums are equal in any order of summation.
constexpr double kCostUnits = 1e12;

/// Operators that stay together, numbered in program order.
struct Pieces {
  std::vector<int> of_operator;
  int count = 0;

  explicit Pieces(const std::vector<bool>& cuts, size_t operators) {
    for (size_t i = 0; i < operators; ++i) {
      if (i == 0 || cuts[i - 1]) ++count;
      of_operator.push_back(count - 1);
    }
  }
};

/// A bound on the position of a cut, and the pin it comes from; none: the number of pieces.
struct Bound {
  int position = 0;
  const Pin* pin = nullptr;
};

/// Where each cut may lie, given the pins and that every stage needs a piece.
struct Bounds {
  std::vector<Bound> earliest;
  std::vector<Bound> latest;

  Bounds(const Pieces& pieces, const std::vector<Pin>& pins, int stages, int min_length)
      : earliest(stages - 1, Bound{0, nullptr}), latest(stages - 1, Bound{pieces.count, nullptr}) {
    for (int j = 0; j + 1 < stages; ++j) {
      for (const Pin& pin : pins) {
        const int piece = pieces.of_operator[pin.operator_index];
        if (pin.stage <= j && piece + 1 > earliest[j].position) earliest[j] = {piece + 1, &pin};
        if (pin.stage > j && piece < latest[j].position) latest[j] = {piece, &pin};
      }
    }
    for (int j = 0; j + 1 < stages; ++j) {
      const Bound before = j > 0 ? earliest[j - 1] : Bound();
      if (before.position + min_length > earliest[j].position) {
        earliest[j] = {before.position + min_length, before.pin};
      }
    }
    for (int j = stages - 2; j >= 0; --j) {
      const Bound after = j + 2 < stages ? latest[j + 1] : Bound{pieces.count, nullptr};
      if (after.position - min_length < latest[j].position) {
        latest[j] = {after.position - min_length, after.pin};
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

class Partitioner {
 public:
  Partitioner(const Graph& graph, const PartitionOptions& options)
      : graph_(graph),
        options_(options),
        operators_(graph.operators.size()),
        min_length_(options.allow_empty_stages() ? 0 : 1),
        why_illegal_(why_illegal(graph)),
        split_weights_(split_weights(graph)),
        costs_(operator_costs(graph, options.memory_weight())),
        uses_(value_uses(graph)),
        constraints_(owner_constraints(graph, options.owner(), options.stages())) {}

  Plan run() const {
    const std::vector<int> stage_of_operator = assign();
    Plan plan = complete_plan(graph_, one_stage_per_rank(options_.stages()), stage_of_operator,
                              options_.owner());
    plan.reason_of_operator = reasons(stage_of_operator);
    verify_plan(graph_, plan);
    return plan;
  }

 private:
  std::vector<int> assign() const {
    if (options_.stages() == 1) return std::vector<int>(operators_, 0);
    if (const auto result = try_cuts(/*split_weights=*/false)) return *result;
    if (const auto result = try_cuts(/*split_weights=*/true)) return *result;
    explain_failure();
  }

  std::vector<bool> usable_cuts(bool split_weights) const {
    std::vector<bool> cuts;
    for (size_t i = 0; i < why_illegal_.size(); ++i) {
      cuts.push_back(why_illegal_[i].empty() && (split_weights || split_weights_[i] == kUndefined));
    }
    return cuts;
  }

  std::optional<std::vector<int>> try_cuts(bool split_weights) const {
    const Pieces pieces(usable_cuts(split_weights), operators_);
    const Bounds bounds(pieces, constraints_.pins, options_.stages(), min_length_);
    if (bounds.conflict() >= 0) return std::nullopt;
    const auto cuts = split(problem(pieces, bounds));
    if (!cuts) return std::nullopt;
    std::vector<int> stages;
    for (int piece : pieces.of_operator) {
      const auto after = std::upper_bound(cuts->begin(), cuts->end(), piece);
      stages.push_back(static_cast<int>(after - cuts->begin()));
    }
    return stages;
  }

  SplitProblem problem(const Pieces& pieces, const Bounds& bounds) const {
    SplitProblem problem;
    problem.stages = options_.stages();
    problem.allow_empty = options_.allow_empty_stages();
    problem.tolerance = options_.tolerance();
    problem.cost.assign(pieces.count, 0);
    for (size_t i = 0; i < operators_; ++i) {
      problem.cost[pieces.of_operator[i]] += std::llround(costs_[i] * kCostUnits);
    }
    for (const Bound& bound : bounds.earliest) problem.earliest.push_back(bound.position);
    for (const Bound& bound : bounds.latest) problem.latest.push_back(bound.position);
    for (size_t v = 0; v < graph_.values.size(); ++v) {
      if (graph_.values[v].kind != ValueKind::kResult) continue;
      add_uses(problem, pieces, static_cast<ValueId>(v), -1);
    }
    for (ValueId value : constraints_.better_local) {
      add_uses(problem, pieces, value, options_.owner().at(graph_.values[value].name));
    }
    std::stable_sort(problem.uses.begin(), problem.uses.end(),
                     [](const PieceUse& a, const PieceUse& b) { return a.piece < b.piece; });
    return problem;
  }

  void add_uses(SplitProblem& problem, const Pieces& pieces, ValueId value, int owner) const {
    PieceUse use;
    use.bytes = graph_.values[value].meta.nbytes();
    use.owner = owner;
    const int producer = graph_.values[value].producer;
    use.previous = producer < 0 ? -1 : pieces.of_operator[producer];
    for (int index : uses_[value]) {
      use.piece = pieces.of_operator[index];
      if (use.piece == use.previous) continue;
      problem.uses.push_back(use);
      use.previous = use.piece;
    }
  }

  [[noreturn]] void explain_failure() const {
    const Pieces pieces(usable_cuts(/*split_weights=*/true), operators_);
    if (pieces.count < options_.stages() && min_length_ > 0) explain_too_few(pieces.count);
    const Bounds bounds(pieces, constraints_.pins, options_.stages(), min_length_);
    const int cut = bounds.conflict();
    SMP_INTERNAL_ASSERT(cut >= 0, "no split although all bounds can be kept");
    explain_pins(bounds.earliest[cut].pin, bounds.latest[cut].pin);
  }

  [[noreturn]] void explain_too_few(int possible) const {
    std::string why = "every cut between them is legal";
    for (size_t i = 0; i < why_illegal_.size(); ++i) {
      if (why_illegal_[i].empty()) continue;
      const auto illegal = std::count_if(why_illegal_.begin(), why_illegal_.end(),
                                         [](const std::string& why) { return !why.empty(); });
      why = fmt::format("{} of the {} cuts between them are illegal, the first of these {}|{}: {}",
                        illegal, why_illegal_.size(), i, i + 1, why_illegal_[i]);
      break;
    }
    detail::fail<PartitionError>(
        fmt::format("cannot divide {} operators into {} stages: at most {} are possible, since {}. "
                    "Ask for fewer stages (\"pipeline_parallel_degree\") or replace operators "
                    "that work in place by ones that return a new tensor.",
                    operators_, options_.stages(), possible, why));
  }

  std::string describe(const Pin& pin) const {
    return fmt::format("{} belongs to stage {}, where {} must run",
                       describe_value(graph_, pin.value), pin.stage,
                       describe_operator(graph_, pin.operator_index));
  }

  /// `low` keeps a cut late, `high` keeps it early; either may be missing, but not both.
  [[noreturn]] void explain_pins(const Pin* low, const Pin* high) const {
    std::string why;
    if (low != nullptr && high != nullptr) {
      why = fmt::format("{}, but {}; no legal cuts leave both where they belong", describe(*low),
                        describe(*high));
    } else {
      const Pin& pin = low != nullptr ? *low : *high;
      why = fmt::format("{}, with too few operators {} it for the {} {} stages", describe(pin),
                        low != nullptr ? "after" : "before",
                        low != nullptr ? options_.stages() - 1 - pin.stage : pin.stage,
                        low != nullptr ? "later" : "earlier");
    }
    detail::fail<PartitionError>(
        fmt::format("cannot keep the owners that an earlier step function settled: {}. Call the "
                    "step function that uses the parameters in this order first.",
                    why));
  }

  std::vector<std::string> reasons(const std::vector<int>& stage_of_operator) const {
    std::vector<double> share(options_.stages(), 0);
    double total = 0;
    for (size_t i = 0; i < operators_; ++i) {
      share[stage_of_operator[i]] += costs_[i];
      total += costs_[i];
    }
    std::vector<std::string> result;
    for (size_t i = 0; i < operators_; ++i) {
      result.push_back(with_neighbour(static_cast<int>(i)));
      if (!result.back().empty()) continue;
      result.back() =
          fmt::format("balance: {:.1f}% of cost", 100 * share[stage_of_operator[i]] / total);
    }
    for (const Pin& pin : constraints_.pins) {
      result[pin.operator_index] = "owner of " + graph_.values[pin.value].name;
    }
    return result;
  }

  /// Why an operator is with the one before it, if it has to be.
  std::string with_neighbour(int i) const {
    if (i == 0) return "";
    if (!why_illegal_[i - 1].empty()) {
      return fmt::format("cut {}|{} illegal: {}", i - 1, i, why_illegal_[i - 1]);
    }
    const ValueId weight = split_weights_[i - 1];
    if (weight == kUndefined || options_.stages() == 1) return "";
    return fmt::format("cut {}|{} would send a view of {}", i - 1, i, graph_.values[weight].name);
  }

  const Graph& graph_;
  const PartitionOptions& options_;
  const size_t operators_;
  const int min_length_;
  const std::vector<std::string> why_illegal_;
  const std::vector<ValueId> split_weights_;
  const std::vector<double> costs_;
  const std::vector<std::vector<int>> uses_;
  const OwnerConstraints constraints_;
};

}  // namespace

Plan partition(const Graph& graph, const PartitionOptions& options) {
  SMP_CHECK_WITH(ConfigError, options.stages() >= 1,
                 "partition: stages: expected at least 1, got ", options.stages(), ".");
  SMP_CHECK_WITH(ConfigError, options.tolerance() >= 0,
                 "partition: tolerance: expected at least 0, got ", options.tolerance(), ".");
  return Partitioner(graph, options).run();
}

}  // namespace smp::partitioner
