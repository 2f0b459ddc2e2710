// SPDX-License-Identifier: Apache-2.0
#include "pipeline/list_dispatcher.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "core/check.h"

namespace smp::pipeline {
namespace {

using Kind = Action::Kind;
using Backwards = DispatchRule::Backwards;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// Runs all ranks in virtual time and gives each its next action by a rule.
class Dispatcher {
 public:
  Dispatcher(const StageFlow& flow, const ScheduleOptions& options, bool split,
             const DispatchRule& rule)
      : flow_(flow),
        options_(options),
        split_(split),
        rule_(rule),
        done_(static_cast<size_t>(flow.stages())),
        forward_ends_(flow.size(), 0),
        gradient_ends_(flow.size(), 0),
        clocks_(static_cast<size_t>(flow.ranks()), 0),
        memory_(clocks_.size(), 0),
        next_(clocks_.size()),
        order_(clocks_.size()) {
    for (int rank = 0; rank < flow.ranks(); ++rank) {
      in_flight_limit_.push_back(
          rule.in_flight > 0 ? rule.in_flight : enough_in_flight(rank) + rule.extra_in_flight);
    }
  }

  ActionOrder run() && {
    for (int rank = 0; rank < flow_.ranks(); ++rank) choose(rank);
    while (!waiting_.empty()) {
      const int rank = waiting_.begin()->second;
      perform(rank, next_[static_cast<size_t>(rank)]);
    }
    for (const auto& stage : done_) {
      const int last = rule_.backwards == Backwards::kNone ? stage.forwards : stage.weights;
      SMP_INTERNAL_ASSERT(last == flow_.microbatches(), "no rank can go on");
    }
    return std::move(order_);
  }

 private:
  /// How many microbatches a stage has done of each.
  struct Done {
    int forwards = 0;
    int inputs = 0;
    int weights = 0;
  };

  struct Candidate {
    Action action;
    double start = kInfinity;
  };

  Done& done(int stage) { return done_[static_cast<size_t>(stage)]; }
  const Done& done(int stage) const { return done_[static_cast<size_t>(stage)]; }

  /// How many microbatches keep a rank busy: as many as come by while one goes on to the end of
  /// the pipeline and returns, if the slowest rank sets the pace.
  int enough_in_flight(int rank) const {
    std::vector<double> work(clocks_.size(), 0);
    for (int stage = 0; stage < flow_.stages(); ++stage) {
      work[static_cast<size_t>(flow_.rank_of(stage))] +=
          flow_.duration(forward_of(stage, 0)) + flow_.duration(backward_of(stage, 0));
    }
    const double pace = *std::max_element(work.begin(), work.end());
    if (pace == 0 || flow_.stages_of(rank).empty()) return 1;
    const double rounds = round_trip(flow_.stages_of(rank).front()) / pace;
    return static_cast<int>(std::clamp(std::ceil(rounds), 1.0, 1e9));
  }

  /// From the start of a stage's forward to the end of its backward, of a lone microbatch.
  double round_trip(int stage) const {
    std::vector<double> forward_ends(done_.size(), -kInfinity);
    std::vector<double> gradient_ends(done_.size(), -kInfinity);
    const auto pass = [&](const Action& action, std::vector<double>& ends, double begin) {
      for (const auto& source : flow_.sources(action)) {
        begin = std::max(begin, ends[static_cast<size_t>(source.stage)] + source.delay);
      }
      ends[static_cast<size_t>(action.stage)] = begin + flow_.duration(action);
    };
    for (int s = stage; s < flow_.stages(); ++s) {
      pass(forward_of(s, 0), forward_ends, s == stage ? 0 : -kInfinity);
    }
    for (int s = flow_.stages() - 1; s >= stage; --s) {
      pass(split_ ? backward_input_of(s, 0) : backward_of(s, 0), gradient_ends,
           forward_ends[static_cast<size_t>(s)]);
    }
    return std::max(gradient_ends[static_cast<size_t>(stage)], 0.0);
  }

  void perform(int rank, const Candidate& chosen) {
    const Action action = chosen.action;
    const double end = chosen.start + flow_.duration(action);
    clocks_[static_cast<size_t>(rank)] = end + flow_.sending(action);
    order_[static_cast<size_t>(rank)].push_back(action);
    auto& stage = done(action.stage);
    if (action.kind == Kind::kForward) {
      ++stage.forwards;
      forward_ends_[flow_.index(action)] = end;
    } else if (action.makes_input_gradients()) {
      ++stage.inputs;
      gradient_ends_[flow_.index(action)] = end;
    }
    if (action.makes_weight_gradients()) ++stage.weights;
    memory_[static_cast<size_t>(rank)] += change_of_memory(action);
    choose(rank);
    for (const int target : flow_.targets(action)) {
      if (flow_.rank_of(target) != rank) choose(flow_.rank_of(target));
    }
  }

  double kept(int stage) const { return kept_by_one(flow_.costs(), stage, split_); }

  double change_of_memory(const Action& action) const {
    const double for_weights = flow_.costs().kept_for_weights[static_cast<size_t>(action.stage)];
    switch (action.kind) {
      case Kind::kForward:
        return kept(action.stage);
      case Kind::kBackward:
        return -kept(action.stage);
      case Kind::kBackwardInput:
        return for_weights - kept(action.stage);
      default:
        return -for_weights;
    }
  }

  void choose(int rank) {
    candidates_.clear();
    for (const int stage : flow_.stages_of(rank)) {
      const auto& at = done(stage);
      const auto backward =
          split_ ? backward_input_of(stage, at.inputs) : backward_of(stage, at.inputs);
      if (at.inputs < at.forwards && may_run_backwards(rank)) add_candidate(rank, backward);
      if (at.forwards < flow_.microbatches() && may_begin(rank, stage)) {
        add_candidate(rank, forward_of(stage, at.forwards));
      }
      if (at.weights < at.inputs) {
        add_candidate(rank, backward_weight_of(stage, at.weights));
      }
    }
    auto& next = next_[static_cast<size_t>(rank)];
    const double before = std::exchange(next, best_candidate()).start;
    if (next.start == before) return;
    waiting_.erase({before, rank});
    if (next.start < kInfinity) waiting_.insert({next.start, rank});
  }

  bool may_run_backwards(int rank) const {
    if (rule_.backwards != Backwards::kAfterForwards) return rule_.backwards != Backwards::kNone;
    const auto& stages = flow_.stages_of(rank);
    return std::all_of(stages.begin(), stages.end(),
                       [this](int stage) { return done(stage).forwards == flow_.microbatches(); });
  }

  void add_candidate(int rank, const Action& action) {
    const bool forward = action.kind == Kind::kForward;
    double start = clocks_[static_cast<size_t>(rank)];
    for (const auto& source : flow_.sources(action)) {
      const auto& at = done(source.stage);
      if ((forward ? at.forwards : at.inputs) <= action.microbatch) return;
      const auto& ends = forward ? forward_ends_ : gradient_ends_;
      start = std::max(start, ends[flow_.index(source.stage, action.microbatch)] + source.delay);
    }
    candidates_.push_back({action, start});
  }

  Candidate best_candidate() const {
    double first_start = kInfinity;
    double first_end = kInfinity;
    for (const auto& candidate : candidates_) {
      first_start = std::min(first_start, candidate.start);
      first_end = std::min(first_end, candidate.start + flow_.duration(candidate.action));
    }
    const double latest = first_start + rule_.look_ahead * (first_end - first_start);
    Candidate best;
    for (const auto& candidate : candidates_) {
      const bool in_time =
          candidate.start == first_start || candidate.start < latest - kRounding * latest;
      if (in_time &&
          (best.start == kInfinity || preference(candidate.action) < preference(best.action))) {
        best = candidate;
      }
    }
    return best;
  }

  /// The least goes first.
  std::tuple<int, int, int, int> preference(const Action& action) const {
    const bool forward = action.kind == Kind::kForward;
    const int urgency = action.kind == Kind::kBackwardWeight ? 2
                        : forward == rule_.backward_first    ? 1
                                                             : 0;
    const bool earliest_stage = forward || rule_.in_flight > 0;
    return {urgency, action.microbatch / rule_.round, earliest_stage ? action.stage : -action.stage,
            action.microbatch};
  }

  /// Whether the next forward of the stage leaves the rank able to finish everything.
  bool may_begin(int rank, int stage) const {
    const int microbatch = done(stage).forwards;
    int finished = flow_.microbatches();
    for (const int other : flow_.stages_of(rank)) finished = std::min(finished, done(other).inputs);
    return microbatch - finished < in_flight_limit_[static_cast<size_t>(rank)] &&
           has_memory(rank, stage);
  }

  /// The banker's algorithm: after this forward there must be room to run all forwards of the
  /// oldest unfinished microbatch, with the memory that it then sets free all of the next, and so
  /// on.
  bool has_memory(int rank, int stage) const {
    double room =
        memory_limit_of(options_, rank) - memory_[static_cast<size_t>(rank)] - kept(stage);
    if (room == kInfinity) return true;
    if (room < 0) return false;
    const auto forwards = [&](int s) { return done(s).forwards + (s == stage ? 1 : 0); };
    int first = flow_.microbatches();
    int last = 0;
    for (const int s : flow_.stages_of(rank)) {
      first = std::min(first, forwards(s));
      last = std::max(last, forwards(s));
    }
    // Microbatches that have run all forwards need nothing and set everything free.
    for (const int s : flow_.stages_of(rank)) {
      room += held(s, std::min(first, forwards(s)));
    }
    for (int m = first; m < last; ++m) {
      double needed = 0;
      double total = 0;
      for (const int s : flow_.stages_of(rank)) {
        total += kept(s);
        if (forwards(s) <= m) needed += kept(s);
      }
      if (needed > room) return false;
      room += total - needed;
    }
    return true;
  }

  /// The memory that the first `microbatches` of a stage still keep.
  double held(int stage, int microbatches) const {
    const auto& at = done(stage);
    const double for_weights = flow_.costs().kept_for_weights[static_cast<size_t>(stage)];
    return (microbatches - at.inputs) * kept(stage) +
           (split_ ? (at.inputs - at.weights) * for_weights : 0);
  }

  const StageFlow& flow_;
  const ScheduleOptions& options_;
  const bool split_;
  const DispatchRule rule_;
  std::vector<Done> done_;                    // progress of each stage
  std::vector<double> forward_ends_;          // ends by stage and microbatch
  std::vector<double> gradient_ends_;         // likewise, of the inputs
  std::vector<double> clocks_;                // time of each rank
  std::vector<double> memory_;                // memory of each rank
  std::vector<int> in_flight_limit_;          // limit of each rank
  std::vector<Candidate> next_;               // next candidate of each rank
  std::set<std::pair<double, int>> waiting_;  // starts and ranks of these, where there are any
  std::vector<Candidate> candidates_;         // candidates of the rank that chooses
  ActionOrder order_;
};

}  // namespace

double kept_by_one(const StageCosts& costs, int stage, bool split) {
  const auto index = static_cast<size_t>(stage);
  if (!split) return costs.kept[index];
  return std::max(costs.kept[index] + costs.gradients_for_weights[index],
                  costs.kept_for_weights[index]);
}

double memory_limit_of(const ScheduleOptions& options, int rank) {
  if (options.memory_limit().empty()) return kInfinity;
  return options.memory_limit()[static_cast<size_t>(rank)] * (1 + kRounding);
}

ActionOrder dispatch(const StageFlow& flow, const ScheduleOptions& options, bool split,
                     const DispatchRule& rule) {
  return Dispatcher(flow, options, split, rule).run();
}

}  // namespace smp::pipeline
