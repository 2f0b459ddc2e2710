// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <fstream>
#include <iterator>
#include <sstream>
#include <string>

#include "pipeline/generators.h"
#include "pipeline/ranking.h"
#include "pipeline/schedule_file.h"
#include "pipeline/simulator.h"
#include "pipeline/verifier.h"
#include "tests/pipeline/schedule_helpers.h"

namespace smp::pipeline {
namespace {

std::string page() {
  std::ifstream in("docs/schedules.md");
  return {std::istreambuf_iterator<char>(in), {}};
}

/// The text as a page shows it: indented by four blanks.
std::string shown(const std::string& text) {
  std::istringstream lines(text);
  std::string result;
  for (std::string line; std::getline(lines, line);) {
    result += (line.empty() ? "" : "    ") + line + '\n';
  }
  return result;
}

/// The options of a kind's picture.
ScheduleOptions pictured(const ScheduleKind& kind) {
  if (kind.name == "list") {
    auto costs = StageCosts::uniform(4);
    costs.forward[1] = 2;
    return ScheduleOptions(4, 4).costs(costs);
  }
  switch (kind.placement) {
    case Placement::kVShaped:
      return ScheduleOptions::v_shaped(2, 4);
    case Placement::kLooped:
      return ScheduleOptions::looped(2, 2, 4);
    default:
      return {4, 8};
  }
}

TEST(Page, ShowsEveryScheduleAsItIsDrawn) {
  const auto text = page();
  for (const auto& kind : schedule_kinds()) {
    auto options = pictured(kind);
    // These are made of slots in which a backward takes as long as a forward.
    if (kind.name == "simple" || kind.name == "interleaved" || kind.name == "forward_only") {
      options.costs(StageCosts::unit(options.stages()));
    }
    const auto schedule = lowered(kind, options);
    const auto picture = draw(simulate(schedule, options.edges(), options.costs()));
    expect_contains(text, "\n**`" + kind.name + "`**");
    expect_contains(text, "\n\n" + shown(picture) + "\n");
  }
}

TEST(Page, NamesEveryScheduleThatTrains) {
  const auto text = page();
  for (const auto& kind : schedule_kinds()) {
    if (kind.trains) {
      expect_contains(text, "\n| `" + kind.name + "` | ");
    }
  }
}

TEST(Page, ShowsTheForms) {
  const auto text = page();
  const auto csv = schedule_from_csv("0F0,0F1,,0B0,0B1\n,1F0,1I0,1W0,1F1,1B1\n", "page");
  expect_contains(text, shown("0F0,0F1,,0B0,0B1\n,1F0,1I0,1W0,1F1,1B1\n"));
  expect_contains(text, shown(to_string(lower(csv, chain_edges(2)))));
  expect_contains(text, shown(schedule_to_json(lowered(simple, ScheduleOptions(2, 1)))));
}

TEST(Page, ShowsARanking) {
  auto costs = StageCosts::uniform(4);
  costs.kept.assign(4, 1);
  const auto ranking =
      rank_schedules(ScheduleOptions(4, 8).costs(costs).memory_limit({4, 4, 4, 4}));
  const auto report = shown(to_string(ranking));
  const auto first_refused = report.find('\n', report.find("not simple")) + 1;
  expect_contains(page(), report.substr(0, first_refused));
}

TEST(Page, ShowsADeadlock) {
  const auto order = parse_schedule(
      "schedule ranks=2 microbatches=4 backward=yes rank_of_stage=0,1\n"
      "rank 0: 0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3\n"
      "rank 1: 1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3\n");
  const auto error = verify_error(lower(order, chain_edges(2)), chain_edges(2));
  expect_contains(page(), shown(error.substr(error.find("the schedule has"))));
}

}  // namespace
}  // namespace smp::pipeline
