// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "core/check.h"
#include "pipeline/generator_checks.h"
#include "pipeline/generators.h"

namespace smp::pipeline {
namespace {

enum class Policy { kSimple, kInterleaved, kForwardOnly };

/// Runs the pipeline slot by slot. Each stage counts the forwards and backwards it has done;
/// because both go in microbatch order, the counts tell which actions are ready.
class SlotMachine {
 public:
  SlotMachine(const ScheduleOptions& options, Policy policy)
      : policy_(policy),
        active_microbatches_(options.active_microbatches()),
        schedule_(options.ranks(), options.microbatches(), options.rank_of_stage(),
                  policy != Policy::kForwardOnly),
        sources_(static_cast<size_t>(options.stages())),
        gradient_sources_(sources_.size()),
        stages_of_rank_(static_cast<size_t>(options.ranks())),
        forwards_(sources_.size(), 0),
        backwards_(sources_.size(), 0) {
    for (size_t stage = 0; stage < sources_.size(); ++stage) {
      stages_of_rank_[static_cast<size_t>(options.rank_of_stage()[stage])].push_back(stage);
    }
    for (const auto& edge : options.edges()) {
      const auto from = static_cast<size_t>(edge.from);
      const auto to = static_cast<size_t>(edge.to);
      sources_[to].push_back(from);
      if (edge.needs_gradient) {
        gradient_sources_[from].push_back(to);
      }
    }
  }

  Schedule run() && {
    while (!finished()) {
      // All ranks choose from the state at the beginning of the slot.
      std::vector<Action> slot;
      for (int rank = 0; rank < schedule_.ranks(); ++rank) {
        if (const auto action = choose(rank)) {
          slot.push_back(*action);
        }
      }
      SMP_INTERNAL_ASSERT(!slot.empty(), "no rank can go on");
      for (const auto& action : slot) {
        done(action);
      }
    }
    return std::move(schedule_);
  }

 private:
  bool finished() const {
    const auto& last = schedule_.has_backward() ? backwards_ : forwards_;
    return std::all_of(last.begin(), last.end(),
                       [this](int count) { return count == schedule_.microbatches(); });
  }

  void done(const Action& action) {
    const auto stage = static_cast<size_t>(action.stage);
    ++(action.is_backward() ? backwards_ : forwards_)[stage];
    schedule_.actions(schedule_.rank_of(action.stage)).push_back(action);
  }

  std::optional<Action> choose(int rank) const {
    const auto& stages = stages_of_rank_[static_cast<size_t>(rank)];
    if (may_run_backward(stages)) {
      if (const auto action = ready_backward(stages)) {
        return action;
      }
    }
    return ready_forward(stages);
  }

  bool may_run_backward(const std::vector<size_t>& stages) const {
    switch (policy_) {
      case Policy::kSimple:
        return std::all_of(stages.begin(), stages.end(), [this](size_t stage) {
          return forwards_[stage] == schedule_.microbatches();
        });
      case Policy::kInterleaved:
        return true;
      case Policy::kForwardOnly:
        return false;
    }
    SMP_INTERNAL_ASSERT(false, "unknown policy");
  }

  std::optional<Action> ready_backward(const std::vector<size_t>& stages) const {
    std::optional<Action> best;
    for (const auto stage : stages) {
      const int next = backwards_[stage];
      const auto& sources = gradient_sources_[stage];
      const bool ready = next < forwards_[stage] &&
                         std::all_of(sources.begin(), sources.end(),
                                     [&](size_t later) { return backwards_[later] > next; });
      if (ready && (!best || next < best->microbatch)) {
        best = backward_of(static_cast<int>(stage), next);
      }
    }
    return best;
  }

  std::optional<Action> ready_forward(const std::vector<size_t>& stages) const {
    const int limit = admitted(stages);
    std::optional<Action> best;
    for (const auto stage : stages) {
      const int next = forwards_[stage];
      const auto& sources = sources_[stage];
      const bool ready = next < limit && std::all_of(sources.begin(), sources.end(),
                                                     [&](size_t s) { return forwards_[s] > next; });
      if (ready && (!best || next < best->microbatch)) {
        best = forward_of(static_cast<int>(stage), next);
      }
    }
    return best;
  }

  /// How many microbatches may have begun on the rank of these stages. A microbatch is finished
  /// when all of the rank's stages have run its backward; they finish in order.
  int admitted(const std::vector<size_t>& stages) const {
    if (policy_ != Policy::kInterleaved) {
      return schedule_.microbatches();
    }
    int finished = schedule_.microbatches();
    for (const auto stage : stages) {
      finished = std::min(finished, backwards_[stage]);
    }
    return finished + std::min(active_microbatches_, schedule_.microbatches() - finished);
  }

  Policy policy_;
  int active_microbatches_;
  Schedule schedule_;
  std::vector<std::vector<size_t>> sources_;           // a forward needs these stages' forwards
  std::vector<std::vector<size_t>> gradient_sources_;  // a backward needs these stages' backwards
  std::vector<std::vector<size_t>> stages_of_rank_;
  std::vector<int> forwards_;   // done by each stage before this slot
  std::vector<int> backwards_;  // likewise
};

Schedule generate(const ScheduleOptions& options, Policy policy) {
  check_options(options);
  return SlotMachine(options, policy).run();
}

}  // namespace

Schedule simple(const ScheduleOptions& options) { return generate(options, Policy::kSimple); }

Schedule interleaved(const ScheduleOptions& options) {
  return generate(options, Policy::kInterleaved);
}

Schedule forward_only(const ScheduleOptions& options) {
  return generate(options, Policy::kForwardOnly);
}

}  // namespace smp::pipeline
