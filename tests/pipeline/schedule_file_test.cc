// SPDX-License-Identifier: Apache-2.0
#include "pipeline/schedule_file.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "pipeline/generators.h"
#include "pipeline/verifier.h"
#include "tests/pipeline/schedule_helpers.h"

namespace smp::pipeline {
namespace {

std::string csv_error(const std::string& text) {
  return error_of([&] { schedule_from_csv(text, "s.csv"); });
}

std::string json_error(const std::string& text) {
  return error_or_none([&] { schedule_from_json(text, "s.json"); });
}

// --- CSV --------------------------------------------------------------------------------------

TEST(Csv, HasARowOfComputesForEachRank) {
  const auto schedule = lowered(zero_bubble_h1, ScheduleOptions(2, 2));
  EXPECT_EQ(csv_of(schedule), "0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1I0,1F1,1I1,1W0,1W1\n");
}

TEST(Csv, KeepsEveryComputeOrder) {
  for (const auto& kind : schedule_kinds()) {
    const auto options = pipeline_for(kind);
    const auto order = kind.generate(options);
    EXPECT_EQ(schedule_from_csv(csv_of(order), "s.csv"), order) << kind.name;
    // Lowering is all that a schedule has beyond its CSV form.
    const auto schedule = lower(order, options.edges());
    EXPECT_EQ(lower(schedule_from_csv(csv_of(schedule), "s.csv"), options.edges()), schedule)
        << kind.name;
  }
}

// The output of torch's _dump_csv: blank cells for idle time, and lines that end as in DOS.
TEST(Csv, ReadsWhatTorchWrites) {
  const auto order = schedule_from_csv(
      "0F0,0F1,,,0B0,,0B1\r\n"
      ",1F0,1I0,1W0,1F1,1B1,\r\n",
      "torch.csv");
  EXPECT_EQ(to_string(order),
            "schedule ranks=2 microbatches=2 backward=yes rank_of_stage=0,1\n"
            "rank 0: 0F0 0F1 0B0 0B1\n"
            "rank 1: 1F0 1I0 1W0 1F1 1B1\n");
  verify(lower(order, chain_edges(2)), chain_edges(2), VerifyOptions().credit(2));
}

TEST(Csv, RunsOverlappedActionsOneAfterTheOther) {
  const auto order =
      schedule_from_csv("0F0,1F0,(0F1;1B0)OVERLAP_F_B,(1F1; 0B0)OVERLAP_F_B,1B1,0B1\n", "s.csv");
  EXPECT_EQ(to_string(order),
            "schedule ranks=1 microbatches=2 backward=yes rank_of_stage=0,0\n"
            "rank 0: 0F0 1F0 0F1 1B0 1F1 0B0 1B1 0B1\n");
}

TEST(Csv, FindsOutWhatItDoesNotSay) {
  const auto order = schedule_from_csv("0F0, 3F0\n\n1F0,2F0", "s.csv");
  EXPECT_EQ(order.rank_of_stage(), (std::vector<int>{0, 1, 1, 0}));
  EXPECT_EQ(order.microbatches(), 1);
  EXPECT_FALSE(order.has_backward());
}

TEST(Csv, ErrorsSayWhere) {
  expect_contains(csv_error("0F0,0F1\n1F0, 1X1\n"),
                  "cannot read the action \"1X1\" at s.csv, line 2, column 6: position 1: expected "
                  "F, B, I, W");
  expect_contains(csv_error("0F0,0SEND_F0>1\n"),
                  "cannot read the schedule: s.csv, line 1, column 5: expected computes only, as "
                  "0F3, 1B0, 1I0 and 1W0, got 0SEND_F0>1. Leave transfers out");
  expect_contains(
      csv_error("0F0,1F0\n\n0F1\n"),
      "cannot read the schedule: s.csv, line 3, column 1: expected all computes of "
      "stage 0 on rank 0, got 0F1 on rank 1. Put all computes of a stage into one row.");
  expect_contains(csv_error("0F0\n2F0\n"),
                  "cannot read the schedule: s.csv: expected computes of all stages to 2, got none "
                  "of stage 1.");
  expect_contains(csv_error("\n"),
                  "cannot read the schedule: s.csv: expected a row of computes for each rank, got "
                  "none.");
  expect_contains(csv_error("0F99999999\n"),
                  "line 1, column 1: expected stages and microbatches below 1048576, got "
                  "0F99999999.");
}

// --- JSON -------------------------------------------------------------------------------------

TEST(Json, HasTheDocumentedForm) {
  const auto schedule = lowered(simple, ScheduleOptions(2, 1));
  EXPECT_EQ(schedule_to_json(schedule),
            "{\n"
            "  \"format\": \"smp schedule\",\n"
            "  \"version\": 1,\n"
            "  \"microbatches\": 1,\n"
            "  \"backward\": true,\n"
            "  \"rank_of_stage\": [0,1],\n"
            "  \"actions\": [\n"
            "    [\"0F0\",\"0SEND_F0>1\",\"0RECV_B0<1\",\"0B0\",\"0REDUCE\"],\n"
            "    [\"1RECV_F0<0\",\"1F0\",\"1B0\",\"1SEND_B0>0\",\"1REDUCE\"]\n"
            "  ]\n"
            "}\n");
}

TEST(Json, KeepsEverySchedule) {
  for (const auto& kind : schedule_kinds()) {
    const auto options = pipeline_for(kind);
    const auto order = kind.generate(options);
    const auto schedule = lower(order, options.edges());
    EXPECT_EQ(schedule_from_json(schedule_to_json(order), "s.json"), order) << kind.name;
    EXPECT_EQ(schedule_from_json(schedule_to_json(schedule), "s.json"), schedule) << kind.name;
  }
}

TEST(Json, RefusesNumbersThatItDoesNotHave) {
  const std::string text = R"({"format": "smp schedule", "version": 1, "microbatches": 1,
      "backward": false, "rank_of_stage": [0], "actions": [["0F0", "2147483647F0"]]})";
  expect_contains(
      json_error(text),
      "cannot read the schedule: s.json, actions[0][1]: expected stages "
      "from 0 to 0 and microbatches from 0 to 0, got 2147483647F0. Correct the action, or "
      "the numbers at the beginning.");
}

TEST(Json, ErrorsSayWhere) {
  const auto good = schedule_to_json(lowered(simple, ScheduleOptions(2, 1)));
  const auto error_with = [&](const std::string& text, const std::string& other) {
    auto changed = good;
    changed.replace(changed.find(text), text.size(), other);
    return json_error(changed);
  };
  EXPECT_EQ(json_error(good), "");
  expect_contains(error_with("smp schedule", "smp graph"),
                  "s.json: \"format\": expected \"smp schedule\", got \"smp graph\".");
  expect_contains(error_with("\"version\": 1", "\"version\": 2"),
                  "s.json: \"version\": expected 1, got 2.");
  expect_contains(error_with("\"microbatches\": 1", "\"microbatches\": 0"),
                  "s.json: \"microbatches\": expected an integer from 1");
  expect_contains(error_with("[0,1]", "[0,2]"),
                  "s.json: \"rank_of_stage[1]\": expected an integer from 0 to 1, got 2.");
  expect_contains(
      error_with("[0,1]", "[0]"),
      "s.json: \"rank_of_stage\": expected a rank for each stage, and at least 2 stages "
      "for 2 ranks");
  expect_contains(error_with("true", "\"yes\""), "s.json: \"backward\": expected true or false");
  expect_contains(error_with("1SEND_B0>0", "1SEND_B0"),
                  "cannot read the action \"1SEND_B0\" at s.json, actions[1][3]: position 8");
  expect_contains(error_with("\"1B0\"", "7"),
                  "s.json: \"actions[1][2]\": expected a string, got 7");
  expect_contains(json_error("{\"format\": \"smp schedule\", \"version\": 1, \"actions\": []}"),
                  "s.json: \"actions\": expected a list of actions for each rank");
  expect_contains(json_error("{"), "s.json: malformed JSON at line 1");
}

// --- files ------------------------------------------------------------------------------------

class Files : public ::testing::Test {
 protected:
  static std::string path(const std::string& name) { return ::testing::TempDir() + name; }
  static Schedule loaded(const std::string& name, const std::string& text) {
    std::ofstream(path(name), std::ios::binary) << text;
    return load_schedule(path(name));
  }
};

TEST_F(Files, AreReadInTheFormOfTheirName) {
  const auto order = zero_bubble_v(ScheduleOptions::v_shaped(2, 4));
  EXPECT_EQ(loaded("schedule.csv", csv_of(order)), order);
  EXPECT_EQ(loaded("schedule.json", schedule_to_json(order)), order);
  EXPECT_EQ(loaded("schedule.txt", to_string(order)), order);
  EXPECT_TRUE(is_compute_order(order));
  const auto whole = lower(order, chain_edges(4));
  EXPECT_EQ(loaded("lowered.json", schedule_to_json(whole)), whole);
  EXPECT_FALSE(is_compute_order(whole));
}

/// Gathers, copies, recalls and outputs follow from the program.
TEST_F(Files, HaveNoActionsThatStepsAdd) {
  for (const char* added : {"0UNSHARD", "0SEND_COPY>1", "0RECALL0", "1OUTPUTS"}) {
    const std::string text =
        "schedule ranks=2 microbatches=1 backward=yes rank_of_stage=0,1\nrank 0: ";
    const Schedule schedule = parse_schedule(text + added + " 0F0 0B0\nrank 1: 1F0 1B0\n");
    for (const std::string ending : {".txt", ".json"}) {
      const bool is_text = ending == ".txt";
      const std::string name = "added" + ending;
      EXPECT_EQ(error_of([&] {
                  loaded(name, is_text ? to_string(schedule) : schedule_to_json(schedule));
                }),
                "[smp] cannot read the schedule: " + path(name) +
                    ": expected computes, transfers and reduces, got " + added +
                    ". Leave it out: such actions follow from the program.");
    }
  }
}

TEST_F(Files, ErrorsNameTheFile) {
  expect_contains(error_of([&] { load_schedule(path("schedule.yaml")); }),
                  "the name of a schedule's file must say its form: expected it to end in .csv, "
                  ".json or .txt, got \"" +
                      path("schedule.yaml") + "\". Rename the file.");
  expect_contains(error_of([&] { load_schedule(".csv"); }), "expected it to end in .csv");
  expect_contains(error_of([&] { load_schedule(path("missing.csv")); }),
                  path("missing.csv") + ": cannot read the schedule");
}

}  // namespace
}  // namespace smp::pipeline
