// SPDX-License-Identifier: Apache-2.0
#include "runtime/step/step_recording.h"

#include <ATen/ops/from_blob.h>

#include <nlohmann/json.hpp>
#include <utility>

namespace smp::runtime {
namespace {

using pipeline::TimelineRecorder;

constexpr int kRoundTrips = 16;
constexpr comm::Tag kClockTag = 1 << 18;

at::Tensor as_tensor(int64_t& number) { return at::from_blob(&number, {1}, at::kLong); }

/// The time on rank 0's clock, as far as can be told from here; answers the others there.
int64_t offset_to_rank_0(comm::Communicator& world) {
  int64_t number = 0;
  const at::Tensor message = as_tensor(number);
  if (world.rank() == 0) {
    for (int peer = 1; peer < world.size(); ++peer) {
      for (int i = 0; i < kRoundTrips; ++i) {
        world.recv(message, peer, kClockTag);
        number = TimelineRecorder::now();
        world.send(message, peer, kClockTag);
      }
    }
    return 0;
  }
  std::vector<pipeline::ClockSample> samples;
  for (int i = 0; i < kRoundTrips; ++i) {
    pipeline::ClockSample sample;
    sample.sent = TimelineRecorder::now();
    world.send(message, 0, kClockTag);
    world.recv(message, 0, kClockTag);
    sample.received = TimelineRecorder::now();
    sample.remote = number;
    samples.push_back(sample);
  }
  return pipeline::clock_offset(samples).offset;
}

}  // namespace

StepRecording::StepRecording(const Job& job, const pipeline::Schedule& schedule,
                             pipeline::Simulation predicted, const std::vector<int64_t>& bytes,
                             int skipped, int steps, c10::Device device)
    : job_(job),
      schedule_(schedule),
      predicted_(std::move(predicted)),
      recorder_(job.rank_in(CommGroup::kDp), job.rank_in(CommGroup::kPp),
                static_cast<int64_t>(bytes.size()), steps),
      skipped_(skipped),
      device_(device) {
  for (size_t i = 0; i < bytes.size(); ++i) recorder_.set_bytes(i, bytes[i]);
  recorder_.set_kept(predicted_.timeline[job.rank_in(CommGroup::kPp)]);
}

bool StepRecording::begin_step(int64_t number) {
  if (skipped_ > 0) {
    --skipped_;
    return false;
  }
  recorder_.begin_step(number);
  return true;
}

/// The time on the host's clock, or the number of a mark on the device's.
int64_t StepRecording::read_clock() {
  return device_clock_ ? device_clock_->mark() : TimelineRecorder::now();
}

void StepRecording::on_step_begin() {
  device_clock_.reset();
  if (!device_.is_cpu()) device_clock_.emplace(device_);
  start_ = read_clock();
}

/// The end of an action is the start of the next one.
void StepRecording::on_end(size_t index, const pipeline::Action& /*action*/) {
  const int64_t end = read_clock();
  recorder_.record(index, std::exchange(start_, end), end);
}

void StepRecording::on_step_end() {
  if (device_clock_) recorder_.resolve(device_clock_->times());
}

pipeline::Timeline StepRecording::gather(const std::string& title) {
  const auto world = job_.world();
  auto timeline = recorder_.finish();
  // On one host all ranks have the same clock.
  if (job_.topology().local_size(0) < world->size()) timeline.shift(offset_to_rank_0(*world));
  std::vector<pipeline::RankTimeline> recorded;
  const nlohmann::json mine = pipeline::pack(timeline);
  for (const auto& text : comm::all_gather_bytes(*world, mine.dump())) {
    recorded.push_back(pipeline::unpack_timeline(nlohmann::json::parse(text)));
  }
  return pipeline::make_timeline(title, schedule_, recorded, &predicted_);
}

}  // namespace smp::runtime
