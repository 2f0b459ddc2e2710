// SPDX-License-Identifier: Apache-2.0
#include "comm/device/ipc_channels.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "comm/device/ipc_ring.h"
#include "comm/device_streams.h"
#include "comm/host_parts.h"
#include "comm/nccl/group_pool.h"
#include "comm/split_channel.h"

namespace smp::comm {
namespace {

// Waits until the device has done an end's part. One that waits for a process that is gone never
// will: so not when a rank has failed, nor for longer than the time-out.
template <class Ring>
void let_come_to_rest(const Communicator& group, const Ring& ring) {
  let_finish([&] { return ring.is_idle() || !group.abort_text().empty(); }, group.timeout());
}

class IpcSender final : public SplitSender {
 public:
  IpcSender(std::unique_ptr<Sender> host, const ChannelSpec& spec, std::unique_ptr<SentRing> ring,
            CommunicatorPtr group)
      : SplitSender(std::move(host), spec), ring_(std::move(ring)), group_(std::move(group)) {}

  // This process may end now, and its device with it.
  ~IpcSender() override { let_come_to_rest(*group_, *ring_); }

 private:
  at::Tensor take_elements(int64_t bytes) override {
    return ring_->take(bytes, current_stream(device()));
  }
  void send_elements(at::Tensor /*elements*/) override { ring_->send(current_stream(device())); }

  std::unique_ptr<SentRing> ring_;
  const CommunicatorPtr group_;
};

class IpcReceiver final : public SplitReceiver {
 public:
  IpcReceiver(std::unique_ptr<Receiver> host, const ChannelSpec& spec,
              std::unique_ptr<ReceivedRing> ring, CommunicatorPtr group)
      : SplitReceiver(std::move(host), spec), ring_(std::move(ring)), group_(std::move(group)) {}

  // Memory that the device may yet copy stays open to the process's end.
  ~IpcReceiver() override {
    let_come_to_rest(*group_, *ring_);
    if (!ring_->is_idle()) new std::unique_ptr<ReceivedRing>(std::move(ring_));
  }

 private:
  at::Tensor receive_elements(int64_t bytes) override {
    const at::Tensor received = make_elements(bytes, device());
    ring_->receive(received, current_stream(device()));
    return received;
  }

  std::unique_ptr<ReceivedRing> ring_;
  const CommunicatorPtr group_;
};

// The first bytes of a message are copied, if they are held, so that slots need not wait for that.
std::vector<ChannelSpec> host_specs(std::vector<ChannelSpec> specs) {
  for (ChannelSpec& spec : specs) {
    if (moves_on_device(spec)) {
      spec = host_part(spec);
      spec.held = 0;
    }
  }
  return specs;
}

// Handles in a message to or from the peer of a channel, under its tag.
class HandleMessage {
 public:
  HandleMessage(Communicator& group, const ChannelSpec& spec, size_t count)
      : group_(&group),
        spec_(spec),
        bytes_(at::empty({static_cast<int64_t>(count * sizeof(IpcHandle))}, at::kByte)) {}

  void expect() { work_ = group_->irecv(bytes_, spec_.peer, spec_.tag); }
  void send(const std::vector<IpcHandle>& handles) {
    std::memcpy(bytes_.mutable_data_ptr(), handles.data(), bytes_.nbytes());
    work_ = group_->isend(bytes_, spec_.peer, spec_.tag);
  }
  std::vector<IpcHandle> wait() {
    work_->wait();
    std::vector<IpcHandle> handles(bytes_.nbytes() / sizeof(IpcHandle));
    std::memcpy(handles.data(), bytes_.const_data_ptr(), bytes_.nbytes());
    return handles;
  }

 private:
  Communicator* group_;
  ChannelSpec spec_;
  at::Tensor bytes_;
  WorkPtr work_;
};

// A channel that is being opened at one end.
struct Opening {
  Opening(Communicator& host, const ChannelSpec& channel, size_t place)
      : spec(channel),
        index(place),
        asked(host, channel, handles_asked(channel)),
        offered(host, channel, handles_offered(channel)) {}

  ChannelSpec spec;
  size_t index;  // among the outgoing or the incoming channels
  HandleMessage asked, offered;
};

struct OutgoingOpening : Opening {
  using Opening::Opening;
  std::unique_ptr<SentRing> ring;
};

struct IncomingOpening : Opening {
  using Opening::Opening;
  std::unique_ptr<ReceivedRing> ring;
};

template <class One>
std::vector<One> openings(Communicator& host, const std::vector<ChannelSpec>& specs) {
  std::vector<One> result;
  for (size_t i = 0; i < specs.size(); ++i) {
    if (moves_on_device(specs[i])) {
      result.emplace_back(host, specs[i], i);
    }
  }
  return result;
}

// A rank's word on a step of the trial begins with one of these: its handles, or why it has none.
constexpr char kDone = '+', kFailed = '-';

std::string outcome_of(const std::function<std::string()>& step) {
  try {
    return kDone + step();
  } catch (const c10::Error& error) {
    const std::string text = error.what_without_backtrace();
    return kFailed + text.substr(0, text.find('\n'));
  }
}

std::string to_bytes(const IpcHandle& handle) { return std::string(handle.data(), handle.size()); }

IpcHandle to_handle(const std::string& bytes, size_t at) {
  IpcHandle handle;
  std::memcpy(handle.data(), bytes.data() + at, handle.size());
  return handle;
}

// The first rank that has failed, and what it said.
std::string failure_in(const std::vector<std::string>& outcomes, const char* failed_to) {
  for (size_t rank = 0; rank < outcomes.size(); ++rank) {
    if (outcomes[rank][0] == kFailed) {
      return c10::str("rank ", rank, " of the group ", failed_to, outcomes[rank].substr(1));
    }
  }
  return "";
}

// Each rank writes a row of its memory, which all others copy into the same row of theirs. It has a
// stream of its own, which may wait for ever.
class Trial {
 public:
  Trial(Communicator& host, DeviceIpc& ipc, at::Device device)
      : host_(host),
        ipc_(ipc),
        device_(device),
        rows_(at::arange(host.size() * kWords, at::kInt).view(at::kByte).view({host.size(), -1})) {}

  // Returns the handles of the memory and of the event behind what it writes.
  std::string write() {
    memory_ = ipc_.make_memory(device_, rows_.numel()).view(rows_.sizes());
    written_ = ipc_.make_event(device_);
    copied_ = ipc_.make_event(device_);
    const std::string handles = to_bytes(ipc_.handle_of(memory_)) + to_bytes(written_->handle());
    stream_ = side_stream(device_);
    const c10::StreamGuard guard(*stream_);
    memory_[host_.rank()].copy_(rows_[host_.rank()], /*non_blocking=*/true);
    written_->record(*stream_);
    return handles;
  }

  // Copies what the others have written. Returns how it is otherwise; empty if it is not.
  std::string read(const std::vector<std::string>& outcomes) {
    const c10::StreamGuard guard(*stream_);
    std::vector<Opened> opened = open(outcomes);
    for (const Opened& other : opened) {
      other.written->block(*stream_);
      memory_[other.rank].copy_(other.memory[other.rank], /*non_blocking=*/true);
    }
    copied_->record(*stream_);
    const auto limit = host_.timeout() / 2;  // the others wait for this rank meanwhile
    let_finish([&] { return copied_->query() || !host_.abort_text().empty(); }, limit);
    if (!copied_->query()) {
      new std::vector<Opened>(std::move(opened));  // stays open to the process's end
      return c10::str("rank ", host_.rank(),
                      " of the group has not copied the memory of others within ",
                      std::chrono::duration<double>(limit).count(), " s");
    }
    const at::Tensor copied = memory_.cpu();
    for (int rank = 0; rank < host_.size(); ++rank) {
      if (!at::equal(copied[rank], rows_[rank])) {
        return c10::str("memory of rank ", rank, " reads otherwise on rank ", host_.rank());
      }
    }
    return "";
  }

 private:
  static constexpr int64_t kWords = 1024;  // words of a row, no two of which are the same

  struct Opened {
    int rank;
    at::Tensor memory;
    std::unique_ptr<IpcEvent> written;
  };

  std::vector<Opened> open(const std::vector<std::string>& outcomes) {
    std::vector<Opened> opened;
    for (int rank = 0; rank < host_.size(); ++rank) {
      if (rank == host_.rank()) continue;
      const IpcHandle memory = to_handle(outcomes[rank], 1);
      const IpcHandle written = to_handle(outcomes[rank], 1 + sizeof(IpcHandle));
      opened.push_back({rank, ipc_.open_memory(memory, device_, rows_.numel()).view(rows_.sizes()),
                        ipc_.open_event(written, device_)});
    }
    return opened;
  }

  Communicator& host_;
  DeviceIpc& ipc_;
  const at::Device device_;
  const at::Tensor rows_;  // [rank, byte], as all are to read
  at::Tensor memory_;      // the same on the device
  std::unique_ptr<IpcEvent> written_, copied_;
  std::optional<c10::Stream> stream_;
};

}  // namespace

Channels open_ipc_channels(const CommunicatorPtr& host, DeviceIpc& ipc,
                           const std::vector<ChannelSpec>& outgoing,
                           const std::vector<ChannelSpec>& incoming) {
  const c10::InferenceMode normal(false);  // the memory is for later callers, too
  Channels channels = host->open_channels(host_specs(outgoing), host_specs(incoming));
  auto out = openings<OutgoingOpening>(*host, outgoing);
  auto in = openings<IncomingOpening>(*host, incoming);
  // A tag may have a channel in each direction: a rank sends what it asks for, then its offers.
  for (OutgoingOpening& opening : out) opening.asked.expect();
  for (IncomingOpening& opening : in) opening.offered.expect();
  for (IncomingOpening& opening : in) {
    opening.ring = std::make_unique<ReceivedRing>(ipc, opening.spec);
    opening.asked.send(opening.ring->ask());
  }
  for (OutgoingOpening& opening : out) {
    const std::vector<IpcHandle> asked = opening.asked.wait();
    free_closed_memory();  // maybe an earlier channel of this lane, which the peer has closed
    opening.ring = std::make_unique<SentRing>(ipc, opening.spec, asked);
    opening.offered.send(opening.ring->offer());
    auto& sender = channels.senders[opening.index];
    sender =
        std::make_unique<IpcSender>(std::move(sender), opening.spec, std::move(opening.ring), host);
  }
  for (IncomingOpening& opening : in) {
    opening.ring->open(opening.offered.wait(), host->name());
    auto& receiver = channels.receivers[opening.index];
    receiver = std::make_unique<IpcReceiver>(std::move(receiver), opening.spec,
                                             std::move(opening.ring), host);
  }
  for (IncomingOpening& opening : in) opening.asked.wait();
  for (OutgoingOpening& opening : out) opening.offered.wait();
  return channels;
}

std::string ipc_problem(Communicator& host, DeviceIpc& ipc, at::Device device) {
  auto trial = std::make_unique<Trial>(host, ipc, device);
  const auto written = all_gather_bytes(host, outcome_of([&] { return trial->write(); }));
  const std::string problem = failure_in(written, "cannot make memory for others: ");
  if (!problem.empty()) {
    return problem;
  }
  const auto read = all_gather_bytes(host, outcome_of([&] { return trial->read(written); }));
  for (const std::string& outcome : read) {
    if (outcome[0] == kDone && outcome.size() > 1) {
      static_cast<void>(trial.release());  // a device that does not do as it should may yet copy
      return outcome.substr(1);
    }
  }
  return failure_in(read, "cannot open the memory of another: ");
}

}  // namespace smp::comm
