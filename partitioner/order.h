// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "core/refusal.h"
#include "graph/graph.h"
#include "partitioner/cost_model.h"
#include "partitioner/order_search.h"
#include "partitioner/pins.h"

namespace smp::partitioner {

/// The operators of a captured graph, by index, in the order in which they run; empty: in the order
/// of the program.
using Order = std::vector<int>;

/// Two operators that every order keeps in the program's order.
struct OrderRule {
  enum class Kind : uint8_t {
    kData,      ///< `after` reads a result of `before`
    kStorage,   ///< both touch a storage that some operator writes
    kGradient,  ///< both send a gradient to one tensor: the sum depends on who comes first
    kCall,      ///< both run code that is not a tensor operator's: leaf modules
  };

  int before = 0;
  int after = 0;
  Kind kind = Kind::kData;
  graph::ValueId value = graph::kUndefined;  ///< the tensor concerned, if any
};

/// The order that must be kept so that the graph computes the same, bit for bit, forward and
/// backward; by `after`, and without rules that follow from others of the same kind.
///
/// Operators are functions of their arguments (a random one of its ordinal, too), so results depend
/// on the order of data and of writes only. Sums of gradients depend on more: autograd's engine
/// (`CompareNodeTaskTime` in torch/csrc/autograd/engine.h) runs, of the functions that are ready,
/// the one recorded last, and functions are recorded in the order of their operators, each after
/// those that feed it. So it goes through the operators backward, one after the other, and a tensor
/// adds up the gradients of the operators that use it from the last to the first. Stages hand on
/// partial sums in the same order (docs/architecture.md, Numerics). Therefore the operators that
/// use a tensor and send it a gradient keep their order among each other, where a tensor counts
/// under all its ids (a `contiguous` that does nothing returns its argument).
std::vector<OrderRule> order_rules(const graph::Graph& graph);

/// Which rule an illegal order breaks first.
core::Refusal why_illegal_order(const graph::Graph& graph, const Order& order);

/// The same graph with its operators in another order. Values keep their ids.
graph::Graph reordered(const graph::Graph& graph, const Order& order);

/// The same for a graph that is shared; itself if `order` is empty.
std::shared_ptr<const graph::Graph> in_order(std::shared_ptr<const graph::Graph> graph,
                                             const Order& order);

/// The fewest operators that have to be moved to get an order from the program's.
int moved_operators(const Order& order);

/// The order of a graph as numbers: the transfers, all on such a link, and the work by
/// `operator_costs` with this `memory_weight`.
OrderProblem order_problem(const graph::Graph& graph, int stages, double memory_weight,
                           const Link& link = {});

/// The operators by the rank that owns the parameters and buffers that they are the first to use,
/// or that of an operator before which they cannot run; else in the order of the program. So each
/// rank is visited once, if that is possible. Empty if it is the program's order.
Order order_by_owner(const graph::Graph& graph, const Owners& owner);

}  // namespace smp::partitioner
