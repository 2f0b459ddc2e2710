// SPDX-License-Identifier: Apache-2.0
#include "comm/shm/connect.h"

#include <ATen/ops/empty.h>

#include <cstring>
#include <type_traits>
#include <utility>

#include "comm/message_channel.h"
#include "comm/shm/shared_channel.h"
#include "comm/shm/shared_memory.h"
#include "core/check.h"
#include "core/log.h"

namespace smp::comm {
namespace {

// The sender's first message: the memory, and how the sender sees the channel.
struct Offer {
  uint64_t memory;  // its id
  ProcessId process;
  int64_t bytes;
  int32_t held;
  int32_t ahead;
  int32_t fd;
};

// The receiver's answer.
struct Answer {
  enum Kind : int32_t { kMapped, kSendDescriptor };
  Kind kind;
  ProcessId process;
  uint64_t mailbox;
  int64_t bytes;
  int32_t held;
  int32_t ahead;
};

// The sender's second message, only when it was asked for the descriptor.
struct Delivery {
  bool delivered;
};

// A value in a message to or from the peer.
template <class T>
class ValueMessage {
 public:
  static_assert(std::is_trivially_copyable_v<T>);

  void send(Communicator& group, const ChannelSpec& spec, const T& value) {
    std::memcpy(bytes_.mutable_data_ptr(), &value, sizeof value);
    work_ = group.isend(bytes_, spec.peer, spec.tag);
  }
  void expect(Communicator& group, const ChannelSpec& spec) {
    work_ = group.irecv(bytes_, spec.peer, spec.tag);
  }
  T wait() {
    T value;
    work_->wait();
    std::memcpy(&value, bytes_.const_data_ptr(), sizeof value);
    return value;
  }

 private:
  at::Tensor bytes_ = at::empty({sizeof(T)}, at::TensorOptions(at::kByte));
  WorkPtr work_;
};

struct Context {
  std::shared_ptr<Transport> transport;
  std::shared_ptr<const GroupState> group;
  CommunicatorPtr communicator;

  bool shares_memory(const ChannelSpec& spec) const {
    return transport->shares_memory(group->world_rank, group->world_ranks[spec.peer]);
  }
  PeerWait wait(const char* verb, const ChannelSpec& spec, const ProcessId& peer) const {
    return PeerWait(transport, group, verb, spec, ProcessWatch(peer));
  }
  void warn_of_messages(const ChannelSpec& spec) const {
    core::log_warning(c10::str("ranks ", group->world_rank, " and ", group->world_ranks[spec.peer],
                               " of group '", group->name,
                               "', on the same host, cannot map each other's memory; they send "
                               "messages instead, which is slower."));
  }
};

template <class Theirs>
void check_same(const Context& context, const ChannelSpec& spec, const Theirs& theirs) {
  SMP_CHECK_WITH(
      CommError,
      spec.bytes == theirs.bytes && spec.held == theirs.held && spec.ahead == theirs.ahead,
      "open_channels on group '", context.group->name, "': the channel with tag ", spec.tag,
      " between ranks ", context.group->world_rank, " and ", context.group->world_ranks[spec.peer],
      " is one of ", spec.bytes, " bytes, ", spec.held, " held and ", spec.ahead,
      " ahead for the first, and one of ", theirs.bytes, " bytes, ", theirs.held, " held and ",
      theirs.ahead, " ahead for the second. Both must give the same numbers.");
}

// Opening goes in steps that wait for earlier steps of the peer only, so that ranks may list their
// channels in any order. A tag may have a channel in each direction: a rank sends offer, answer,
// delivery under it, and so are the receives posted in this order.

class OutgoingOpening {
 public:
  // Step 1.
  OutgoingOpening(const Context& context, const ChannelSpec& spec)
      : context_(context), spec_(spec) {
    if (!context.shares_memory(spec)) {
      return;
    }
    memory_ = SharedMemory::create(SharedLayout(spec).total());
    answer_.expect(*context.communicator, spec);
    offer_.send(*context.communicator, spec,
                {memory_->id(), this_process(), spec.bytes, spec.held, spec.ahead, memory_->fd()});
  }

  // Step 3.
  std::unique_ptr<Sender> finish() {
    if (!memory_) {
      return make_message_sender(context_.communicator, spec_);
    }
    offer_.wait();
    const Answer answer = answer_.wait();
    check_same(context_, spec_, answer);
    const bool mapped = answer.kind == Answer::kMapped || deliver(answer.mailbox);
    memory_->close_fd();
    if (!mapped) {
      context_.warn_of_messages(spec_);
      return make_message_sender(context_.communicator, spec_);
    }
    return make_shared_sender(std::move(memory_), spec_,
                              context_.wait("channel send", spec_, answer.process));
  }

 private:
  bool deliver(uint64_t mailbox) {
    const bool delivered = post_fd(mailbox, memory_->fd());
    ValueMessage<Delivery> delivery;
    delivery.send(*context_.communicator, spec_, {delivered});
    delivery.wait();
    return delivered;
  }

  const Context& context_;
  const ChannelSpec spec_;
  std::shared_ptr<SharedMemory> memory_;
  ValueMessage<Offer> offer_;
  ValueMessage<Answer> answer_;
};

class IncomingOpening {
 public:
  // Step 1.
  IncomingOpening(const Context& context, const ChannelSpec& spec)
      : context_(context), spec_(spec) {
    if (context.shares_memory(spec)) {
      offer_.expect(*context.communicator, spec);
    }
  }

  // Step 2.
  void answer() {
    if (!context_.shares_memory(spec_)) {
      return;
    }
    offered_ = offer_.wait();
    const bool same = spec_.bytes == offered_.bytes && spec_.held == offered_.held &&
                      spec_.ahead == offered_.ahead;
    memory_ =
        same ? open_memory_of(offered_.process, offered_.fd, offered_.memory, total()) : nullptr;
    if (same && !memory_) {
      mailbox_ = std::make_unique<FdMailbox>(offered_.memory);
      delivery_.expect(*context_.communicator, spec_);
    }
    answer_.send(*context_.communicator, spec_,
                 {mailbox_ ? Answer::kSendDescriptor : Answer::kMapped, this_process(),
                  offered_.memory, spec_.bytes, spec_.held, spec_.ahead});
  }

  // Step 4.
  std::unique_ptr<Receiver> finish() {
    if (!context_.shares_memory(spec_)) {
      return make_message_receiver(context_.communicator, spec_);
    }
    answer_.wait();
    check_same(context_, spec_, offered_);
    if (mailbox_ && delivery_.wait().delivered) {
      memory_ = SharedMemory::map(mailbox_->take(), total(), offered_.memory);
      if (!memory_) {
        SharedMemory::fail(total(), "it was made but cannot be mapped");
      }
    }
    if (!memory_) {
      context_.warn_of_messages(spec_);
      return make_message_receiver(context_.communicator, spec_);
    }
    return make_shared_receiver(std::move(memory_), spec_,
                                context_.wait("channel receive", spec_, offered_.process));
  }

 private:
  size_t total() const { return SharedLayout(spec_).total(); }

  const Context& context_;
  const ChannelSpec spec_;
  Offer offered_{};
  std::shared_ptr<SharedMemory> memory_;
  std::unique_ptr<FdMailbox> mailbox_;
  ValueMessage<Offer> offer_;
  ValueMessage<Answer> answer_;
  ValueMessage<Delivery> delivery_;
};

}  // namespace

Channels open_channels(const std::shared_ptr<Transport>& transport,
                       const std::shared_ptr<const GroupState>& group,
                       const CommunicatorPtr& communicator,
                       const std::vector<ChannelSpec>& outgoing,
                       const std::vector<ChannelSpec>& incoming) {
  const Context context{transport, group, communicator};
  std::vector<OutgoingOpening> out;
  std::vector<IncomingOpening> in;
  for (const ChannelSpec& spec : incoming) {
    in.emplace_back(context, spec);
  }
  for (const ChannelSpec& spec : outgoing) {
    out.emplace_back(context, spec);
  }
  Channels channels;
  for (IncomingOpening& opening : in) {
    opening.answer();
  }
  for (OutgoingOpening& opening : out) {
    channels.senders.push_back(opening.finish());
  }
  for (IncomingOpening& opening : in) {
    channels.receivers.push_back(opening.finish());
  }
  return channels;
}

}  // namespace smp::comm
