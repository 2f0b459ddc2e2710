// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <limits>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "core/check.h"
#include "pipeline/generators.h"
#include "pipeline/list_dispatcher.h"
#include "pipeline/order_timing.h"

namespace smp::pipeline {
namespace {

using Kind = Action::Kind;

constexpr double kNoMakespan = std::numeric_limits<double>::infinity();

bool clearly_less(double a, double b) { return a < b * (1 - kRounding); }

// --- memory -----------------------------------------------------------------------------------

bool fits(const std::vector<Action>& actions, int rank, const ScheduleOptions& options) {
  KeptMemory kept(options.costs());
  for (const auto& action : actions) kept.add(action);
  return kept.peak() <= memory_limit_of(options, rank);
}

bool fits(const ActionOrder& order, const ScheduleOptions& options) {
  for (int rank = 0; rank < options.ranks(); ++rank) {
    if (!fits(order[static_cast<size_t>(rank)], rank, options)) return false;
  }
  return true;
}

/// The memory that each rank needs for one microbatch.
std::vector<double> needed_by_one(const ScheduleOptions& options, bool split) {
  std::vector<double> needed(static_cast<size_t>(options.ranks()), 0);
  for (int stage = 0; stage < options.stages(); ++stage) {
    const int rank = options.rank_of_stage()[static_cast<size_t>(stage)];
    needed[static_cast<size_t>(rank)] += kept_by_one(options.costs(), stage, split);
  }
  return needed;
}

void check_memory_limit(const ScheduleOptions& options) {
  const auto& limit = options.memory_limit();
  if (limit.empty()) return;
  SMP_CHECK_WITH(ConfigError, limit.size() == static_cast<size_t>(options.ranks()),
                 "schedule option memory_limit: expected one number for each of ", options.ranks(),
                 " ranks, got ", limit.size(), ".");
  const std::vector<double> needed = needed_by_one(options, /*split=*/false);
  for (size_t rank = 0; rank < limit.size(); ++rank) {
    const bool has_room = needed[rank] <= memory_limit_of(options, static_cast<int>(rank));
    SMP_CHECK_WITH(PartitionError, has_room, "schedule option memory_limit: rank ", rank,
                   " may keep ", fmt::format("{}", limit[rank]), ", but one microbatch needs ",
                   fmt::format("{}", needed[rank]),
                   " there. Use more microbatches or partitions, or raise the limit.");
  }
}

/// Whether every rank can split the backward of one microbatch.
bool halves_fit(const ScheduleOptions& options) {
  const std::vector<double> needed = needed_by_one(options, /*split=*/true);
  for (int rank = 0; rank < options.ranks(); ++rank) {
    if (needed[static_cast<size_t>(rank)] > memory_limit_of(options, rank)) return false;
  }
  return true;
}

// --- improving an order -----------------------------------------------------------------------

/// Whether `later` may come before `earlier`, its neighbour on a rank, as far as one can see from
/// these two.
bool may_exchange(const StageFlow& flow, const Action& earlier, const Action& later) {
  if (earlier.stage == later.stage) {
    return earlier.kind != later.kind && earlier.microbatch != later.microbatch &&
           !(earlier.makes_input_gradients() && later.makes_input_gradients()) &&
           !(earlier.makes_weight_gradients() && later.makes_weight_gradients());
  }
  const auto& targets = flow.targets(earlier);
  const bool same_pass = (earlier.kind == Kind::kForward) == (later.kind == Kind::kForward) &&
                         later.kind != Kind::kBackwardWeight;
  return !(same_pass && earlier.microbatch == later.microbatch &&
           std::find(targets.begin(), targets.end(), later.stage) != targets.end());
}

/// A lower bound of all orders: the slowest rank works all the time, from when the first values
/// reach it until its last gradients have gone on to the first stage.
double least_makespan(const StageFlow& flow, bool split) {
  std::vector<double> starts(static_cast<size_t>(flow.stages()), 0);
  std::vector<double> tails(starts.size(), 0);
  for (int s = 0; s < flow.stages(); ++s) {
    for (const auto& source : flow.sources(forward_of(s, 0))) {
      const double end =
          starts[static_cast<size_t>(source.stage)] + flow.duration(forward_of(source.stage, 0));
      starts[static_cast<size_t>(s)] = std::max(starts[static_cast<size_t>(s)], end + source.delay);
    }
    // Weight gradients delay no other rank, so with these a rank may end on its own.
    for (const auto& source : flow.sources(backward_of(s, 0))) {
      if (split) continue;
      auto& tail = tails[static_cast<size_t>(source.stage)];
      tail = std::max(
          tail, source.delay + flow.duration(backward_of(s, 0)) + tails[static_cast<size_t>(s)]);
    }
  }
  double least = 0;
  for (int rank = 0; rank < flow.ranks(); ++rank) {
    double start = kNoMakespan;
    double work = 0;
    double tail = kNoMakespan;
    for (const int stage : flow.stages_of(rank)) {
      const auto index = static_cast<size_t>(stage);
      const auto& costs = flow.costs();
      const double backward =
          !split ? costs.backward[index]
                 : std::min(costs.backward[index],
                            costs.backward_input[index] + costs.backward_weight[index]);
      start = std::min(start, starts[index]);
      tail = std::min(tail, tails[index]);
      work += (costs.forward[index] + backward) * flow.microbatches();
    }
    if (work > 0) least = std::max(least, start + work + tail);
  }
  return least;
}

/// An order and its makespan.
struct TimedOrder {
  ActionOrder order;
  double makespan = kNoMakespan;
};

/// Tries orders until none can be better, or a number of actions was timed: not for a time, so that
/// every rank stops at the same point.
class Search {
 public:
  Search(const StageFlow& flow, const ScheduleOptions& options, bool split, size_t budget)
      : flow_(flow),
        options_(options),
        timer_(flow),
        budget_(budget),
        least_(least_makespan(flow, split)) {}

  const TimedOrder& best() const { return best_; }
  bool is_done() const { return spent_ >= budget_ || !clearly_less(least_, best_.makespan); }

  /// Takes the order if it fits and is better than the best so far.
  void offer(ActionOrder order) {
    if (!fits(order, options_)) return;
    const double makespan = time(order);
    if (best_.order.empty() || clearly_less(makespan, best_.makespan)) {
      best_ = {std::move(order), makespan};
    }
  }

  /// Builds an order by the rule and offers it.
  void build(bool split, const DispatchRule& rule) {
    // Choosing an action takes several times as long as timing it.
    spent_ += 3 * flow_.size();
    offer(dispatch(flow_, options_, split, rule));
  }

  /// Tabu search from the best order: exchanges the neighbours on a critical path that make the
  /// step shortest, even if it gets longer, but not those exchanged shortly before.
  void improve() {
    TimedOrder current = best_;
    std::vector<Exchange> tabu;
    while (!is_done()) {
      timer_.time(current.order);
      const auto move = best_exchange(current, tabu);
      if (!move) return;
      auto& actions = current.order[static_cast<size_t>(move->at.rank)];
      const Exchange back{actions[move->at.position + 1], actions[move->at.position]};
      std::swap(actions[move->at.position], actions[move->at.position + 1]);
      current.makespan = move->makespan;
      if (clearly_less(current.makespan, best_.makespan)) best_ = current;
      tabu.push_back(back);
      if (tabu.size() > kTabuTenure) tabu.erase(tabu.begin());
    }
  }

  /// Makes whole backwards of halves that follow each other where that costs nothing: one action
  /// less, and common work of both halves only once. For all stages at once if that goes, else for
  /// one half of them and the other.
  void merge_halves(int first_stage, int last_stage) {
    auto order = best_.order;
    bool changed = false;
    for (int stage = first_stage; stage < last_stage; ++stage) {
      changed |= merge_halves_of(stage, order[static_cast<size_t>(flow_.rank_of(stage))]);
    }
    if (!changed || spent_ >= 2 * budget_) return;
    const double makespan = fits(order, options_) ? time(order) : kNoMakespan;
    if (!clearly_less(best_.makespan, makespan)) {
      best_ = {std::move(order), makespan};
    } else if (last_stage - first_stage > 1) {
      const int middle = (first_stage + last_stage) / 2;
      merge_halves(first_stage, middle);
      merge_halves(middle, last_stage);
    }
  }

 private:
  static constexpr size_t kTabuTenure = 12;

  /// The actions before an exchange and after it.
  using Exchange = std::pair<Action, Action>;

  struct Move {
    OrderTimer::Neighbours at;
    double makespan;
  };

  double time(const ActionOrder& order) {
    for (const auto& actions : order) spent_ += actions.size();
    return timer_.time(order);
  }

  std::optional<Move> best_exchange(TimedOrder& current, const std::vector<Exchange>& tabu) {
    std::optional<Move> best;
    for (const auto& at : timer_.critical_neighbours(current.order)) {
      auto& actions = current.order[static_cast<size_t>(at.rank)];
      auto& first = actions[at.position];
      auto& second = actions[at.position + 1];
      if (!may_exchange(flow_, first, second)) continue;
      const Exchange exchange{first, second};
      std::swap(first, second);
      const double makespan = fits(actions, at.rank, options_) ? time(current.order) : kNoMakespan;
      std::swap(first, second);
      const bool forbidden = std::find(tabu.begin(), tabu.end(), exchange) != tabu.end() &&
                             !clearly_less(makespan, best_.makespan);
      if (!forbidden && clearly_less(makespan, best ? best->makespan : kNoMakespan)) {
        best = Move{at, makespan};
      }
    }
    return best;
  }

  static bool merge_halves_of(int stage, std::vector<Action>& actions) {
    std::vector<Action> merged;
    for (const auto& action : actions) {
      if (action.kind == Kind::kBackwardWeight && action.stage == stage && !merged.empty() &&
          merged.back() == backward_input_of(stage, action.microbatch)) {
        merged.back().kind = Kind::kBackward;
      } else {
        merged.push_back(action);
      }
    }
    const bool changed = merged.size() < actions.size();
    actions = std::move(merged);
    return changed;
  }

  const StageFlow& flow_;
  const ScheduleOptions& options_;
  OrderTimer timer_;
  const size_t budget_;
  const double least_;
  size_t spent_ = 0;
  TimedOrder best_;
};

/// The same order with every backward split.
ActionOrder split(const ActionOrder& order) {
  ActionOrder result(order.size());
  for (size_t rank = 0; rank < order.size(); ++rank) {
    for (const auto& action : order[rank]) {
      if (action.kind == Kind::kBackward) {
        result[rank].push_back(backward_input_of(action.stage, action.microbatch));
        result[rank].push_back(backward_weight_of(action.stage, action.microbatch));
      } else {
        result[rank].push_back(action);
      }
    }
  }
  return result;
}

/// How many actions are timed in all: a quarter of a second on one core.
constexpr size_t kBudget = 4'000'000;

/// Orders have the backwards of all stages; those that are not needed take no time and go at the
/// end.
void offer_other_schedules(const ScheduleOptions& options, bool split_backwards, Search& search) {
  const auto with_all = ScheduleOptions(options).backward_of_stage(
      std::vector<bool>(static_cast<size_t>(options.stages()), true));
  for (const auto& kind : schedule_kinds()) {
    if (kind.name == "list" || !kind.trains || kind.why_misplaced(options) ||
        (kind.splits && !split_backwards)) {
      continue;
    }
    auto order = kind.generate(with_all).lists();
    if (split_backwards) search.offer(split(order));
    search.offer(std::move(order));
  }
}

std::vector<DispatchRule> rules(const ScheduleOptions& options) {
  std::set<int> extras = {0, 1, 2, options.ranks(), options.microbatches()};
  std::set<int> rounds = {1};
  if (options.stages() > options.ranks()) rounds.insert(options.ranks());
  std::vector<DispatchRule> result;
  for (const double look_ahead : {0.0, 0.5, 1.0}) {
    for (const int extra : extras) {
      for (const int round : rounds) {
        for (const bool backward_first : {true, false}) {
          result.push_back({backward_first, extra, look_ahead, round});
        }
      }
    }
  }
  return result;
}

TimedOrder search_orders(const StageFlow& flow, const ScheduleOptions& options,
                         bool split_backwards) {
  Search search(flow, options, split_backwards, kBudget);
  offer_other_schedules(options, split_backwards, search);
  for (const auto& rule : rules(options)) {
    if (search.is_done()) break;
    search.build(split_backwards, rule);
  }
  search.improve();
  if (split_backwards) search.merge_halves(0, flow.stages());
  return search.best();
}

}  // namespace

Schedule list_schedule(const ScheduleOptions& given) {
  auto options = given;
  options.costs(given.costs().filled(static_cast<size_t>(given.stages()), given.edges().size()));
  check_memory_limit(options);
  const StageFlow flow(options);
  auto best = search_orders(flow, options, /*split_backwards=*/false);
  if (options.costs().can_split() && halves_fit(options)) {
    auto other = search_orders(flow, options, /*split_backwards=*/true);
    if (clearly_less(other.makespan, best.makespan)) best = std::move(other);
  }
  Schedule result(options.ranks(), options.microbatches(), options.rank_of_stage(), true);
  result.lists() = std::move(best.order);
  return result;
}

}  // namespace smp::pipeline
