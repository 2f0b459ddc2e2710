// SPDX-License-Identifier: Apache-2.0
#include "pipeline/timeline.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>
#include <tuple>
#include <utility>

#include "core/check.h"
#include "core/table.h"
#include "partitioner/format.h"

namespace smp::pipeline {
namespace {

using Kind = Action::Kind;

constexpr double kNsPerUs = 1000;

/// Reads the output of `pack`.
class Unpacker {
 public:
  explicit Unpacker(const std::vector<int64_t>& numbers) : numbers_(numbers) {}

  int64_t next() {
    check(position_ < numbers_.size());
    return numbers_[position_++];
  }

  /// A number of things, each of at least one number of those that are left.
  size_t count() {
    const int64_t value = next();
    check(value >= 0 && static_cast<size_t>(value) <= numbers_.size() - position_);
    return static_cast<size_t>(value);
  }

  void finish() const { check(position_ == numbers_.size()); }

 private:
  void check(bool fits) const {
    SMP_INTERNAL_ASSERT(fits, "the timeline of a rank does not fit its ", numbers_.size(),
                        " numbers at number ", position_);
  }

  const std::vector<int64_t>& numbers_;
  size_t position_ = 0;
};

using Recorded = std::vector<const RankTimeline*>;

void check_recorded(const Schedule& schedule, const Recorded& recorded) {
  SMP_INTERNAL_ASSERT(!recorded.empty(),
                      "timeline: expected what every rank recorded, got nothing");
  const auto ranks = static_cast<size_t>(schedule.ranks());
  const auto& steps = recorded.front()->steps;
  for (size_t i = 0; i < recorded.size(); ++i) {
    const RankTimeline& one = *recorded[i];
    const auto name = c10::str("timeline of rank ", one.rank, " of replica ", one.replica, ": ");
    const int replica = static_cast<int>(i / ranks), rank = static_cast<int>(i % ranks);
    SMP_INTERNAL_ASSERT(one.replica == replica && one.rank == rank, name, "expected that of rank ",
                        rank, " of replica ", replica, ", and each of the ", ranks, " ranks once");
    const size_t actions = schedule.actions(rank).size();
    SMP_INTERNAL_ASSERT(one.bytes.size() == actions, name, "expected the schedule's ", actions,
                        " actions, got ", one.bytes.size());
    SMP_INTERNAL_ASSERT(one.steps.size() == steps.size(), name, "expected ", steps.size(),
                        " steps, got ", one.steps.size());
    for (size_t s = 0; s < steps.size(); ++s) {
      SMP_INTERNAL_ASSERT(one.steps[s].number == steps[s].number, name, "expected step ",
                          steps[s].number, ", got step ", one.steps[s].number);
      SMP_INTERNAL_ASSERT(one.steps[s].records.size() == actions, name,
                          "expected a record for each of ", actions, " actions, got ",
                          one.steps[s].records.size());
    }
  }
  SMP_INTERNAL_ASSERT(recorded.size() % ranks == 0, "timeline: expected all ", ranks,
                      " ranks of each replica, got ", recorded.size(), " ranks");
}

/// The first and the last moment of step `index`, in ns. Reductions begin after an action.
std::pair<int64_t, int64_t> extent_of(const Recorded& recorded, size_t index) {
  int64_t first = std::numeric_limits<int64_t>::max(), last = std::numeric_limits<int64_t>::min();
  for (const RankTimeline* one : recorded) {
    for (const ActionRecord& record : one->steps[index].records) {
      first = std::min(first, record.start);
      last = std::max(last, record.end);
    }
    for (const ReductionRecord& record : one->steps[index].reductions) {
      last = std::max(last, record.end);
    }
  }
  return first > last ? std::pair<int64_t, int64_t>(0, 0) : std::pair(first, last);
}

double us(int64_t ns) { return static_cast<double>(ns) / kNsPerUs; }

Lane lane_of(const RankTimeline& recorded, size_t step, const std::vector<Action>& actions,
             int64_t origin) {
  Lane lane{recorded.replica, recorded.rank, {}, recorded.bytes};
  for (size_t i = 0; i < actions.size(); ++i) {
    const ActionRecord& record = recorded.steps[step].records[i];
    lane.actions.push_back({actions[i], us(record.start - origin), us(record.end - origin),
                            static_cast<double>(recorded.kept[i])});
  }
  for (const ReductionRecord& record : recorded.steps[step].reductions) {
    lane.reductions.push_back({us(record.start - origin), us(record.end - origin), record.bytes});
  }
  return lane;
}

bool has_memory(const StepTimeline& step) {
  return std::any_of(step.lanes.begin(), step.lanes.end(),
                     [](const Lane& lane) { return lane.peak_memory() > 0; });
}

std::string percent(double share) { return fmt::format("{:.1f}%", 100 * share); }

/// The predicted lane of a rank; null without a prediction.
const Lane* predicted_lane(const Timeline& timeline, int rank) {
  if (!timeline.predicted) return nullptr;
  for (const Lane& lane : timeline.predicted->lanes) {
    if (lane.rank == rank) return &lane;
  }
  return nullptr;
}

/// The groups of actions that get a column, in this order.
constexpr std::string_view kColumns[] = {"forward", "backward", "inputs",  "weights", "send",
                                         "reduce",  "recall",   "unshard", "reshard", "wait"};

/// The columns with anything in them.
std::vector<std::string_view> used_columns(const StepTimeline& step) {
  std::vector<std::string_view> used;
  for (std::string_view column : kColumns) {
    if (std::any_of(step.lanes.begin(), step.lanes.end(),
                    [&](const Lane& lane) { return lane.time(column) > 0; })) {
      used.push_back(column);
    }
  }
  return used;
}

/// The actions of units put together by stages.
Lane lane_of_stages(const Lane& units, const std::vector<int>& stage_of_unit) {
  Lane result{units.replica, units.rank, {}, {}, units.reductions};
  std::map<std::tuple<Kind, int, int, int>, size_t> positions;  // positions in `result`
  for (TimedAction timed : units.actions) {
    Action& action = timed.action;
    action.stage = stage_of_unit.at(static_cast<size_t>(action.stage));
    if (action.peer >= 0) action.peer = stage_of_unit.at(static_cast<size_t>(action.peer));
    const bool gathers = action.kind == Kind::kUnshard || action.kind == Kind::kReshard;
    const std::tuple key(action.kind, action.stage, action.microbatch, action.peer);
    if (gathers || positions.emplace(key, result.actions.size()).second) {
      result.actions.push_back(timed);
      continue;
    }
    TimedAction& whole = result.actions[positions.at(key)];
    timed.start -= whole.end - whole.start;
    whole = timed;
  }
  return result;
}

}  // namespace

// --- recording --------------------------------------------------------------------------------

void RankTimeline::shift(int64_t ns) {
  const auto move = [ns](auto& records) {
    for (auto& record : records) {
      record.start += ns;
      record.end += ns;
    }
  };
  for (Step& step : steps) {
    move(step.records);
    move(step.reductions);
  }
}

bool operator==(const RankTimeline& a, const RankTimeline& b) { return pack(a) == pack(b); }

TimelineRecorder::TimelineRecorder(int replica, int rank, int64_t actions, int64_t steps) {
  SMP_INTERNAL_ASSERT(actions >= 0 && steps >= 0, "timeline: expected no negative number, got ",
                      actions, " actions and ", steps, " steps");
  timeline_.replica = replica;
  timeline_.rank = rank;
  timeline_.bytes.resize(static_cast<size_t>(actions));
  timeline_.kept.resize(static_cast<size_t>(actions));
  timeline_.steps.resize(static_cast<size_t>(steps));
  for (RankTimeline::Step& step : timeline_.steps) {
    step.records.resize(static_cast<size_t>(actions));
  }
}

int64_t TimelineRecorder::now() {
  using std::chrono::duration_cast;
  using std::chrono::nanoseconds;
  return duration_cast<nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void TimelineRecorder::set_kept(const std::vector<TimedAction>& simulated) {
  SMP_INTERNAL_ASSERT(simulated.size() == timeline_.bytes.size(),
                      "timeline: expected what is kept after ", timeline_.bytes.size(),
                      " actions, got ", simulated.size());
  for (size_t i = 0; i < simulated.size(); ++i) {
    timeline_.kept[i] = static_cast<int64_t>(simulated[i].memory);
  }
}

void TimelineRecorder::begin_step(int64_t number) {
  SMP_INTERNAL_ASSERT(has_room(), "timeline: there is room for ", timeline_.steps.size(), " steps");
  RankTimeline::Step& step = timeline_.steps[begun_++];
  step.number = number;
  current_ = step.records.data();
}

void TimelineRecorder::resolve(const std::vector<int64_t>& times) {
  for (ActionRecord& record : timeline_.steps[begun_ - 1].records) {
    record = {times.at(static_cast<size_t>(record.start)),
              times.at(static_cast<size_t>(record.end))};
  }
}

RankTimeline TimelineRecorder::finish() const {
  RankTimeline result = timeline_;
  result.steps.resize(begun_);
  return result;
}

std::vector<int64_t> pack(const RankTimeline& timeline) {
  std::vector<int64_t> numbers = {timeline.replica, timeline.rank,
                                  static_cast<int64_t>(timeline.bytes.size())};
  for (const auto* of_actions : {&timeline.bytes, &timeline.kept}) {
    numbers.insert(numbers.end(), of_actions->begin(), of_actions->end());
  }
  numbers.push_back(static_cast<int64_t>(timeline.steps.size()));
  for (const RankTimeline::Step& step : timeline.steps) {
    numbers.push_back(step.number);
    for (const ActionRecord& record : step.records) {
      numbers.insert(numbers.end(), {record.start, record.end});
    }
    numbers.push_back(static_cast<int64_t>(step.reductions.size()));
    for (const ReductionRecord& record : step.reductions) {
      numbers.insert(numbers.end(), {record.start, record.end, record.bytes});
    }
  }
  return numbers;
}

RankTimeline unpack_timeline(const std::vector<int64_t>& numbers) {
  Unpacker unpacker(numbers);
  RankTimeline result;
  result.replica = static_cast<int>(unpacker.next());
  result.rank = static_cast<int>(unpacker.next());
  result.bytes.resize(unpacker.count());
  result.kept.resize(result.bytes.size());
  for (auto* of_actions : {&result.bytes, &result.kept}) {
    for (int64_t& number : *of_actions) number = unpacker.next();
  }
  result.steps.resize(unpacker.count());
  for (RankTimeline::Step& step : result.steps) {
    step.number = unpacker.next();
    step.records.resize(result.bytes.size());
    for (ActionRecord& record : step.records) {
      record.start = unpacker.next();
      record.end = unpacker.next();
    }
    step.reductions.resize(unpacker.count());
    for (ReductionRecord& record : step.reductions) {
      record.start = unpacker.next();
      record.end = unpacker.next();
      record.bytes = unpacker.next();
    }
  }
  unpacker.finish();
  return result;
}

// --- clocks -----------------------------------------------------------------------------------

ClockOffset clock_offset(const std::vector<ClockSample>& samples) {
  SMP_INTERNAL_ASSERT(!samples.empty(),
                      "timeline: expected a round trip to compare clocks by, got none");
  const auto delay = [](const ClockSample& sample) { return sample.received - sample.sent; };
  const auto& best = *std::min_element(
      samples.begin(), samples.end(),
      [&](const ClockSample& a, const ClockSample& b) { return delay(a) < delay(b); });
  SMP_INTERNAL_ASSERT(delay(best) >= 0,
                      "timeline: expected an answer after its question, got one sent at ",
                      best.sent, " ns and received at ", best.received, " ns");
  const int64_t half = delay(best) / 2;
  return {best.remote - (best.sent + half), delay(best) - half};
}

// --- steps of all ranks -----------------------------------------------------------------------

double Lane::busy() const {
  double sum = 0;
  for (const TimedAction& timed : actions) {
    if (group_of(timed.action) != "wait") sum += timed.end - timed.start;
  }
  return sum;
}

double Lane::time(std::string_view group) const {
  double sum = 0;
  for (const TimedAction& timed : actions) {
    if (group_of(timed.action) == group) sum += timed.end - timed.start;
  }
  return sum;
}

double Lane::peak_memory() const {
  double peak = 0;
  for (const TimedAction& timed : actions) peak = std::max(peak, timed.memory);
  return peak;
}

double StepTimeline::idle(const Lane& lane) const {
  return makespan > 0 ? 1 - lane.busy() / makespan : 0;
}

double StepTimeline::idle() const {
  double sum = 0;
  for (const Lane& lane : lanes) sum += idle(lane);
  return lanes.empty() ? 0 : sum / static_cast<double>(lanes.size());
}

StepTimeline predicted_timeline(const Simulation& simulation) {
  StepTimeline step{"predicted", 0, simulation.makespan, {}};
  for (size_t rank = 0; rank < simulation.timeline.size(); ++rank) {
    step.lanes.push_back({0, static_cast<int>(rank), simulation.timeline[rank], {}});
  }
  return step;
}

Timeline make_timeline(std::string title, const Schedule& schedule,
                       const std::vector<RankTimeline>& recorded, const Simulation* predicted) {
  Recorded sorted;
  for (const RankTimeline& one : recorded) sorted.push_back(&one);
  std::stable_sort(sorted.begin(), sorted.end(), [](const RankTimeline* a, const RankTimeline* b) {
    return std::pair(a->replica, a->rank) < std::pair(b->replica, b->rank);
  });
  check_recorded(schedule, sorted);
  Timeline timeline;
  timeline.title = std::move(title);
  int64_t origin = 0;
  for (size_t s = 0; s < sorted.front()->steps.size(); ++s) {
    const auto [first, last] = extent_of(sorted, s);
    if (s == 0) origin = first;
    StepTimeline step{fmt::format("step {}", sorted.front()->steps[s].number),
                      us(first - origin),
                      us(last - first),
                      {}};
    for (const RankTimeline* one : sorted) {
      step.lanes.push_back(lane_of(*one, s, schedule.actions(one->rank), first));
    }
    timeline.measured.push_back(std::move(step));
  }
  if (predicted != nullptr) timeline.predicted = predicted_timeline(*predicted);
  return timeline;
}

Timeline timeline_of_stages(const Timeline& units, const std::vector<int>& stage_of_unit) {
  Timeline result{units.title, units.unit, units.measured, std::nullopt};
  for (StepTimeline& step : result.measured) {
    for (Lane& lane : step.lanes) lane = lane_of_stages(lane, stage_of_unit);
  }
  return result;
}

std::vector<Delivery> deliveries_of(const StepTimeline& step) {
  using Key = std::tuple<int, Kind, int, int, int>;
  const auto key = [](const Lane& lane, const Action& action) {
    return Key(lane.replica, action.kind, action.stage, action.microbatch, action.peer);
  };
  std::map<Key, std::pair<size_t, size_t>> receives;
  for (size_t l = 0; l < step.lanes.size(); ++l) {
    const Lane& lane = step.lanes[l];
    for (size_t i = 0; i < lane.actions.size(); ++i) {
      const Action& action = lane.actions[i].action;
      if (action.is_recv()) receives[key(lane, action)] = {l, i};
    }
  }
  std::vector<Delivery> deliveries;
  for (size_t l = 0; l < step.lanes.size(); ++l) {
    const Lane& lane = step.lanes[l];
    for (size_t i = 0; i < lane.actions.size(); ++i) {
      const Action& action = lane.actions[i].action;
      if (!action.is_send()) continue;
      const auto found = receives.find(key(lane, counterpart(action)));
      if (found == receives.end()) continue;
      deliveries.push_back({l, i, found->second.first, found->second.second});
    }
  }
  return deliveries;
}

// --- text -------------------------------------------------------------------------------------

std::string format_duration(double time, TimeUnit unit) {
  if (unit == TimeUnit::kMicroseconds) return partitioner::format_time(time);
  return fmt::format("{:.4g} slot{}", time, time == 1 ? "" : "s");
}

std::string headline(const StepTimeline& step, const Timeline& timeline) {
  const auto figures = [&](const StepTimeline& of) {
    return fmt::format("{}, {} idle", format_duration(of.makespan, timeline.unit),
                       percent(of.idle()));
  };
  std::string line = fmt::format("{}: {}", step.name, figures(step));
  const auto& predicted = timeline.predicted;
  if (timeline.measured.empty() || !predicted) return line;
  line += fmt::format("; predicted: {}", figures(*predicted));
  if (predicted->makespan <= 0) return line;
  return line +
         fmt::format(" (measured {:+.1f}%)", 100 * (step.makespan / predicted->makespan - 1));
}

std::vector<std::vector<std::string>> table_of(const StepTimeline& step, const Timeline& timeline) {
  const bool replicas = !step.lanes.empty() && step.lanes.back().replica > 0;
  const bool compares = !timeline.measured.empty() && timeline.predicted;
  const bool memory = has_memory(step);
  const std::vector<std::string_view> used = used_columns(step);
  std::vector<std::string> headings;
  if (replicas) headings.emplace_back("replica");
  headings.insert(headings.end(), {"rank", "idle"});
  if (compares) headings.emplace_back("predicted");
  for (std::string_view column : used) headings.emplace_back(column);
  headings.emplace_back("other");
  if (memory) headings.emplace_back("kept at most");

  std::vector<std::vector<std::string>> rows = {headings};
  for (const Lane& lane : step.lanes) {
    std::vector<std::string> row;
    if (replicas) row.push_back(std::to_string(lane.replica));
    row.push_back(std::to_string(lane.rank));
    row.push_back(percent(step.idle(lane)));
    if (compares) {
      const Lane* predicted = predicted_lane(timeline, lane.rank);
      row.push_back(predicted ? percent(timeline.predicted->idle(*predicted)) : "-");
    }
    double rest = step.makespan;
    for (std::string_view column : used) {
      const double time = lane.time(column);
      rest -= time;
      row.push_back(percent(step.makespan > 0 ? time / step.makespan : 0));
    }
    row.push_back(percent(step.makespan > 0 ? std::max(0.0, rest) / step.makespan : 0));
    if (memory) {
      row.push_back(format_memory(lane.peak_memory(), timeline.unit));
    }
    rows.push_back(std::move(row));
  }
  return rows;
}

std::string to_string(const Timeline& timeline) {
  std::string text;
  for (const StepTimeline& step : shown_steps(timeline)) {
    const auto rows = table_of(step, timeline);
    core::Table table;
    for (const std::string& heading : rows.front()) {
      table.column(heading, core::Table::Align::kRight);
    }
    for (size_t row = 1; row < rows.size(); ++row) table.row(rows[row]);
    text += (text.empty() ? "" : "\n") + headline(step, timeline) + "\n\n" + table.to_string();
  }
  return text;
}

std::vector<StepTimeline> shown_steps(const Timeline& timeline) {
  if (!timeline.measured.empty()) return timeline.measured;
  if (timeline.predicted) return {*timeline.predicted};
  return {};
}

std::string format_memory(double kept, TimeUnit unit) {
  if (unit == TimeUnit::kSlots) return fmt::format("{:.4g}", kept);
  return partitioner::format_bytes(std::llround(kept));
}

std::string describe_reduction(size_t index, size_t count) {
  return fmt::format("bucket {} of {} summed over the replicas", index + 1, count);
}

std::string describe(const Action& action) {
  const auto mine = [&](const char* what) {
    return fmt::format("{} of microbatch {} on stage {}", what, action.microbatch, action.stage);
  };
  const auto transfer = [&](const char* what, const char* preposition) {
    return fmt::format("stage {} {} of microbatch {} {} stage {}", action.stage, what,
                       action.microbatch, preposition, action.peer);
  };
  switch (action.kind) {
    case Kind::kForward:
      return mine("forward");
    case Kind::kBackward:
      return mine("backward");
    case Kind::kBackwardInput:
      return mine("input gradients");
    case Kind::kBackwardWeight:
      return mine("weight gradients");
    case Kind::kSendForward:
      return transfer("sends values", "to");
    case Kind::kSendBackward:
      return transfer("sends gradients", "to");
    case Kind::kRecvForward:
      return transfer("waits for values", "from");
    case Kind::kRecvBackward:
      return transfer("waits for gradients", "from");
    case Kind::kReduce:
      return fmt::format("reduction of the gradients of stage {}", action.stage);
    case Kind::kRecall:
      return mine("recall from the store");
    case Kind::kSendCopy:
      return fmt::format("stage {} sends what it owns and stage {} reads", action.stage,
                         action.peer);
    case Kind::kRecvCopy:
      return fmt::format("stage {} takes what stage {} owns", action.stage, action.peer);
    case Kind::kOutputs:
      return fmt::format("outputs of stage {}", action.stage);
    case Kind::kUnshard:
      return fmt::format("begins to gather the parameters of stage {}", action.stage);
    case Kind::kReshard:
      return fmt::format("frees the parameters of stage {}", action.stage);
  }
  return "";
}

}  // namespace smp::pipeline
