// SPDX-License-Identifier: Apache-2.0
// What is made of a record: the trace, the picture and the page.

#include "pipeline/timeline_page.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <regex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "pipeline/timeline_picture.h"
#include "pipeline/trace.h"
#include "tests/pipeline/timeline_cases.h"

namespace smp::pipeline {
namespace {

using nlohmann::json;

/// Titles of actions begin with their text form.
std::multiset<std::string> actions_in_picture(const std::string& svg) {
  static const std::regex kTitle("<g data-m=\"-?[0-9]+\"><title>([0-9][^:]*):");
  std::multiset<std::string> found;
  for (std::sregex_iterator match(svg.begin(), svg.end(), kTitle), end; match != end; ++match) {
    found.insert(std::regex_replace((*match)[1].str(), std::regex("&gt;|&lt;"), "|"));
  }
  return found;
}

std::multiset<std::string> computes_of(const Schedule& schedule) {
  std::multiset<std::string> computes;
  for (int rank = 0; rank < schedule.ranks(); ++rank) {
    for (const Action& action : schedule.actions(rank)) {
      if (action.is_compute()) computes.insert(to_string(action));
    }
  }
  return computes;
}

std::string contents(const std::string& path) {
  std::ifstream in(path);
  return std::string(std::istreambuf_iterator<char>(in), {});
}

// --- trace ------------------------------------------------------------------------------------

TEST(Trace, HasEveryActionOnce) {
  const Simulation simulation = simulated(two_ranks());
  const json events = json::parse(to_trace(measured(2, &simulation))).at("traceEvents");
  std::map<int, std::multiset<std::string>> found;  // by process
  double forward = 0;
  for (const json& event : events) {
    if (event.at("ph") != "X") continue;
    found[event.at("pid")].insert(event.at("name").get<std::string>());
    if (event.at("cat") == "forward" && event.at("pid") == 0)
      forward += event.at("dur").get<double>();
  }
  std::multiset<std::string> once;
  const Schedule schedule = two_ranks();
  for (int rank = 0; rank < 2; ++rank) {
    for (const Action& action : schedule.actions(rank)) once.insert(to_string(action));
  }
  std::multiset<std::string> twice = once;
  twice.insert(once.begin(), once.end());
  EXPECT_EQ(found.at(0), twice) << "two steps of replica 0";
  EXPECT_EQ(found.at(1), once) << "the prediction";
  EXPECT_DOUBLE_EQ(forward, 2 * (1.0 + 1.0));
}

TEST(Trace, TimesAndArgumentsAreThoseOfTheRecords) {
  const json events = json::parse(to_trace(measured(2))).at("traceEvents");
  const auto send = std::find_if(events.begin(), events.end(), [](const json& event) {
    return event.at("name") == "1SEND_B0>0" && event.at("args").at("step") == "step 8";
  });
  ASSERT_NE(send, events.end());
  EXPECT_DOUBLE_EQ(send->at("ts").get<double>(), 25);
  EXPECT_DOUBLE_EQ(send->at("dur").get<double>(), 0.5);
  EXPECT_EQ(send->at("tid"), 1);
  EXPECT_EQ(
      send->at("args"),
      (json{{"step", "step 8"}, {"stage", 1}, {"microbatch", 0}, {"peer", 0}, {"bytes", 4096}}));
}

TEST(Trace, ArrowsBeginInASendAndEndInItsReceive) {
  const json events = json::parse(to_trace(measured())).at("traceEvents");
  const auto slice_at = [&](const json& at) -> std::string {
    for (const json& event : events) {
      if (event.at("ph") != "X" || event.at("tid") != at.at("tid")) continue;
      const double start = event.at("ts"), end = start + event.at("dur").get<double>();
      if (start <= at.at("ts") && at.at("ts") < end) return event.at("name");
    }
    return "nothing";
  };
  std::map<int, std::string> arrows;
  for (const json& event : events) {
    if (event.at("ph") == "s") arrows[event.at("id")] = slice_at(event);
    if (event.at("ph") == "f") arrows[event.at("id")] += " to " + slice_at(event);
  }
  EXPECT_EQ(arrows, (std::map<int, std::string>{{1, "0SEND_F0>1 to 1RECV_F0<0"},
                                                {2, "1SEND_B0>0 to 0RECV_B0<1"}}));
}

TEST(Trace, NamesReplicasAndRanks) {
  const Simulation simulation = simulated(two_ranks());
  const Timeline timeline = make_timeline(
      "", two_ranks(), {recorded(0, 1, 0), recorded(1, 1, 0), recorded(0, 1, 1), recorded(1, 1, 1)},
      &simulation);
  const json events = json::parse(to_trace(timeline)).at("traceEvents");
  std::set<std::string> processes;
  std::multiset<std::string> threads;
  for (const json& event : events) {
    if (event.at("name") == "process_name") {
      processes.insert(std::to_string(event.at("pid").get<int>()) + " " +
                       event.at("args").at("name").get<std::string>());
    }
    if (event.at("name") == "thread_name") threads.insert(event.at("args").at("name"));
  }
  EXPECT_EQ(processes, (std::set<std::string>{"0 replica 0", "1 replica 1", "2 predicted"}));
  EXPECT_EQ(threads.count("rank 0"), 3u);
  EXPECT_EQ(threads.count("rank 1"), 3u);
}

TEST(Trace, CountsWhatIsKept) {
  const json events = json::parse(to_trace(measured())).at("traceEvents");
  std::vector<double> kept;
  for (const json& event : events) {
    if (event.at("ph") == "C" && event.at("name") == "kept by rank 0") {
      kept.push_back(event.at("args").at("bytes"));
    }
  }
  EXPECT_EQ(kept, (std::vector<double>{2048, 0}));
}

// --- picture and page -------------------------------------------------------------------------

TEST(TimelinePicture, HasEveryComputeOfEverySchedule) {
  for (const Schedule& schedule : schedules()) {
    Timeline timeline;
    timeline.predicted = predicted_timeline(simulated(schedule));
    const std::string svg = to_svg(timeline);
    EXPECT_EQ(xml_error(svg), "");
    std::multiset<std::string> found = actions_in_picture(svg);
    for (const std::string& compute : computes_of(schedule)) {
      EXPECT_EQ(found.count(compute), 1u) << compute;
    }
    EXPECT_EQ(count(svg, "class=\"values arrow\"") + count(svg, "class=\"grads arrow\""),
              transfers_of(*timeline.predicted).size() + (schedule.has_backward() ? 2 : 1))
        << "an arrow for each transfer and those of the legend";
  }
}

TEST(TimelinePicture, ShowsMeasuredAndPredictedOnOneScale) {
  const Simulation simulation = simulated(two_ranks());
  const std::string svg = to_svg(measured(1, &simulation));
  EXPECT_EQ(xml_error(svg), "");
  const std::regex kForward(
      "<title>0F0:[^<]*</title><rect x=\"([0-9.]+)\" y=\"[0-9.]+\" "
      "width=\"([0-9.]+)\"");
  std::vector<double> widths, positions;
  for (std::sregex_iterator match(svg.begin(), svg.end(), kForward), end; match != end; ++match) {
    positions.push_back(std::stod((*match)[1]));
    widths.push_back(std::stod((*match)[2]));
  }
  ASSERT_EQ(widths.size(), 2u);
  EXPECT_EQ(positions[0], positions[1]);
  EXPECT_NEAR(widths[0], widths[1], 0.11) << "both last 1 us";
  const double axis = 8.5 * (widths[0] + 0.7);  // blocks are a hair shorter than their time
  const std::regex kLast(
      "<title>0REDUCE:[^<]*</title><rect x=\"([0-9.]+)\" y=\"[0-9.]+\" "
      "width=\"([0-9.]+)\"");
  std::smatch last;
  ASSERT_TRUE(std::regex_search(svg, last, kLast));
  EXPECT_NEAR(std::stod(last[1]) + std::stod(last[2]) + 0.7, positions[0] + axis, 1);
  EXPECT_LT(positions[0] + axis, std::stod(svg.substr(svg.find("width=\"") + 7)));
  EXPECT_EQ(count(svg, ">Measured<"), 1u);
  EXPECT_EQ(count(svg, ">Predicted<"), 1u);
  EXPECT_EQ(count(svg, ">56.5%<"), 1u) << "rank 0 as measured";
  EXPECT_EQ(count(svg, ">50.0%<"), 2u) << "both ranks as predicted";
}

TEST(TimelinePicture, SaysWhatAnActionIs) {
  expect_contains(to_svg(measured()),
                  "<title>1SEND_B0&gt;0: stage 1 sends gradients of microbatch 0 to stage 0\n"
                  "0.5 us, from 5 us to 5.5 us\n4.0 KiB</title>");
  expect_contains(to_svg(measured()),
                  "<title>0F0: forward of microbatch 0 on stage 0\n"
                  "1 us, from 0 us to 1 us\nthe rank keeps 2.0 KiB after it</title>");
}

TEST(TimelinePicture, EscapesItsTitle) {
  Timeline timeline = measured();
  timeline.title = "a <b> & \"c\"";
  const std::string page = to_html(timeline);
  EXPECT_EQ(xml_error(page), "");
  EXPECT_EQ(count(page, "a &lt;b&gt; &amp; &quot;c&quot;"), 3u) << "page, picture, heading";
  EXPECT_EQ(count(page, "a <b>"), 0u);
}

TEST(TimelinePicture, HasNoStepThatWasNotRecorded) {
  expect_contains(error_of([] { to_svg(measured(2), 2); }), "expected a step below 2, got 2");
}

TEST(TimelinePage, HasEveryStepAndNeedsNothingElse) {
  const Simulation simulation = simulated(two_ranks());
  const std::string page = to_html(measured(3, &simulation));
  EXPECT_EQ(xml_error(page), "");
  EXPECT_EQ(count(page, "<section>"), 3u);
  EXPECT_EQ(count(page, "<option>"), 3u);
  EXPECT_EQ(count(page, "<table>"), 3u);
  EXPECT_EQ(count(page, "prefers-color-scheme:dark"), 2u) << "one style for all pictures";
  EXPECT_EQ(count(page, "src="), 0u);
  EXPECT_EQ(count(page, "href="), 0u);
  EXPECT_EQ(count(page, "@import"), 0u);
  EXPECT_EQ(count(page, "http"), 1u + 3u) << "only as the names of XML namespaces";
  EXPECT_EQ(count(to_html(measured(1)), "<option>"), 0u);
}

TEST(TimelinePage, SaysWhereItsChartsAre) {
  const Simulation simulation = simulated(two_ranks());
  const std::string page = to_html(measured(3, &simulation));
  EXPECT_EQ(count(page, "<g class=\"lanes\" data-left=\"110.0\""), 2u * 3u)
      << "measured and predicted, in every step";
  EXPECT_EQ(count(page, "data-length=\"8.500\" data-end=\"8.500\" data-unit=\"us\""), 3u);
  EXPECT_EQ(count(page, "id=\"own\""), 1u);
  Timeline schedule;
  schedule.unit = TimeUnit::kSlots;
  schedule.predicted = predicted_timeline(simulation);
  const std::string alone = to_html(schedule);
  EXPECT_EQ(count(alone, "data-unit=\"slots\""), 1u);
  EXPECT_EQ(count(alone, "id=\"own\""), 0u) << "nothing beside it has another scale";
}

TEST(TimelinePage, LiesBesideItsTrace) {
  for (const char* path : {"folder/run", "folder/run.html", "folder/run.json"}) {
    EXPECT_EQ(timeline_files(path).page, "folder/run.html");
    EXPECT_EQ(timeline_files(path).trace, "folder/run.json");
  }
  const auto path = std::filesystem::path(::testing::TempDir()) / "timeline_test";
  const TimelineFiles files = write_timeline(measured(), path.string());
  EXPECT_EQ(contents(files.page), to_html(measured()));
  EXPECT_EQ(contents(files.trace), to_trace(measured()));
  const std::string missing = ::testing::TempDir() + "no_timelines/run";
  expect_contains(error_of([&] { write_timeline(measured(), missing); }),
                  missing + ".html: the timeline cannot be written: No such file");
}

}  // namespace
}  // namespace smp::pipeline
