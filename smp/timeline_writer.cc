#include "smp/timeline_writer.h"

#include <ATen/ops/from_blob.h>

#include <cstring>
#include <string>
#include <utility>

#include "pipeline/timeline.h"
#include "pipeline/timeline_page.h"
#include "smp/core/log.h"

namespace smp {
namespace {

using pipeline::TimelineRecorder;

/// The first steps capture, plan and warm caches.
constexpr int64_t kFirstStep = 3;
constexpr int64_t kSteps = 3;

constexpr int kRoundTrips = 16;
constexpr comm::Tag kClockTag = 1 << 18;

at::Tensor as_tensor(int64_t& number) { return at::from_blob(&number, {1}, at::kLong); }

/// What rank 0's clock shows, as far as can be told from here; answers the others there.
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

std::string to_bytes(const std::vector<int64_t>& numbers) {
  return {reinterpret_cast<const char*>(numbers.data()), numbers.size() * sizeof(int64_t)};
}

std::vector<int64_t> to_numbers(const std::string& bytes) {
  std::vector<int64_t> numbers(bytes.size() / sizeof(int64_t));
  std::memcpy(numbers.data(), bytes.data(), bytes.size());
  return numbers;
}

}  // namespace

TimelineWriter::TimelineWriter(const Runtime& runtime, const pipeline::Schedule& schedule,
                               pipeline::Simulation predicted, const std::vector<int64_t>& bytes)
    : runtime_(runtime), schedule_(schedule), predicted_(std::move(predicted)) {
  const int rank = runtime.rank_in(CommGroup::kPp);
  recorder_ = std::make_unique<TimelineRecorder>(runtime.rank_in(CommGroup::kDp), rank,
                                                 static_cast<int64_t>(bytes.size()), kSteps);
  for (size_t i = 0; i < bytes.size(); ++i) recorder_->set_bytes(i, bytes[i]);
  recorder_->set_kept(predicted_.timeline[rank]);
}

TimelineWriter::~TimelineWriter() = default;

TimelineRecorder* TimelineWriter::begin_step() {
  ++step_;
  if (step_ < kFirstStep || !recorder_ || !recorder_->has_room()) return nullptr;
  recorder_->begin_step(step_);
  return recorder_.get();
}

void TimelineWriter::end_step() {
  if (step_ != kFirstStep + kSteps - 1) return;
  write();
  recorder_.reset();
}

void TimelineWriter::write() {
  const auto world = runtime_.world();
  auto timeline = recorder_->finish();
  // On one host all ranks have the same clock.
  if (runtime_.topology().local_size(0) < world->size()) timeline.shift(offset_to_rank_0(*world));
  const auto all = comm::all_gather_bytes(*world, to_bytes(pipeline::pack(timeline)));
  if (world->rank() != 0) return;
  std::vector<pipeline::RankTimeline> recorded;
  for (const std::string& bytes : all) {
    recorded.push_back(pipeline::unpack_timeline(to_numbers(bytes)));
  }
  const auto whole =
      pipeline::make_timeline(c10::str(runtime_.config().pipeline(), ", ", schedule_.stages(),
                                       " stages, ", schedule_.microbatches(), " microbatches"),
                              schedule_, recorded, &predicted_);
  const auto files = pipeline::write_timeline(whole, *runtime_.config().timeline());
  log_info(c10::str("Timeline written to ", files.page, " and ", files.trace, "\n",
                    pipeline::to_string(whole)));
}

}  // namespace smp
