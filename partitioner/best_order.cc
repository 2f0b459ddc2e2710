// SPDX-License-Identifier: Apache-2.0
#include "partitioner/best_order.h"

#include <algorithm>
#include <cstdint>
#include <optional>
#include <set>
#include <utility>

#include "core/check.h"
#include "partitioner/order.h"
#include "partitioner/order_search.h"
#include "partitioner/pins.h"
#include "partitioner/predict.h"

namespace smp::partitioner {
namespace {

using graph::Graph;
using graph::ValueId;

/// A step must be predicted to be shorter by this to leave the order of the program: less is lost
/// in the noise of measured times.
constexpr double kWorthwhile = 0.02;

/// Expected transfers must be lower by this for an order to be planned at all.
constexpr double kPromising = 0.01;

/// A plan and its value.
struct Candidate {
  Plan plan;
  double step_us = 0;
  int64_t foreign = 0;  ///< bytes of tensors with an owner that other ranks read, once per rank
};

class OrderChooser {
 public:
  OrderChooser(const Graph& graph, const PartitionOptions& options)
      : graph_(graph), options_(options) {}

  Plan run() const {
    if (options_.partitions() == 1 || is_pinned()) return partition(graph_, options_);
    return options_.owner().empty() ? first_plan() : later_plan();
  }

 private:
  bool is_pinned() const {
    return !options_.auto_partition() || !options_.pinned().empty() ||
           std::any_of(graph_.operators.begin(), graph_.operators.end(),
                       [](const graph::Operator& op) { return op.mode.partition >= 0; });
  }

  /// The previous plan's order or the program's, unless another is clearly better.
  Plan first_plan() const {
    const Plan* previous = options_.previous().get();
    const Order kept = previous == nullptr ? Order() : previous->order;
    const double margin = previous == nullptr ? kWorthwhile : options_.keep();
    Candidate best = candidate(kept, options_);
    double bound = best.step_us / (1 + margin);
    const auto problem = order_problem(graph_, options_.partitions(), options_.memory_weight(),
                                       options_.step().costs().slowest());
    for (const Order& order : {Order(), cheaper_order(problem, kPromising)}) {
      if (order == kept) continue;
      auto found = try_candidate(order, PartitionOptions(options_).previous(nullptr));
      if (!found || found->step_us >= bound) continue;
      best = std::move(*found);
      bound = best.step_us;
    }
    return std::move(best.plan);
  }

  /// Parameters and buffers stay where they are, so operators follow them. In one of the two orders
  /// that may be impossible.
  Plan later_plan() const {
    const Order order = order_by_owner(graph_, options_.owner());
    auto other = order.empty() ? std::nullopt : try_candidate(order, options_);
    if (!other) return partition(graph_, options_);
    if (visits(reordered(graph_, order)) < visits(graph_)) return std::move(other->plan);
    auto program = try_candidate({}, options_);
    if (!program) return std::move(other->plan);
    const bool closer = other->foreign < program->foreign;
    const bool shorter =
        other->foreign == program->foreign && other->step_us < program->step_us / (1 + kWorthwhile);
    return std::move(closer || shorter ? other->plan : program->plan);
  }

  /// How many stages the settled owners ask for.
  size_t visits(const Graph& graph) const {
    std::vector<Pin> pins = find_constraints(graph, options_).pins;
    return list_stages(pins, options_.partitions(), options_.placement()).size();
  }

  int microbatches() const { return std::max(options_.step().microbatches(), 2); }

  Candidate candidate(const Order& order, const PartitionOptions& options) const {
    const Graph graph = reordered(graph_, order);
    auto step = options.step().in_order(order);
    Candidate result;
    result.plan = partition(graph, PartitionOptions(options).step(step));
    result.plan.order = order;
    // Counts one microbatch as two, like `SplitScore::step`.
    step.microbatches(microbatches());
    result.step_us = predict(graph, result.plan, step).step_us;
    add_replicas(graph, result);
    return result;
  }

  /// Nothing if no plan in this order satisfies the options: the program's may.
  std::optional<Candidate> try_candidate(const Order& order,
                                         const PartitionOptions& options) const {
    try {
      return candidate(order, options);
    } catch (const PartitionError&) {
      return std::nullopt;
    }
  }

  /// Adds the tensors that replicas read, and the amount that their gradients add to each
  /// microbatch.
  void add_replicas(const Graph& graph, Candidate& candidate) const {
    const Plan& plan = candidate.plan;
    std::set<std::pair<ValueId, int>> copies;  // stages of one rank share one
    for (const Replica& replica : plan.replicas) {
      const int rank = plan.rank_of_stage[replica.stage];
      if (rank == plan.rank_of_stage[replica.owner]) continue;
      const int64_t bytes = graph.values[replica.value].meta.nbytes();
      if (copies.insert({replica.value, rank}).second) candidate.foreign += bytes;
      if (replica.needs_gradient) {
        const Link& link = options_.step().costs().between(plan.rank_of_stage[replica.owner], rank);
        candidate.step_us += microbatches() * link.of_tensor(bytes);
      }
    }
  }

  const Graph& graph_;
  const PartitionOptions& options_;
};

}  // namespace

Plan partition_in_best_order(const Graph& graph, const PartitionOptions& options) {
  return OrderChooser(graph, options).run();
}

}  // namespace smp::partitioner
