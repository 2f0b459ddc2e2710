// SPDX-License-Identifier: Apache-2.0
#include "tools/schedule_view.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include "core/check.h"
#include "pipeline/generators.h"
#include "pipeline/schedule_file.h"
#include "smp/config.h"

namespace smp::tools {
namespace {

using pipeline::ScheduleOptions;

Config config_of(int partitions, int microbatches) {
  return Config().partitions(partitions).microbatches(microbatches);
}

std::string error_of(const std::string& schedule, const Config& config) {
  try {
    show_schedule(schedule, config, "text");
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

void expect_contains(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << "expected \"" << part << "\" in:\n" << text;
}

std::string temporary(const std::string& name) {
  return (std::filesystem::path(::testing::TempDir()) / name).string();
}

std::string contents(const std::string& path) {
  std::ifstream in(path);
  return std::string(std::istreambuf_iterator<char>(in), {});
}

TEST(ScheduleView, DrawsAScheduleAsText) {
  EXPECT_EQ(show_schedule("1f1b", config_of(2, 2), "text"),
            "1f1b, 2 ranks, 2 microbatches\n"
            "\n"
            "rank 0 F0 F1 .  .  B0 -  .  B1 -\n"
            "rank 1 .  F0 B0 -  F1 B1 -  .  .\n"
            "\n"
            "predicted: 9 slots, 33.3% idle\n"
            "\n"
            "  rank   idle  forward  backward   wait  other  kept at most\n"
            "  ----  -----  -------  --------  -----  -----  ------------\n"
            "     0  33.3%    22.2%     44.4%  33.3%   0.0%             2\n"
            "     1  33.3%    22.2%     44.4%  11.1%  22.2%             1\n");
}

TEST(ScheduleView, DrawsEveryScheduleInEveryForm) {
  for (const auto& kind : pipeline::schedule_kinds()) {
    const Config config = config_of(4, 8);
    expect_contains(show_schedule(kind.name, config, "text"), kind.name + ", 4 ranks");
    expect_contains(show_schedule(kind.name, config, "html"), "<!DOCTYPE html>");
    const auto schedule = pipeline::schedule_from_json(show_schedule(kind.name, config, "json"),
                                                       "the schedule drawn");
    EXPECT_EQ(schedule.ranks(), 4);
    EXPECT_EQ(schedule.has_backward(), kind.trains);
  }
}

TEST(ScheduleView, PlacesStagesAsTheScheduleNeedsThem) {
  const auto stages = [](const std::string& name, int virtual_stages) {
    const Config config = config_of(2, 4).virtual_stages(virtual_stages);
    return pipeline::schedule_from_json(show_schedule(name, config, "json"), name).rank_of_stage();
  };
  EXPECT_EQ(stages("zb_h1", 0), (std::vector<int>{0, 1}));
  EXPECT_EQ(stages("breadth_first", 0), (std::vector<int>{0, 1, 0, 1}));
  EXPECT_EQ(stages("breadth_first", 3), (std::vector<int>{0, 1, 0, 1, 0, 1}));
  EXPECT_EQ(stages("zbv", 0), (std::vector<int>{0, 1, 1, 0}));
  expect_contains(error_of("zbv", config_of(2, 4).virtual_stages(3)), "zbv");
}

TEST(ScheduleView, ReadsFiles) {
  const auto order = pipeline::make_schedule("zb_h1", ScheduleOptions(3, 4));
  const auto whole = pipeline::lower(order, {{0, 1}, {1, 2}, {0, 2}});  // order with a skip
  std::ofstream(temporary("order.json")) << pipeline::schedule_to_json(order);
  std::ofstream(temporary("whole.txt")) << to_string(whole);
  const auto from_name = show_schedule("zb_h1", config_of(3, 4), "text");
  const auto body = from_name.substr(from_name.find('\n'));
  for (const char* file : {"order", "whole"}) {
    const auto path = temporary(std::string(file) + (file[0] == 'o' ? ".json" : ".txt"));
    EXPECT_EQ(show_schedule(path, Config(), "text"),
              std::string(file) + ", 3 ranks, 4 microbatches" + body);
  }
}

TEST(ScheduleView, MakesWhatItsPageShows) {
  expect_contains(contents("docs/performance.md"), show_schedule("1f1b", config_of(2, 2), "text"));
}

TEST(ScheduleView, CountsOneOfAThing) {
  expect_contains(show_schedule("simple", config_of(1, 1), "text"),
                  "simple, 1 rank, 1 microbatch\n\nrank 0 F0 B0 -\n");
}

TEST(ScheduleView, SaysWhatIsWrong) {
  expect_contains(error_of("sidewise", config_of(2, 4)), "there is no schedule \"sidewise\"");
  expect_contains(error_of(temporary("missing.csv"), Config()), "missing.csv");
}

}  // namespace
}  // namespace smp::tools
