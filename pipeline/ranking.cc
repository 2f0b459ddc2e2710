// SPDX-License-Identifier: Apache-2.0
#include "pipeline/ranking.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <tuple>
#include <utility>

#include "core/check.h"

namespace smp::pipeline {
namespace {

double most(const std::vector<double>& numbers) {
  return *std::max_element(numbers.begin(), numbers.end());
}

/// Why the memory limit does not hold it.
core::Refusal why_too_large(const Simulation& simulation, const std::vector<double>& limit) {
  for (size_t rank = 0; rank < limit.size(); ++rank) {
    if (simulation.peak_memory[rank] > limit[rank] * (1 + kRounding)) {
      return fmt::format("rank {} would keep {}, more than its limit of {}", rank,
                         simulation.peak_memory[rank], limit[rank]);
    }
  }
  return std::nullopt;
}

/// "12.3", and no digits that mean nothing.
std::string number(double value) { return fmt::format("{:.4g}", value); }

}  // namespace

const RankedSchedule& ScheduleRanking::choice() const {
  const double longest = (1 + kAlike) * best().simulation.makespan;
  const auto first_too_long = std::find_if(
      schedules.begin(), schedules.end(),
      [&](const RankedSchedule& ranked) { return ranked.simulation.makespan > longest; });
  return *std::min_element(schedules.begin(), first_too_long, [](const auto& a, const auto& b) {
    return most(a.simulation.peak_memory) < most(b.simulation.peak_memory);
  });
}

ScheduleRanking rank_schedules(const ScheduleOptions& options, ListSearch search) {
  ScheduleRanking ranking;
  for (const auto& kind : schedule_kinds()) {
    // The list is the last.
    const bool needed =
        kind.name != "list" || search == ListSearch::kAlways || ranking.schedules.empty();
    if (!kind.trains || !needed) {
      continue;
    }
    core::Refusal refusal = kind.why_misplaced(options);
    const bool always_splits = kind.splits && kind.name != "list";
    if (!refusal && always_splits && !options.costs().can_split()) {
      refusal = "it splits backwards, and the time of their halves is not known";
    }
    if (!refusal) {
      auto schedule = lower(kind.generate(options), options.edges());
      auto simulation = simulate(schedule, options.edges(), options.costs());
      refusal = why_too_large(simulation, options.memory_limit());
      if (!refusal) {
        ranking.schedules.push_back({kind.name, std::move(schedule), std::move(simulation)});
        continue;
      }
    }
    ranking.refused.push_back({kind.name, std::move(*refusal)});
  }
  const auto shortest = std::min_element(ranking.schedules.begin(), ranking.schedules.end(),
                                         [](const auto& a, const auto& b) {
                                           return a.simulation.makespan < b.simulation.makespan;
                                         })
                            ->simulation.makespan;
  const auto key = [&](const RankedSchedule& ranked) {
    // Sums of the same times in another order differ by rounding.
    const double steps = shortest > 0 ? ranked.simulation.makespan / shortest : 1;
    return std::tuple(std::round(steps * 1e9), most(ranked.simulation.peak_memory));
  };
  std::stable_sort(ranking.schedules.begin(), ranking.schedules.end(),
                   [&](const auto& a, const auto& b) { return key(a) < key(b); });
  return ranking;
}

std::string to_string(const ScheduleRanking& ranking) {
  constexpr const char* kRow = "{:<18}{:<10}{:<10}{}\n";
  std::string text = fmt::format(kRow, "schedule", "makespan", "idle", "most kept");
  for (const auto& [name, schedule, simulation] : ranking.schedules) {
    text +=
        fmt::format(kRow, name, number(simulation.makespan),
                    number(100 * simulation.bubble()) + " %", number(most(simulation.peak_memory)));
  }
  text += "idle by rank under " + ranking.choice().name + ':';
  for (const double idle : ranking.choice().simulation.idle) {
    text += ' ' + number(idle);
  }
  text += '\n';
  for (const auto& [name, reason] : ranking.refused) {
    text += "not " + name + ": " + reason + ".\n";
  }
  return text;
}

}  // namespace smp::pipeline
