// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "pipeline/schedule.h"
#include "pipeline/simulator.h"

namespace smp::pipeline {

/// Times of the events in a step, as recorded by the ranks that ran it; docs/performance.md.
/// Recording and its message form come first, then the steps of all ranks put together, ready to be
/// shown: as a trace (pipeline/trace.h), a page (pipeline/timeline_page.h), or the text below.

// --- recording ------------------------------------------------------------------------------

/// When a rank was at an action, in ns on a clock that only goes forward.
struct ActionRecord {
  int64_t start = 0;
  int64_t end = 0;
};

/// When a bucket of gradients was summed over the replicas, beside the actions, and the bytes of
/// the rank's sums.
struct ReductionRecord {
  int64_t start = 0;
  int64_t end = 0;
  int64_t bytes = 0;
};

/// The records of one rank. Its lists are as long as the rank's list of actions in the schedule.
struct RankTimeline {
  /// One step, an entry for each action.
  struct Step {
    int64_t number = 0;  ///< number of the step for users
    std::vector<ActionRecord> records;
    std::vector<ReductionRecord> reductions = {};  ///< in the order in which they ran
  };

  int replica = 0;
  int rank = 0;                ///< rank of the pipeline
  std::vector<int64_t> bytes;  ///< bytes of each action's message, 0 where there is none
  std::vector<int64_t> kept;   ///< bytes of activations that the rank keeps after each action
  std::vector<Step> steps;

  /// Adds `ns` to every time, to move it to the clock of another rank (`clock_offset`).
  void shift(int64_t ns);
};

bool operator==(const RankTimeline& a, const RankTimeline& b);

/// Records the actions of one rank for some steps. All memory is taken and touched when it is made;
/// in a step it costs a read of the clock and a store for each action. Belongs to one thread.
class TimelineRecorder {
 public:
  /// For lists of `actions` actions and at most `steps` steps. Throws `smp::Error` for a negative
  /// number.
  TimelineRecorder(int replica, int rank, int64_t actions, int64_t steps);

  /// The clock, in ns: steady, and the same for all processes of a host.
  static int64_t now();

  /// Before the steps: the length of the message of transfer `action`.
  void set_bytes(size_t action, int64_t bytes) { timeline_.bytes.at(action) = bytes; }
  /// Before the steps: the memory that the rank keeps after each action, in bytes, which nothing
  /// measures in a step: `TimedAction::memory` of the schedule's simulation. Throws
  /// `smp::Error` for another number of actions.
  void set_kept(const std::vector<TimedAction>& simulated);

  /// Whether another step fits.
  bool has_room() const { return begun_ < timeline_.steps.size(); }
  /// Begins the step that the user calls `number`. Throws `smp::Error` without room.
  void begin_step(int64_t number);
  /// The times of an action of this step. Successive actions can share a reading: one's end is the
  /// next one's start.
  void record(size_t action, int64_t start, int64_t end) { current_[action] = {start, end}; }
  /// After this step, if its times were recorded as positions in `times`: these.
  void resolve(const std::vector<int64_t>& times);
  /// After this step: its reductions.
  void record_reductions(std::vector<ReductionRecord> reductions) {
    timeline_.steps[begun_ - 1].reductions = std::move(reductions);
  }

  /// The steps begun so far.
  RankTimeline finish() const;

 private:
  RankTimeline timeline_;
  ActionRecord* current_ = nullptr;  // record of the step begun last
  size_t begun_ = 0;
};

/// Packs into whole numbers, for a message from rank to rank.
std::vector<int64_t> pack(const RankTimeline& timeline);

/// The inverse. Throws `smp::Error` where the numbers are not from `pack`.
RankTimeline unpack_timeline(const std::vector<int64_t>& numbers);

// --- clocks ---------------------------------------------------------------------------------

/// A question to another rank and its answer, in ns: when this rank sent and received, on its
/// clock, and in between the time on the other's clock.
struct ClockSample {
  int64_t sent = 0;
  int64_t remote = 0;
  int64_t received = 0;
};

/// Where another rank's clock is. Add `offset` to this rank's times to get the other's.
struct ClockOffset {
  int64_t offset = 0;
  /// The offset is off by this at most.
  int64_t error = 0;

  /// Whether both may be one clock, as on one host: then 0 is the better offset.
  bool may_be_none() const { return -error <= offset && offset <= error; }
};

/// From the round trip with the least delay, in which the answer was read half way, give or take
/// half of the trip (Cristian 1989). Throws `smp::Error` without samples, or when one was received
/// before it was sent.
ClockOffset clock_offset(const std::vector<ClockSample>& samples);

// --- steps of all ranks ---------------------------------------------------------------------

/// A reduction in the unit of the timeline.
struct TimedReduction {
  double start = 0;
  double end = 0;
  int64_t bytes = 0;
};

/// The actions of a rank in a step, from the start of the step.
struct Lane {
  int replica = 0;
  int rank = 0;
  std::vector<TimedAction> actions;
  /// The length of each action's message; empty where it is not known.
  std::vector<int64_t> bytes;
  /// The reductions meanwhile; none are predicted.
  std::vector<TimedReduction> reductions = {};

  /// Computes, sends and reduces: everything but waiting. Idle is the rest of the step.
  double busy() const;
  /// Time in actions of one group (`group_of`).
  double time(std::string_view group) const;
  double peak_memory() const;
};

/// A step, measured or predicted.
struct StepTimeline {
  std::string name;  ///< "step 12"
  double begin = 0;  ///< its first action, from that of the first step of the timeline
  double makespan = 0;
  std::vector<Lane> lanes;

  /// Idle part of a lane's time, between 0 and 1.
  double idle(const Lane& lane) const;
  /// The same for all lanes together.
  double idle() const;
};

/// The unit of times.
enum class TimeUnit {
  kMicroseconds,
  kSlots,  ///< that of one forward
};

/// The content of a page: some steps as they ran, and how they were meant to run.
struct Timeline {
  std::string title;
  TimeUnit unit = TimeUnit::kMicroseconds;
  std::vector<StepTimeline> measured;
  /// The prediction of one replica.
  std::optional<StepTimeline> predicted;
};

/// A simulation as a step.
StepTimeline predicted_timeline(const Simulation& simulation);

/// Puts together the records of the ranks of all replicas, in any order, on a common clock;
/// `predicted` (optional) in us. Throws `smp::Error` when a recording does not fit the schedule,
/// ranks recorded different steps, or a rank is missing or there twice.
Timeline make_timeline(std::string title, const Schedule& schedule,
                       const std::vector<RankTimeline>& recorded, const Simulation* predicted);

/// The measured steps of units (`order_of_units`) as steps of their stages, without a prediction
/// and lengths of messages. The actions of one kind that are about the same stages and microbatch
/// are one: it ends with the last of them and takes as long as all together, without the time
/// between, in which a rank waits for parameters. Only those that gather and free parameters stay
/// apart.
Timeline timeline_of_stages(const Timeline& units, const std::vector<int>& stage_of_unit);

/// A send and the receive that waited for it, as lanes and positions in them.
struct Delivery {
  size_t from_lane = 0;
  size_t send = 0;
  size_t to_lane = 0;
  size_t receive = 0;
};

/// All of a step's, in the order of lanes and sends.
std::vector<Delivery> deliveries_of(const StepTimeline& step);

// --- text -----------------------------------------------------------------------------------

/// "12.3 ms", or a number of slots.
std::string format_duration(double time, TimeUnit unit);

/// "12.3 MiB", or with slots a number of microbatches.
std::string format_memory(double kept, TimeUnit unit);

/// One line: makespan and idle time of a step, and if there are both the prediction.
std::string headline(const StepTimeline& step, const Timeline& timeline);

/// A table: headings, then a row for each lane of `step` with its idle time as measured and as
/// predicted, where the rest of the time went, and the most it kept. Shares are of the makespan.
std::vector<std::vector<std::string>> table_of(const StepTimeline& step, const Timeline& timeline);

/// Every step's headline and table; the prediction's alone if nothing was measured.
std::string to_string(const Timeline& timeline);

/// The steps that every way of showing a timeline shows: those measured, else the predicted one.
std::vector<StepTimeline> shown_steps(const Timeline& timeline);

/// "bucket 2 of 5 summed over the replicas", for the `index`-th of `count`, from 0.
std::string describe_reduction(size_t index, size_t count);

/// "forward of microbatch 3 on stage 0", "stage 1 sends gradients of microbatch 3 to stage 0".
std::string describe(const Action& action);

}  // namespace smp::pipeline
