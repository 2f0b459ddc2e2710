// SPDX-License-Identifier: Apache-2.0
#include "pipeline/generators.h"

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <numeric>
#include <set>

#include "core/check.h"

namespace smp::pipeline {
namespace {

void check_positive(const char* name, int value) {
  SMP_CHECK_WITH(ConfigError, value >= 1, "schedule option ", name, ": expected at least 1, got ",
                 value, ".");
}

/// Whether each of the first `ranks` stages is on a rank of its own.
bool begins_on_all_ranks(const ScheduleOptions& options) {
  const auto& placed = options.rank_of_stage();
  const auto ranks = static_cast<size_t>(options.ranks());
  return placed.size() >= ranks &&
         std::set<int>(placed.begin(), placed.begin() + options.ranks()).size() == ranks;
}

bool is_looped(const ScheduleOptions& options) {
  const auto& placed = options.rank_of_stage();
  const auto ranks = static_cast<size_t>(options.ranks());
  if (!begins_on_all_ranks(options) || placed.size() % ranks != 0) {
    return false;
  }
  for (size_t stage = ranks; stage < placed.size(); ++stage) {
    if (placed[stage] != placed[stage - ranks]) {
      return false;
    }
  }
  return true;
}

bool is_v_shaped(const ScheduleOptions& options) {
  const auto& placed = options.rank_of_stage();
  return begins_on_all_ranks(options) && options.stages() == 2 * options.ranks() &&
         std::equal(placed.begin(), placed.begin() + options.ranks(), placed.rbegin());
}

/// The placement that is required, if it is another one.
std::optional<std::string> expected_placement(Placement placement, const ScheduleOptions& options) {
  switch (placement) {
    case Placement::kAny:
      return std::nullopt;
    case Placement::kOnePerRank:
      if (is_looped(options) && options.stages() == options.ranks()) return std::nullopt;
      return "one stage on each rank";
    case Placement::kLooped:
      if (is_looped(options)) return std::nullopt;
      return "the stages to go round all ranks in the same order each time, as 0,1,0,1 does with 2 "
             "ranks";
    case Placement::kVShaped:
      if (is_v_shaped(options)) return std::nullopt;
      return "two stages on each rank, the second ones in reverse, as 0,1,1,0 with 2 ranks";
  }
  SMP_INTERNAL_ASSERT(false, "unknown placement");
}

/// Throws `ConfigError` that names the first option out of range.
void check_options(const ScheduleOptions& options) {
  check_positive("stages", options.stages());
  check_positive("microbatches", options.microbatches());
  check_positive("ranks", options.ranks());
  check_positive("active_microbatches", options.active_microbatches());
  SMP_CHECK_WITH(ConfigError,
                 options.rank_of_stage().size() == static_cast<size_t>(options.stages()),
                 "schedule option rank_of_stage: expected one rank for each of ", options.stages(),
                 " stages, got ", options.rank_of_stage().size(), ".");
  SMP_CHECK_WITH(ConfigError,
                 options.backward_of_stage().size() == static_cast<size_t>(options.stages()),
                 "schedule option backward_of_stage: expected true or false for each of ",
                 options.stages(), " stages, got ", options.backward_of_stage().size(), ".");
  check_edges(options.edges(), options.stages());
}

}  // namespace

ScheduleOptions::ScheduleOptions(int stages, int microbatches)
    : stages_(stages),
      microbatches_(microbatches),
      ranks_(stages),
      rank_of_stage_(static_cast<size_t>(std::max(stages, 0))),
      edges_(chain_edges(stages)),
      backward_of_stage_(static_cast<size_t>(std::max(stages, 0)), true),
      active_microbatches_(stages + 2),
      costs_(StageCosts::uniform(std::max(stages, 0))) {
  std::iota(rank_of_stage_.begin(), rank_of_stage_.end(), 0);
}

ScheduleOptions ScheduleOptions::looped(int ranks, int stages_per_rank, int microbatches) {
  ScheduleOptions options(ranks * stages_per_rank, microbatches);
  for (int& rank : options.rank_of_stage_) {
    rank %= ranks;
  }
  return options.ranks(ranks);
}

ScheduleOptions ScheduleOptions::v_shaped(int ranks, int microbatches) {
  ScheduleOptions options(2 * ranks, microbatches);
  for (int& rank : options.rank_of_stage_) {
    rank = std::min(rank, 2 * ranks - 1 - rank);
  }
  return options.ranks(ranks);
}

ScheduleOptions ScheduleKind::place(int ranks, int per_rank, int microbatches) const {
  constexpr int kSeveral = 2;
  if (placement == Placement::kVShaped && (per_rank == 0 || per_rank == kSeveral)) {
    return ScheduleOptions::v_shaped(ranks, microbatches);
  }
  if (per_rank == 0) {
    per_rank = placement == Placement::kLooped ? kSeveral : 1;
  }
  return ScheduleOptions::looped(ranks, per_rank, microbatches);
}

core::Refusal ScheduleKind::why_misplaced(const ScheduleOptions& options) const {
  const auto expected = expected_placement(placement, options);
  if (!expected) return std::nullopt;
  std::string fitting;
  for (const auto& kind : schedule_kinds()) {
    if (kind.trains == trains && !expected_placement(kind.placement, options)) {
      fitting += (fitting.empty() ? "" : ", ") + kind.name;
    }
  }
  return c10::str("\"", name, "\" expects ", *expected, ", got ",
                  c10::Join(",", options.rank_of_stage()),
                  ". Place the stages so, or use one of these: ", fitting);
}

Schedule without_backwards(const Schedule& schedule, const std::vector<bool>& backward_of_stage) {
  auto backwards = schedule.backward_of_stage();
  for (size_t stage = 0; stage < backwards.size(); ++stage) {
    backwards[stage] = backwards[stage] && backward_of_stage.at(stage);
  }
  Schedule result(schedule.ranks(), schedule.microbatches(), schedule.rank_of_stage(),
                  std::move(backwards));
  for (int rank = 0; rank < schedule.ranks(); ++rank) {
    const auto& actions = schedule.actions(rank);
    std::copy_if(actions.begin(), actions.end(), std::back_inserter(result.actions(rank)),
                 [&](const Action& action) {
                   return result.has_backward(action.stage) ||
                          !(action.is_backward() || action.kind == Action::Kind::kReduce);
                 });
  }
  return result;
}

Schedule ScheduleKind::generate(const ScheduleOptions& options) const {
  check_options(options);
  const core::Refusal refusal = why_misplaced(options);
  SMP_CHECK_WITH(ConfigError, !refusal, "schedule option rank_of_stage: ", *refusal, ".");
  return without_backwards(order(options), options.backward_of_stage());
}

const std::vector<ScheduleKind>& schedule_kinds() {
  static const std::vector<ScheduleKind> kKinds = {
      {"simple", simple, Placement::kAny, InFlight::kAll, true, false},
      {"interleaved", interleaved, Placement::kAny, InFlight::kActive, true, false},
      {"1f1b", one_forward_one_backward, Placement::kOnePerRank, InFlight::kRanks, true, false},
      {"eager_1f1b", eager_one_forward_one_backward, Placement::kOnePerRank, InFlight::kTwiceRanks,
       true, false},
      {"interleaved_1f1b", interleaved_one_forward_one_backward, Placement::kLooped,
       InFlight::kTwiceRanks, true, false},
      {"breadth_first", breadth_first, Placement::kLooped, InFlight::kAll, true, false},
      {"zb_h1", zero_bubble_h1, Placement::kOnePerRank, InFlight::kSplitRanks, true, true},
      {"zb_h2", zero_bubble_h2, Placement::kOnePerRank, InFlight::kSplitTwiceRanks, true, true},
      {"zbv", zero_bubble_v, Placement::kVShaped, InFlight::kSplitRanks, true, true},
      {"dualpipe_v", dualpipe_v, Placement::kVShaped, InFlight::kTwiceRanks, true, true},
      {"list", list_schedule, Placement::kAny, InFlight::kRanks, true, true},
      {"forward_only", forward_only, Placement::kAny, InFlight::kRanks, false, false},
  };
  return kKinds;
}

const ScheduleKind& schedule_kind(const std::string& name) {
  std::string names;
  for (const auto& kind : schedule_kinds()) {
    if (kind.name == name) {
      return kind;
    }
    names += (names.empty() ? "" : ", ") + kind.name;
  }
  ::smp::core::fail<ConfigError>("there is no schedule \"", name, "\". Use one of these: ", names,
                                 ".");
}

Schedule make_schedule(const std::string& name, const ScheduleOptions& options) {
  return schedule_kind(name).generate(options);
}

}  // namespace smp::pipeline
