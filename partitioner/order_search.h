// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

namespace smp::partitioner {

/// Operators to be put in an order in which little has to cross between stages. Only numbers: their
/// meaning is the caller's affair.
struct OrderProblem {
  /// A tensor that has to be sent where two operators that touch it lie on different stages.
  struct Tensor {
    double cost = 0;           ///< cost of one transfer
    std::vector<int> touches;  ///< the operators that make or use it, each once
  };

  int stages = 1;
  std::vector<double> weight;            ///< per operator: its share of the work; they sum to 1
  std::vector<std::vector<int>> before;  ///< per operator: earlier ones that must stay before it
  std::vector<Tensor> tensors;

  int operators() const { return static_cast<int>(weight.size()); }
};

/// The expected cost of transfers: stages of equal work begin anywhere, so two operators that use a
/// tensor one after the other, and are w of the whole work apart, lie on different stages with
/// probability min(1, (stages - 1) w). A tensor that many stages use travels from one to the next,
/// so each such pair counts.
double expected_transfers(const OrderProblem& problem, const std::vector<int>& order);

/// An order whose `expected_transfers` are lower than those of 0, 1, 2 ... by more than `gain` of
/// them; empty if none is found. The same problem gives the same order everywhere.
///
/// A heuristic, since the problem is NP-hard (minimum linear arrangement with precedence). It
/// starts from the order given and from two depth-first orders, in which each operator follows
/// those that it needs, the longest way first or in the order given; then it moves single operators
/// as late or as early as they may run, and up to 1,024 operators to the best of all their places,
/// as long as that lowers the sum. Takes O(n log n) per pass, for each operator that moves the
/// distance, and for up to 1,024 operators O(n^2).
std::vector<int> cheaper_order(const OrderProblem& problem, double gain);

}  // namespace smp::partitioner
