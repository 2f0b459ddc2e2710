// SPDX-License-Identifier: Apache-2.0
// The trace and the page that are made of a record.

#include "pipeline/timeline_page.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "pipeline/trace.h"
#include "tests/page_data.h"
#include "tests/pipeline/timeline_cases.h"

namespace smp::pipeline {
namespace {

using nlohmann::json;
using smp::testing::data_in;

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
  std::map<int, std::multiset<std::string>> found;  // events by process
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

// --- the page ---------------------------------------------------------------------------------

std::multiset<std::string> computes_in(const json& step) {
  std::multiset<std::string> found;
  for (const json& lane : step.at("lanes")) {
    for (const json& action : lane.at("actions")) {
      static const std::set<std::string> kComputes = {"forward", "backward", "inputs", "weights"};
      if (kComputes.count(action.at("kind")) > 0) found.insert(action.at("name"));
    }
  }
  return found;
}

TEST(TimelinePage, HasEveryComputeOfEverySchedule) {
  for (const Schedule& schedule : schedules()) {
    Timeline timeline;
    timeline.predicted = predicted_timeline(simulated(schedule));
    const json data = json::parse(page_data(timeline));
    ASSERT_EQ(data.at("steps").size(), 1u);
    EXPECT_EQ(data.at("measured"), false);
    EXPECT_EQ(computes_in(data.at("steps")[0]), computes_of(schedule));
  }
}

TEST(TimelinePage, TransfersGoFromASendToItsReceive) {
  for (const Schedule& schedule : schedules()) {
    Timeline timeline;
    timeline.predicted = predicted_timeline(simulated(schedule));
    const json step = json::parse(page_data(timeline)).at("predicted");
    EXPECT_EQ(step.at("transfers").size(), deliveries_of(*timeline.predicted).size());
    for (const json& transfer : step.at("transfers")) {
      const json& send = step["lanes"][transfer.at("from").get<size_t>()]["actions"]
                             [transfer.at("send").get<size_t>()];
      const json& receive = step["lanes"][transfer.at("to").get<size_t>()]["actions"]
                                [transfer.at("receive").get<size_t>()];
      EXPECT_EQ(send.at("kind"), "send");
      EXPECT_EQ(receive.at("kind"), "wait");
      EXPECT_EQ(send.at("m"), receive.at("m"));
      const bool is_gradient = send.at("name").get<std::string>().find("_B") != std::string::npos;
      EXPECT_EQ(transfer.at("kind"), is_gradient ? "grads" : "values") << send.at("name");
    }
  }
}

TEST(TimelinePage, HasMeasuredStepsAndThePrediction) {
  const Simulation simulation = simulated(two_ranks());
  const Timeline timeline = measured(3, &simulation);
  const json data = json::parse(page_data(timeline));
  EXPECT_EQ(data.at("title"), "two ranks");
  EXPECT_EQ(data.at("unit"), "us");
  EXPECT_EQ(data.at("measured"), true);
  ASSERT_EQ(data.at("steps").size(), 3u);
  for (size_t i = 0; i < 3; ++i) {
    const json& step = data["steps"][i];
    EXPECT_EQ(step.at("name"), timeline.measured[i].name);
    EXPECT_EQ(step.at("headline"), headline(timeline.measured[i], timeline));
    EXPECT_EQ(step.at("table"), json(table_of(timeline.measured[i], timeline)));
    EXPECT_DOUBLE_EQ(step.at("makespan"), 8.5);
    EXPECT_DOUBLE_EQ(step.at("lanes")[0].at("idle"),
                     timeline.measured[i].idle(timeline.measured[i].lanes[0]));
  }
  EXPECT_DOUBLE_EQ(data.at("predicted").at("makespan"), simulation.makespan);
}

TEST(TimelinePage, SaysWhatAnActionIs) {
  const json step = json::parse(page_data(measured())).at("steps")[0];
  EXPECT_EQ(step.at("lanes")[0].at("actions")[0],
            (json{{"name", "0F0"},
                  {"text", "forward of microbatch 0 on stage 0"},
                  {"kind", "forward"},
                  {"stage", 0},
                  {"m", 0},
                  {"start", 0.0},
                  {"end", 1.0},
                  {"bytes", 0},
                  {"keeps", 2048.0}}));
  const json& actions = step.at("lanes")[1].at("actions");
  const auto send = std::find_if(actions.begin(), actions.end(),
                                 [](const json& action) { return action["name"] == "1SEND_B0>0"; });
  ASSERT_NE(send, actions.end());
  EXPECT_EQ(send->at("text"), "stage 1 sends gradients of microbatch 0 to stage 0");
  EXPECT_DOUBLE_EQ(send->at("start"), 5);
  EXPECT_DOUBLE_EQ(send->at("end"), 5.5);
  EXPECT_EQ(send->at("bytes"), 4096);
}

TEST(TimelinePage, NeedsNothingElse) {
  const Timeline timeline = measured(3);
  const std::string page = to_html(timeline);
  EXPECT_EQ(data_in(page), json::parse(page_data(timeline)));
  EXPECT_EQ(count(page, "<script"), 2u);
  EXPECT_EQ(count(page, "</script>"), 2u);
  EXPECT_EQ(count(page, "@title@") + count(page, "@style@") + count(page, "@data@"), 0u);
  for (const char* outside : {"src=", "href=\"", "@import", "https:"}) {
    EXPECT_EQ(count(page, outside), 0u) << outside;
  }
}

TEST(TimelinePage, TitlesAreNoMarkup) {
  Timeline timeline = measured();
  timeline.title = "a </script><b> & \"c\"\xff\x1b";
  const std::string page = to_html(timeline);
  EXPECT_EQ(count(page, "</script>"), 2u);
  EXPECT_EQ(count(page, "<title>a &lt;/script>&lt;b> &amp; \"c\"\\xff\\x1b</title>"), 1u);
  EXPECT_EQ(data_in(page).at("title"), "a </script><b> & \"c\"\\xff\\x1b");
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
