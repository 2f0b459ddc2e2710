// SPDX-License-Identifier: Apache-2.0
#include "pipeline/timeline.h"

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

#include "pipeline/simulator.h"
#include "pipeline/timeline_page.h"
#include "pipeline/timeline_picture.h"
#include "pipeline/trace.h"
#include "tests/pipeline/schedule_helpers.h"

namespace smp::pipeline {
namespace {

using nlohmann::json;

constexpr int64_t kOrigin = 1'000'000'000;

// --- helpers ----------------------------------------------------------------------------------

Schedule two_ranks() {
  return from_lines(
      {"0F0 0SEND_F0>1 0RECV_B0<1 0B0 0REDUCE", "1RECV_F0<0 1F0 1B0 1SEND_B0>0 1REDUCE"},
      /*microbatches=*/1);
}

using Times = std::vector<std::pair<int64_t, int64_t>>;

/// Of `two_ranks`, in ns: 8500 in all, of which rank 0 waits 4800 and rank 1 1500, and then
/// nothing.
const std::vector<Times> kTimes = {
    {{0, 1000}, {1000, 1200}, {1200, 6000}, {6000, 8000}, {8000, 8500}},
    {{0, 1500}, {1500, 2500}, {2500, 5000}, {5000, 5500}, {5500, 5500}},
};

/// What rank `rank` records in one step after another that takes 20 us each.
RankTimeline recorded(int rank, int steps = 1, int replica = 0) {
  const Times& times = kTimes[rank];
  TimelineRecorder recorder(replica, rank, static_cast<int64_t>(times.size()), steps);
  for (size_t i = 0; i < times.size(); ++i) {
    if (two_ranks().actions(rank)[i].is_transfer()) recorder.set_bytes(i, 4096);
  }
  for (int step = 0; step < steps; ++step) {
    recorder.begin_step(step + 7);
    for (size_t i = 0; i < times.size(); ++i) {
      const int64_t begin = kOrigin + step * 20'000;
      recorder.record(i, begin + times[i].first, begin + times[i].second);
      recorder.record_kept(i, i == 0 ? 2048 : 0);
    }
  }
  return recorder.finish();
}

/// The same with two reductions beside the last actions, the second of which ends after them.
RankTimeline with_reductions(RankTimeline timeline) {
  for (size_t step = 0; step < timeline.steps.size(); ++step) {
    const int64_t begin = kOrigin + static_cast<int64_t>(step) * 20'000;
    timeline.steps[step].reductions = {{begin + 7000, begin + 7600, 512},
                                       {begin + 7600, begin + 9100, 256}};
  }
  return timeline;
}

Timeline measured(int steps = 1, const Simulation* predicted = nullptr) {
  return make_timeline("two ranks", two_ranks(), {recorded(1, steps), recorded(0, steps)},
                       predicted);
}

Simulation simulated(const Schedule& schedule) {
  return simulate(schedule, chain_edges(schedule.stages()), StageCosts::uniform(schedule.stages()));
}

size_t count(const std::string& text, const std::string& part) {
  size_t found = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++found;
  return found;
}

/// What is wrong with the text as XML, empty if nothing: tags that do not match, attributes without
/// quotes, a bare & or <. Knows comments, declarations and CDATA.
std::string xml_error(const std::string& text) {
  static const std::regex kEntity("&(amp|lt|gt|quot|#[0-9]+);");
  static const std::regex kTag(R"(<(/?)([A-Za-z][-\w:]*)((?:\s+[-\w:]+="[^"<]*")*)\s*(/?)>)");
  std::vector<std::string> open;
  size_t at = 0;
  while (at < text.size()) {
    std::smatch match;
    const auto begin = text.cbegin() + static_cast<std::ptrdiff_t>(at);
    const auto flags = std::regex_constants::match_continuous;
    if (text.compare(at, 9, "<!DOCTYPE") == 0) {
      at = text.find('>', at) + 1;
    } else if (text.compare(at, 9, "<![CDATA[") == 0) {
      at = text.find("]]>", at) + 3;
    } else if (text[at] == '<') {
      if (!std::regex_search(begin, text.cend(), match, kTag, flags)) {
        return "no tag: " + text.substr(at, 80);
      }
      if (match[1].length() > 0) {
        if (open.empty() || open.back() != match[2]) return "unexpected </" + match[2].str();
        open.pop_back();
      } else if (match[4].length() == 0) {
        open.push_back(match[2]);
      }
      at += static_cast<size_t>(match.length());
    } else {
      if (text[at] == '&' && !std::regex_search(begin, text.cend(), match, kEntity, flags)) {
        return "bare &: " + text.substr(at, 80);
      }
      ++at;
    }
  }
  return open.empty() ? "" : "not closed: " + open.back();
}

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

/// Schedules of every shape: several stages, split backwards, no backward.
std::vector<Schedule> schedules() {
  return {lowered(simple, ScheduleOptions(3, 4)),
          lowered(zero_bubble_h1, ScheduleOptions(4, 6)),
          lowered(zero_bubble_v, ScheduleOptions::v_shaped(2, 4)),
          lowered(breadth_first, ScheduleOptions::looped(2, 3, 4)),
          lowered(forward_only, ScheduleOptions(2, 3)),
          two_ranks()};
}

std::string contents(const std::string& path) {
  std::ifstream in(path);
  return std::string(std::istreambuf_iterator<char>(in), {});
}

// --- recording --------------------------------------------------------------------------------

TEST(TimelineRecorder, KeepsWhatItIsGiven) {
  const RankTimeline timeline = recorded(/*rank=*/1, /*steps=*/2);
  ASSERT_EQ(timeline.steps.size(), 2u);
  EXPECT_EQ(timeline.rank, 1);
  EXPECT_EQ(timeline.bytes, (std::vector<int64_t>{4096, 0, 0, 4096, 0}));
  EXPECT_EQ(timeline.steps[1].number, 8);
  EXPECT_EQ(timeline.steps[1].records[2].start, kOrigin + 22'500);
  EXPECT_EQ(timeline.steps[1].records[2].end, kOrigin + 25'000);
  EXPECT_EQ(timeline.steps[0].records[0].kept, 2048);
}

TEST(TimelineRecorder, GivesStepsThatBegan) {
  TimelineRecorder recorder(0, 0, 3, 2);
  EXPECT_TRUE(recorder.has_room());
  recorder.begin_step(1);
  EXPECT_EQ(recorder.finish().steps.size(), 1u);
  recorder.begin_step(2);
  EXPECT_FALSE(recorder.has_room());
  expect_contains(error_of([&] { recorder.begin_step(3); }), "timeline: there is room for 2 steps");
  expect_contains(error_of([] { TimelineRecorder(0, 0, -1, 2); }),
                  "expected no negative number, got -1 actions and 2 steps");
}

TEST(TimelineRecorder, TakesWhatIsKeptFromTheSimulation) {
  const Schedule schedule = two_ranks();
  StageCosts costs = StageCosts::uniform(2);
  costs.kept = {100, 200};
  const Simulation simulation = simulate(schedule, chain_edges(2), costs);
  TimelineRecorder recorder(0, 1, 5, 1);
  recorder.set_kept(simulation.timeline[1]);
  recorder.begin_step(1);
  std::vector<int64_t> kept;
  const RankTimeline timeline = recorder.finish();
  for (const ActionRecord& record : timeline.steps[0].records) kept.push_back(record.kept);
  EXPECT_EQ(kept, (std::vector<int64_t>{0, 200, 0, 0, 0}));
  expect_contains(error_of([&] { recorder.set_kept({}); }),
                  "expected what is kept after 5 actions, got 0");
}

TEST(TimelineRecorder, ItsClockGoesForward) {
  const int64_t before = TimelineRecorder::now();
  EXPECT_GT(before, 0);
  EXPECT_GE(TimelineRecorder::now(), before);
}

TEST(TimelineMessage, ComesBackEqual) {
  for (const int steps : {0, 1, 3}) {
    const RankTimeline timeline = recorded(/*rank=*/0, steps, /*replica=*/2);
    EXPECT_TRUE(unpack_timeline(pack(timeline)) == timeline);
    const RankTimeline reduced = with_reductions(timeline);
    EXPECT_TRUE(unpack_timeline(pack(reduced)) == reduced);
    EXPECT_EQ(reduced == timeline, steps == 0);
  }
  EXPECT_FALSE(recorded(0) == recorded(1));
}

TEST(TimelineMessage, RefusesOtherNumbers) {
  const std::vector<int64_t> whole = pack(recorded(0));
  for (size_t length = 0; length < whole.size(); ++length) {
    const std::vector<int64_t> part(whole.begin(), whole.begin() + static_cast<long>(length));
    expect_contains(error_of([&] { unpack_timeline(part); }),
                    "the timeline of a rank does not fit");
  }
  auto longer = whole;
  longer.push_back(0);
  expect_contains(error_of([&] { unpack_timeline(longer); }),
                  "does not fit its 27 numbers at number 26");
  expect_contains(error_of([] { unpack_timeline({0, 0, -1}); }), "the timeline of a rank");
}

// --- clocks -----------------------------------------------------------------------------------

TEST(ClockOffset, ComesFromTheTripWithTheLeastDelay) {
  // The other clock is 5000 ahead; the second trip takes 100 there and 60 back.
  const ClockOffset offset =
      clock_offset({{0, 5900, 1000}, {2000, 7100, 2160}, {3000, 8050, 3400}});
  EXPECT_EQ(offset.offset, 5020);
  EXPECT_EQ(offset.error, 80);
}

TEST(ClockOffset, IsWithinItsError) {
  for (const int64_t ahead : {int64_t{-3'000'000'000}, int64_t{0}, int64_t{12'345}}) {
    for (int64_t there = 0; there < 50; there += 7) {
      for (int64_t back = 0; back < 50; back += 11) {
        const ClockOffset offset = clock_offset({{100, 100 + there + ahead, 100 + there + back}});
        EXPECT_LE(std::abs(offset.offset - ahead), offset.error);
      }
    }
  }
}

TEST(ClockOffset, KnowsItsOwnClock) {
  EXPECT_TRUE(clock_offset({{100, 100, 140}}).may_be_none()) << "answered at once";
  EXPECT_TRUE(clock_offset({{100, 140, 140}}).may_be_none()) << "answered at the end";
  EXPECT_FALSE(clock_offset({{100, 141, 140}}).may_be_none()) << "answered later than received";
  EXPECT_FALSE(clock_offset({{100, 99, 140}}).may_be_none()) << "answered before the question";
}

TEST(ClockOffset, NeedsTripsThatCanBe) {
  expect_contains(error_of([] { clock_offset({}); }), "expected a round trip");
  expect_contains(error_of([] {
                    clock_offset({{10, 0, 9}});
                  }),
                  "expected an answer after its question, got one sent at 10 ns and received at 9");
}

TEST(ClockOffset, BringsAnotherHostsTimesHome) {
  RankTimeline away = recorded(1, 2);
  away.shift(777'777);
  EXPECT_EQ(away.steps[1].records[2].start, kOrigin + 22'500 + 777'777);
  EXPECT_EQ(away.steps[1].records[2].end, kOrigin + 25'000 + 777'777);
  const ClockOffset offset = clock_offset({{100, 100 + 777'777, 100}});
  away.shift(-offset.offset);
  EXPECT_TRUE(away == recorded(1, 2));
}

// --- steps ------------------------------------------------------------------------------------

TEST(Timeline, HasTheTimesOfAStepMadeByHand) {
  const Timeline timeline = measured(/*steps=*/2);
  ASSERT_EQ(timeline.measured.size(), 2u);
  const StepTimeline& step = timeline.measured[1];
  EXPECT_EQ(step.name, "step 8");
  EXPECT_DOUBLE_EQ(step.begin, 20);
  EXPECT_DOUBLE_EQ(step.makespan, 8.5);
  ASSERT_EQ(step.lanes.size(), 2u);
  EXPECT_EQ(step.lanes[1].rank, 1);
  EXPECT_DOUBLE_EQ(step.lanes[0].busy(), 3.7);
  EXPECT_DOUBLE_EQ(step.lanes[1].busy(), 4.0);
  EXPECT_DOUBLE_EQ(step.idle(step.lanes[0]), 4.8 / 8.5);
  EXPECT_DOUBLE_EQ(step.idle(step.lanes[1]), 4.5 / 8.5);
  EXPECT_DOUBLE_EQ(step.idle(), 9.3 / 17);
  EXPECT_DOUBLE_EQ(step.lanes[1].time(Action::Kind::kBackward), 2.5);
  EXPECT_DOUBLE_EQ(step.lanes[0].peak_memory(), 2048);
}

TEST(Timeline, HasTheReductionsBesideTheActions) {
  RankTimeline moved = with_reductions(recorded(0));
  moved.shift(500);
  moved.shift(-500);
  const Timeline timeline = make_timeline("", two_ranks(), {moved, recorded(1)}, nullptr);
  const StepTimeline& step = timeline.measured[0];
  EXPECT_DOUBLE_EQ(step.makespan, 9.1) << "what ends last ends the step";
  ASSERT_EQ(step.lanes[0].reductions.size(), 2u);
  EXPECT_TRUE(step.lanes[1].reductions.empty());
  EXPECT_DOUBLE_EQ(step.lanes[0].reductions[0].start, 7);
  EXPECT_DOUBLE_EQ(step.lanes[0].reductions[1].end, 9.1);
  EXPECT_EQ(step.lanes[0].reductions[1].bytes, 256);

  std::vector<json> found;
  const json events = json::parse(to_trace(timeline)).at("traceEvents");
  for (const json& event : events) {
    if (event.at("ph") == "X" && event.at("tid").get<int>() > 1) found.push_back(event);
  }
  ASSERT_EQ(found.size(), 2u);
  EXPECT_EQ(found[0].at("name"), "bucket 1 of 2 summed over the replicas");
  EXPECT_DOUBLE_EQ(found[0].at("ts").get<double>(), 7);
  EXPECT_NEAR(found[0].at("dur").get<double>(), 0.6, 1e-9);
  EXPECT_EQ(found[1].at("args"), (json{{"step", "step 7"}, {"bytes", 256}}));
  EXPECT_EQ(std::count_if(events.begin(), events.end(),
                          [](const json& event) {
                            return event.at("name") == "thread_name" &&
                                   event.at("args").at("name") == "rank 0 reduces";
                          }),
            1);

  const std::string svg = to_svg(timeline);
  EXPECT_EQ(xml_error(svg), "");
  EXPECT_EQ(count(svg,
                  "<title>bucket 2 of 2 summed over the replicas\n1.5 us, from 7.6 us to 9.1 us"
                  "\n256 B</title>"),
            1u);
}

TEST(Timeline, PredictsWhatTheSimulatorSays) {
  for (const Schedule& schedule : schedules()) {
    const Simulation simulation = simulated(schedule);
    const StepTimeline step = predicted_timeline(simulation);
    EXPECT_EQ(step.makespan, simulation.makespan);
    for (int rank = 0; rank < schedule.ranks(); ++rank) {
      EXPECT_NEAR(step.idle(step.lanes[rank]) * simulation.makespan, simulation.idle[rank], 1e-9);
    }
    EXPECT_NEAR(step.idle(), simulation.bubble(), 1e-12);
  }
}

TEST(Timeline, SaysWhatDoesNotFit) {
  const auto error = [](const std::vector<RankTimeline>& ranks) {
    return error_of([&] { make_timeline("", two_ranks(), ranks, nullptr); });
  };
  expect_contains(error({}), "expected what every rank recorded, got nothing");
  expect_contains(error({recorded(0)}), "expected all 2 ranks of each replica, got 1 ranks");
  expect_contains(error({recorded(1)}), "expected that of rank 0 of replica 0");
  expect_contains(error({recorded(0), recorded(0)}), "expected that of rank 1 of replica 0");
  expect_contains(error({recorded(0, 2), recorded(1, 1)}), "expected 2 steps, got 1.");
  auto other = recorded(1);
  other.steps[0].number = 9;
  expect_contains(error({recorded(0), other}),
                  "timeline of rank 1 of replica 0: expected step 7, got step 9");
  other = recorded(1);
  other.bytes.pop_back();
  expect_contains(error({recorded(0), other}), "expected the schedule's 5 actions, got 4");
}

TEST(Timeline, FindsTheReceiveOfEachSend) {
  for (const Schedule& schedule : schedules()) {
    const StepTimeline step = predicted_timeline(simulated(schedule));
    size_t sends = 0;
    for (const Lane& lane : step.lanes) {
      sends += std::count_if(lane.actions.begin(), lane.actions.end(),
                             [](const TimedAction& timed) { return timed.action.is_send(); });
    }
    const auto transfers = transfers_of(step);
    EXPECT_EQ(transfers.size(), sends);
    for (const Transfer& transfer : transfers) {
      EXPECT_EQ(counterpart(step.lanes[transfer.from_lane].actions[transfer.send].action),
                step.lanes[transfer.to_lane].actions[transfer.receive].action);
    }
  }
}

TEST(Timeline, KeepsReplicasApart) {
  const Timeline timeline = make_timeline(
      "", two_ranks(), {recorded(0, 1, 1), recorded(1, 1, 0), recorded(1, 1, 1), recorded(0, 1, 0)},
      nullptr);
  const StepTimeline& step = timeline.measured[0];
  ASSERT_EQ(step.lanes.size(), 4u);
  EXPECT_EQ(step.lanes[2].replica, 1);
  EXPECT_EQ(step.lanes[2].rank, 0);
  const auto transfers = transfers_of(step);
  EXPECT_EQ(transfers.size(), 4u);
  for (const Transfer& transfer : transfers) {
    EXPECT_EQ(step.lanes[transfer.from_lane].replica, step.lanes[transfer.to_lane].replica);
  }
}

// --- text -------------------------------------------------------------------------------------

TEST(TimelineText, ComparesMeasuredAndPredicted) {
  Simulation simulation = simulated(two_ranks());  // 6 long, each rank busy for 3
  EXPECT_EQ(
      to_string(measured(1, &simulation)),
      "step 7: 8.5 us, 54.7% idle; predicted: 6 us, 50.0% idle (measured +41.7%)\n"
      "\n"
      "  rank   idle  predicted  forward  backward  send  reduce   wait  other  kept at most\n"
      "  ----  -----  ---------  -------  --------  ----  ------  -----  -----  ------------\n"
      "     0  56.5%      50.0%    11.8%     23.5%  2.4%    5.9%  56.5%   0.0%       2.0 KiB\n"
      "     1  52.9%      50.0%    11.8%     29.4%  5.9%    0.0%  17.6%  35.3%       2.0 KiB\n");
}

TEST(TimelineText, ShowsThePredictionAlone) {
  Timeline timeline;
  timeline.unit = TimeUnit::kSlots;
  timeline.predicted = predicted_timeline(simulated(two_ranks()));
  EXPECT_EQ(to_string(timeline),
            "predicted: 6 slots, 50.0% idle\n"
            "\n"
            "  rank   idle  forward  backward   wait  other\n"
            "  ----  -----  -------  --------  -----  -----\n"
            "     0  50.0%    16.7%     33.3%  50.0%   0.0%\n"
            "     1  50.0%    16.7%     33.3%  16.7%  33.3%\n");
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
  expect_contains(error_of([] { write_timeline(measured(), "/no/such/folder/run"); }),
                  "/no/such/folder/run.html: the timeline cannot be written: No such file");
}

}  // namespace
}  // namespace smp::pipeline
