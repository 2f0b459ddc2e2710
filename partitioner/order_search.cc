// SPDX-License-Identifier: Apache-2.0
#include "partitioner/order_search.h"

#include <c10/util/SmallVector.h>

#include <algorithm>
#include <iterator>
#include <numeric>
#include <utility>

namespace smp::partitioner {
namespace {

/// Tensors with more users than this are most likely needed by every stage in
/// any order.
constexpr size_t kFewTouches = 32;

/// How often all operators are moved late and early, or tried in all places.
constexpr int kRounds = 8;

/// Up to here every place is tried for every operator, which takes the square
/// of their number.
constexpr int kTryAllPlaces = 1024;

/// Differences of sums below this fraction of them are rounding.
constexpr double kRounding = 1e-9;

std::vector<int> program_order(int operators) {
  std::vector<int> order(operators);
  std::iota(order.begin(), order.end(), 0);
  return order;
}

/// An order, and where in the work each operator lies.
class Arrangement {
 public:
  Arrangement(const std::vector<double> &weight, std::vector<int> order)
      : weight_(&weight),
        order_(std::move(order)),
        position_(order_.size()),
        middle_(order_.size()) {
    place(0, static_cast<int>(order_.size()), 0);
  }

  const std::vector<int> &order() const { return order_; }
  int at(int position) const { return order_[position]; }
  int position(int op) const { return position_[op]; }
  /// How much work is done when half of the operator is.
  double middle(int op) const { return middle_[op]; }

  /// The same for any operator if `moved` were at `position`.
  double middle_after(int op, int moved, int position) const {
    const int from = position_[moved];
    const double weight = (*weight_)[moved];
    if (op == moved) {
      const int there = order_[position];
      const double half = (*weight_)[there] / 2;
      return position > from ? middle_[there] + half - weight / 2
                             : middle_[there] - half + weight / 2;
    }
    if (from < position_[op] && position_[op] <= position) return middle_[op] - weight;
    if (position <= position_[op] && position_[op] < from) return middle_[op] + weight;
    return middle_[op];
  }

  void move(int op, int position) {
    const int from = position_[op];
    const int first = std::min(from, position), end = std::max(from, position) + 1;
    const double start = middle_[order_[first]] - (*weight_)[order_[first]] / 2;
    const auto begin = order_.begin();
    if (from < position) {
      std::rotate(begin + from, begin + from + 1, begin + end);
    } else {
      std::rotate(begin + position, begin + from, begin + end);
    }
    place(first, end, start);
  }

  /// Exchanges the operator at `position` with the next, which changes the
  /// middle of no other.
  void swap_with_next(int position) {
    const int first = order_[position], second = order_[position + 1];
    std::swap(order_[position], order_[position + 1]);
    std::swap(position_[first], position_[second]);
    middle_[first] += (*weight_)[second];
    middle_[second] -= (*weight_)[first];
  }

 private:
  void place(int first, int end, double work) {
    for (int p = first; p < end; ++p) {
      const double weight = (*weight_)[order_[p]];
      position_[order_[p]] = p;
      middle_[order_[p]] = work + weight / 2;
      work += weight;
    }
  }

  const std::vector<double> *weight_;
  std::vector<int> order_;
  std::vector<int> position_;   ///< per operator
  std::vector<double> middle_;  ///< per operator
};

/// The expected cost of one tensor, given where in the work each operator is (`middle`).
template <class Middle>
double expected_cost(const OrderProblem &problem, const OrderProblem::Tensor &tensor,
                     const Middle &middle) {
  c10::SmallVector<double, kFewTouches> touches;
  for (int op : tensor.touches) touches.push_back(middle(op));
  std::sort(touches.begin(), touches.end());
  double crossings = 0;
  for (size_t i = 1; i < touches.size(); ++i) {
    crossings += std::min(1.0, (problem.stages - 1) * (touches[i] - touches[i - 1]));
  }
  return tensor.cost * crossings;
}

double expected_cost(const OrderProblem &problem, const Arrangement &arrangement) {
  double sum = 0;
  for (const OrderProblem::Tensor &tensor : problem.tensors) {
    sum += expected_cost(problem, tensor, [&](int op) { return arrangement.middle(op); });
  }
  return sum;
}

/// Operators on which none depends and that touch no tensor to be sent (they
/// update a buffer, say) as one with the operator that follows them in the
/// program: there is no other sign of where they should be.
class Units {
 public:
  explicit Units(const OrderProblem &problem) : problem_(problem) {
    std::vector<bool> alone(problem.operators(), true);
    for (const auto &before : problem.before) {
      for (int op : before) alone[op] = false;
    }
    for (const OrderProblem::Tensor &tensor : problem.tensors) {
      if (tensor.cost <= 0) continue;
      for (int op : tensor.touches) alone[op] = false;
    }
    std::vector<int> open;
    for (int op = 0; op < problem.operators(); ++op) {
      open.push_back(op);
      if (alone[op] && op + 1 < problem.operators()) continue;
      members_.push_back(std::move(open));
      open.clear();
    }
  }

  /// The same problem, on units.
  OrderProblem problem() const {
    std::vector<int> unit_of(problem_.operators());
    for (size_t u = 0; u < members_.size(); ++u) {
      for (int op : members_[u]) unit_of[op] = static_cast<int>(u);
    }
    OrderProblem units;
    units.stages = problem_.stages;
    for (size_t u = 0; u < members_.size(); ++u) {
      units.weight.push_back(0);
      std::vector<int> before;
      for (int op : members_[u]) {
        units.weight.back() += problem_.weight[op];
        for (int other : problem_.before[op]) before.push_back(unit_of[other]);
      }
      units.before.push_back(unique(std::move(before)));
    }
    for (const OrderProblem::Tensor &tensor : problem_.tensors) {
      std::vector<int> touches;
      for (int op : tensor.touches) touches.push_back(unit_of[op]);
      units.tensors.push_back({tensor.cost, unique(std::move(touches))});
    }
    return units;
  }

  std::vector<int> operators(const std::vector<int> &units) const {
    std::vector<int> result;
    for (int u : units) result.insert(result.end(), members_[u].begin(), members_[u].end());
    return result;
  }

 private:
  static std::vector<int> unique(std::vector<int> numbers) {
    std::sort(numbers.begin(), numbers.end());
    numbers.erase(std::unique(numbers.begin(), numbers.end()), numbers.end());
    return numbers;
  }

  const OrderProblem &problem_;
  std::vector<std::vector<int>> members_;  ///< per unit, ascending
};

class OrderSearch {
 public:
  explicit OrderSearch(const OrderProblem &problem)
      : problem_(problem), after_(problem.operators()), tensors_of_(problem.operators()) {
    for (int op = 0; op < problem.operators(); ++op) {
      for (int other : problem.before[op]) after_[other].push_back(op);
    }
    for (size_t t = 0; t < problem.tensors.size(); ++t) {
      const auto &touches = problem.tensors[t].touches;
      if (problem.tensors[t].cost <= 0 || touches.size() > kFewTouches) continue;
      for (int op : touches) tensors_of_[op].push_back(static_cast<int>(t));
    }
  }

  std::vector<int> run(double gain) const {
    const std::vector<int> program = program_order(problem_.operators());
    double least = expected_transfers(problem_, program) * (1 - gain);
    std::vector<int> best;
    for (const auto &start : {depth_first(problem_.before), depth_first(by_length()), program}) {
      const Arrangement found = improve(Arrangement(problem_.weight, start));
      const double cost = expected_cost(problem_, found);
      if (cost >= least * (1 - kRounding)) continue;
      least = cost;
      best = found.order();
    }
    return best;
  }

 private:
  /// Operators with all that must run before them, the one with the most work on its longest way
  /// first: the others are then made late.
  std::vector<std::vector<int>> by_length() const {
    std::vector<double> length = problem_.weight;
    std::vector<std::vector<int>> sorted = problem_.before;
    for (int op = 0; op < problem_.operators(); ++op) {
      double longest = 0;
      for (int other : problem_.before[op]) longest = std::max(longest, length[other]);
      length[op] += longest;
      std::stable_sort(sorted[op].begin(), sorted[op].end(),
                       [&](int a, int b) { return length[a] > length[b]; });
    }
    return sorted;
  }

  /// From each operator on which none depends, the operators that must be before it, in the order
  /// of the list.
  std::vector<int> depth_first(const std::vector<std::vector<int>> &before) const {
    std::vector<int> order;
    std::vector<bool> seen(problem_.operators(), false);
    std::vector<std::pair<int, size_t>> open;  // an operator, and the next one before it
    const auto enter = [&](int op) {
      if (!seen[op]) open.emplace_back(op, 0);
      seen[op] = true;
    };
    for (int last = 0; last < problem_.operators(); ++last) {
      if (!after_[last].empty()) continue;
      enter(last);
      while (!open.empty()) {
        auto &[op, next] = open.back();
        if (next < before[op].size()) {
          enter(before[op][next++]);
        } else {
          order.push_back(op);
          open.pop_back();
        }
      }
    }
    return order;
  }

  Arrangement improve(Arrangement best) const {
    double least = expected_cost(problem_, best);
    bool lower = true;
    const auto keep_lower = [&](const Arrangement &next) {
      const double cost = expected_cost(problem_, next);
      if (cost >= least * (1 - kRounding)) return;
      lower = true;
      least = cost;
      best = next;
    };
    for (int round = 0; lower && round < kRounds; ++round) {
      lower = false;
      Arrangement next = best;
      move_late(next);
      move_early(next);
      keep_lower(next);
      if (lower || problem_.operators() > kTryAllPlaces) continue;
      next = best;
      try_all_places(next, least * kRounding);
      keep_lower(next);
    }
    return best;
  }

  /// The first and the last place that an operator may have among the others as
  /// they are.
  std::pair<int, int> places(const Arrangement &arrangement, int op) const {
    int earliest = 0, latest = problem_.operators() - 1;
    for (int other : problem_.before[op]) {
      earliest = std::max(earliest, arrangement.position(other) + 1);
    }
    for (int other : after_[op]) latest = std::min(latest, arrangement.position(other) - 1);
    return {earliest, latest};
  }

  /// Moves each operator to the best of its places.
  void try_all_places(Arrangement &arrangement, double rounding) const {
    for (int op = 0; op < problem_.operators(); ++op) {
      const auto [earliest, latest] = places(arrangement, op);
      int best = arrangement.position(op);
      double change = 0, least = -rounding;
      const auto exchange = [&](int position) {
        change += swap_with_next(arrangement, position);
        if (change >= least) return;
        least = change;
        best = arrangement.position(op);
      };
      while (arrangement.position(op) < latest) exchange(arrangement.position(op));
      while (arrangement.position(op) > earliest) exchange(arrangement.position(op) - 1);
      arrangement.move(op, best);
    }
  }

  /// Returns the change of the sum by the exchange.
  double swap_with_next(Arrangement &arrangement, int position) const {
    const int first = arrangement.at(position), second = arrangement.at(position + 1);
    std::vector<int> tensors;
    std::set_union(tensors_of_[first].begin(), tensors_of_[first].end(),
                   tensors_of_[second].begin(), tensors_of_[second].end(),
                   std::back_inserter(tensors));
    const double before = expected_cost_of(arrangement, tensors);
    arrangement.swap_with_next(position);
    return expected_cost_of(arrangement, tensors) - before;
  }

  double expected_cost_of(const Arrangement &arrangement, const std::vector<int> &tensors) const {
    double sum = 0;
    for (int t : tensors) {
      sum += expected_cost(problem_, problem_.tensors[t],
                           [&](int op) { return arrangement.middle(op); });
    }
    return sum;
  }

  /// Moves operators right before the first that depends on them. An operator that costs as much
  /// there moves, too, since those that it depends on may then gain.
  void move_late(Arrangement &arrangement) const {
    for (int p = problem_.operators() - 2; p >= 0; --p) {
      const int op = arrangement.at(p);
      const int latest = places(arrangement, op).second;
      if (latest == p) continue;
      const auto [here, there] = costs(arrangement, op, latest);
      if (there <= here * (1 + kRounding)) arrangement.move(op, latest);
    }
  }

  /// Moves operators right behind the last that they depend on, where that is
  /// better.
  void move_early(Arrangement &arrangement) const {
    for (int p = 1; p < problem_.operators(); ++p) {
      const int op = arrangement.at(p);
      const int earliest = places(arrangement, op).first;
      if (earliest == p) continue;
      const auto [here, there] = costs(arrangement, op, earliest);
      if (there < here * (1 - kRounding)) arrangement.move(op, earliest);
    }
  }

  /// The costs of an operator's tensors at its place, and at `position`.
  std::pair<double, double> costs(const Arrangement &arrangement, int op, int position) const {
    double here = 0, there = 0;
    for (int t : tensors_of_[op]) {
      const OrderProblem::Tensor &tensor = problem_.tensors[t];
      here += expected_cost(problem_, tensor, [&](int other) { return arrangement.middle(other); });
      there += expected_cost(problem_, tensor, [&](int other) {
        return arrangement.middle_after(other, op, position);
      });
    }
    return {here, there};
  }

  const OrderProblem &problem_;
  std::vector<std::vector<int>> after_;       ///< per operator, those that it must be before
  std::vector<std::vector<int>> tensors_of_;  ///< per operator, of those with few touches
};

}  // namespace

double expected_transfers(const OrderProblem &problem, const std::vector<int> &order) {
  return expected_cost(problem, Arrangement(problem.weight, order));
}

std::vector<int> cheaper_order(const OrderProblem &problem, double gain) {
  if (problem.stages == 1 || problem.operators() < 3) return {};
  const Units units(problem);
  const OrderProblem of_units = units.problem();
  return units.operators(OrderSearch(of_units).run(gain));
}

}  // namespace smp::partitioner
