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

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "comm/device/ipc_memory.h"
#include "comm/device_streams.h"
#include "comm/nccl/group_pool.h"
#include "comm/split_channel.h"
#include "core/check.h"

namespace smp::comm {
namespace {

constexpr int64_t kSlotAlignment = 256;  // more than any kernel asks for

// The sender may always send `ahead` messages, and the receiver may be copying one.
int64_t slots_of(const ChannelSpec& spec) { return spec.ahead + 1; }

int64_t slot_bytes(const ChannelSpec& spec) {
  return (element_bytes(spec) + kSlotAlignment - 1) / kSlotAlignment * kSlotAlignment;
}

at::Tensor in_slots(const at::Tensor& memory, const ChannelSpec& spec) {
  return memory.view({slots_of(spec), slot_bytes(spec)});
}

// Waits until the device has done an end's part: it has come to the events of the first messages.
// One that waits for a process that is gone never will: so not when a rank has failed, nor for
// longer than the time-out. Returns whether it has.
bool let_come_to_rest(const Communicator& group, const IpcEvents& events, uint64_t messages) {
  const auto is_idle = [&] { return are_done(events, std::min(messages, events.size())); };
  let_finish([&] { return is_idle() || !group.abort_text().empty(); }, group.timeout());
  return is_idle();
}

// The end that writes the slots one after the other. It has the memory.
class IpcSender final : public SplitSender {
 public:
  // `asked`: the receiver's events behind its copies, by slot.
  IpcSender(std::unique_ptr<Sender> host, const ChannelSpec& spec, CommunicatorPtr group,
            DeviceIpc& ipc, const std::vector<IpcHandle>& asked)
      : SplitSender(std::move(host), spec),
        group_(std::move(group)),
        memory_(new MadeMemory(ipc, spec.device, slots_of(spec) * slot_bytes(spec), /*openers=*/1,
                               asked.size())),
        slots_(in_slots(memory_->bytes(), spec)) {
    for (const IpcHandle& handle : asked) {
      taken_.push_back(ipc.open_event(handle, spec.device));
    }
  }

  // This process may end now, and its device with it.
  ~IpcSender() override { let_come_to_rest(*group_, memory_->events(), sent_); }

  const MadeMemory& memory() const { return *memory_; }

 private:
  // There is room on the host's channel, so the receiver's host has asked for the copy of the
  // message before in this slot.
  at::Tensor take_elements(int64_t bytes) override {
    if (sent_ >= taken_.size()) {
      taken_[slot()]->block(current_stream(device()));
    }
    return slots_[static_cast<int64_t>(slot())].narrow(0, 0, bytes);
  }
  void send_elements(at::Tensor /*elements*/) override {
    memory_->events()[slot()]->record(current_stream(device()));
    ++sent_;
  }

  size_t slot() const { return sent_ % taken_.size(); }

  const CommunicatorPtr group_;
  const MadeMemoryPtr memory_;  // its events: slots are written
  const at::Tensor slots_;      // [slot, byte]
  IpcEvents taken_;
  uint64_t sent_ = 0;
};

// The end that copies from the slots in the same order.
class IpcReceiver final : public SplitReceiver {
 public:
  IpcReceiver(std::unique_ptr<Receiver> host, const ChannelSpec& spec, CommunicatorPtr group,
              IpcEvents taken, std::unique_ptr<OpenedMemory> memory)
      : SplitReceiver(std::move(host), spec),
        group_(std::move(group)),
        taken_(std::move(taken)),
        memory_(std::move(memory)),
        slots_(in_slots(memory_->bytes(), spec)) {}

  // Memory that the device may yet copy stays open to the process's end.
  ~IpcReceiver() override {
    if (let_come_to_rest(*group_, taken_, received_)) return;
    new auto(std::move(taken_));
    static_cast<void>(memory_.release());
  }

 private:
  // Its sender's host has sent the message.
  at::Tensor receive_elements(int64_t bytes) override {
    const at::Tensor received = make_elements(bytes, device());
    const c10::Stream stream = current_stream(device());
    const size_t slot = received_ % taken_.size();
    memory_->events()[slot]->block(stream);
    received.copy_(slots_[static_cast<int64_t>(slot)].narrow(0, 0, bytes), /*non_blocking=*/true);
    taken_[slot]->record(stream);
    ++received_;
    return received;
  }

  const CommunicatorPtr group_;
  IpcEvents taken_;
  std::unique_ptr<OpenedMemory> memory_;  // closed when the slots are gone
  const at::Tensor slots_;                // [slot, byte]
  uint64_t received_ = 0;
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

// A channel that is being opened at one end: the receiver asks for memory, and the sender offers
// it.
struct Opening {
  Opening(Communicator& host, const ChannelSpec& channel, size_t place)
      : spec(channel),
        index(place),
        asked(host, channel, slots_of(channel)),
        offered(host, channel, offer_size(slots_of(channel))) {}

  ChannelSpec spec;
  size_t index;  // among the outgoing or the incoming channels
  HandleMessage asked, offered;
  IpcEvents taken{};  // the receiver's
};

std::vector<Opening> openings(Communicator& host, const std::vector<ChannelSpec>& specs) {
  std::vector<Opening> result;
  for (size_t i = 0; i < specs.size(); ++i) {
    if (moves_on_device(specs[i])) {
      result.emplace_back(host, specs[i], i);
    }
  }
  return result;
}

void ask_for_memory(Opening& opening, DeviceIpc& ipc) {
  std::vector<IpcHandle> handles;
  for (int64_t slot = 0; slot < slots_of(opening.spec); ++slot) {
    opening.taken.push_back(ipc.make_event(opening.spec.device));
    handles.push_back(opening.taken.back()->handle());
  }
  opening.asked.send(handles);
}

std::unique_ptr<OpenedMemory> open_offered(Opening& opening, DeviceIpc& ipc,
                                           const std::string& group) {
  const std::vector<IpcHandle> offered = opening.offered.wait();
  const ChannelSpec& spec = opening.spec;
  const int64_t bytes = element_bytes(spec), theirs = number_in(offered);
  SMP_CHECK_WITH(CommError, theirs == bytes, "open_channels on group '", group,
                 "': the channel with tag ", spec.tag, " is one of ", bytes, " bytes on ",
                 spec.device, " for its receiver, and one of ", theirs,
                 " for its sender. Both must give the same numbers.");
  return std::make_unique<OpenedMemory>(ipc, spec.device, offered);
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

std::string to_bytes(const std::vector<IpcHandle>& handles) {
  return {handles.front().data(), handles.size() * sizeof(IpcHandle)};
}

// The handles behind the first letter of a rank's word.
std::vector<IpcHandle> handles_in(const std::string& word) {
  std::vector<IpcHandle> handles((word.size() - 1) / sizeof(IpcHandle));
  std::memcpy(handles.data(), word.data() + 1, word.size() - 1);
  return handles;
}

// The first rank that has failed, and what it said.
core::Refusal failure_in(const std::vector<std::string>& outcomes, const char* failed_to) {
  for (size_t rank = 0; rank < outcomes.size(); ++rank) {
    if (outcomes[rank][0] == kFailed) {
      return c10::str("rank ", rank, " of the group ", failed_to, outcomes[rank].substr(1));
    }
  }
  return std::nullopt;
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
    memory_ = std::make_unique<MadeMemory>(ipc_, device_, rows_.numel(), host_.size() - 1,
                                           /*events=*/1);
    copied_ = ipc_.make_event(device_);
    const std::string handles = to_bytes(memory_->offer(/*number=*/0));
    stream_ = side_stream(device_);
    const c10::StreamGuard guard(*stream_);
    const int own = host_.rank();
    rows_in(memory_->bytes())[own].copy_(rows_[own], /*non_blocking=*/true);
    memory_->events().front()->record(*stream_);
    return handles;
  }

  // Copies what the others have written. Returns how it is otherwise; empty if it is not.
  std::string read(const std::vector<std::string>& outcomes) {
    const c10::StreamGuard guard(*stream_);
    std::map<int, std::unique_ptr<OpenedMemory>> opened;  // memory by rank
    for (int rank = 0; rank < host_.size(); ++rank) {
      if (rank == host_.rank()) continue;
      opened[rank] = std::make_unique<OpenedMemory>(ipc_, device_, handles_in(outcomes[rank]));
    }
    const at::Tensor own = rows_in(memory_->bytes());
    for (const auto& [rank, theirs] : opened) {
      theirs->events().front()->block(*stream_);
      own[rank].copy_(rows_in(theirs->bytes())[rank], /*non_blocking=*/true);
    }
    copied_->record(*stream_);
    const auto limit = host_.timeout() / 2;  // the others wait for this rank meanwhile
    let_finish([&] { return copied_->query() || !host_.abort_text().empty(); }, limit);
    if (!copied_->query()) {
      new auto(std::move(opened));  // stays open to the process's end
      return c10::str("rank ", host_.rank(),
                      " of the group has not copied the memory of others within ",
                      std::chrono::duration<double>(limit).count(), " s");
    }
    const at::Tensor copied = own.cpu();
    for (int rank = 0; rank < host_.size(); ++rank) {
      if (!at::equal(copied[rank], rows_[rank])) {
        return c10::str("memory of rank ", rank, " reads otherwise on rank ", host_.rank());
      }
    }
    return "";
  }

 private:
  static constexpr int64_t kWords = 1024;  // words of a row, no two of which are the same

  at::Tensor rows_in(const at::Tensor& bytes) const { return bytes.view(rows_.sizes()); }

  Communicator& host_;
  DeviceIpc& ipc_;
  const at::Device device_;
  const at::Tensor rows_;               // [rank, byte], as all are to read
  std::unique_ptr<MadeMemory> memory_;  // the same on the device
  std::unique_ptr<IpcEvent> copied_;
  std::optional<c10::Stream> stream_;
};

}  // namespace

Channels open_ipc_channels(const CommunicatorPtr& host, DeviceIpc& ipc,
                           const std::vector<ChannelSpec>& outgoing,
                           const std::vector<ChannelSpec>& incoming) {
  const c10::InferenceMode normal(false);  // the memory is for later callers, too
  Channels channels = host->open_channels(host_specs(outgoing), host_specs(incoming));
  auto out = openings(*host, outgoing), in = openings(*host, incoming);
  // A tag may have a channel in each direction: a rank sends what it asks for, then its offers.
  for (Opening& opening : out) opening.asked.expect();
  for (Opening& opening : in) opening.offered.expect();
  for (Opening& opening : in) ask_for_memory(opening, ipc);
  for (Opening& opening : out) {
    const std::vector<IpcHandle> asked = opening.asked.wait();
    free_closed_memory();  // maybe an earlier channel of this port, which the peer has closed
    auto& end = channels.senders[opening.index];
    auto sender = std::make_unique<IpcSender>(std::move(end), opening.spec, host, ipc, asked);
    opening.offered.send(sender->memory().offer(element_bytes(opening.spec)));
    end = std::move(sender);
  }
  for (Opening& opening : in) {
    auto memory = open_offered(opening, ipc, host->name());
    auto& end = channels.receivers[opening.index];
    end = std::make_unique<IpcReceiver>(std::move(end), opening.spec, host,
                                        std::move(opening.taken), std::move(memory));
  }
  for (Opening& opening : in) opening.asked.wait();
  for (Opening& opening : out) opening.offered.wait();
  return channels;
}

core::Refusal why_not_ipc(Communicator& host, DeviceIpc& ipc, at::Device device) {
  auto trial = std::make_unique<Trial>(host, ipc, device);
  const auto written = all_gather_bytes(host, outcome_of([&] { return trial->write(); }));
  if (auto refusal = failure_in(written, "cannot make memory for others: ")) return refusal;
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
