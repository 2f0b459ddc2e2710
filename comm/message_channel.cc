// SPDX-License-Identifier: Apache-2.0
#include "comm/message_channel.h"

#include <ATen/ops/empty.h>

#include <atomic>
#include <cstring>
#include <deque>
#include <utility>

#include "core/check.h"

namespace smp::comm {
namespace {

// A message under way.
struct Pending {
  WorkPtr work;
  at::Tensor message;
};

at::Tensor make_message(const ChannelSpec& spec, int64_t bytes) {
  const auto options = at::TensorOptions(at::kByte).pinned_memory(spec.device.is_cuda());
  return at::empty({bytes}, options);
}

// Numbers the channels that a process sends on. The sender tells the receiver, which repeats it for
// each message received, so that a channel does not count messages of an earlier one with this tag.
using ChannelNumber = uint64_t;

Tag number_tag(const ChannelSpec& spec) { return 12 * (kMaxChannelTag + 1) + spec.tag; }
Tag received_tag(const ChannelSpec& spec) { return 13 * (kMaxChannelTag + 1) + spec.tag; }

at::Tensor to_tensor(ChannelNumber number) {
  const at::Tensor bytes = at::empty({sizeof number}, at::kByte);
  std::memcpy(bytes.mutable_data_ptr(), &number, sizeof number);
  return bytes;
}

ChannelNumber to_number(const at::Tensor& bytes) {
  ChannelNumber number = 0;
  std::memcpy(&number, bytes.const_data_ptr(), sizeof number);
  return number;
}

class MessageSender final : public Sender {
 public:
  MessageSender(CommunicatorPtr group, const ChannelSpec& spec)
      : group_(std::move(group)), spec_(spec), bytes_(spec.bytes) {
    group_->isend(to_tensor(number_), spec_.peer, number_tag(spec_));
  }

  void set_size(const MessageSize& size) override { bytes_ = size.bytes; }

  const at::Tensor& prepare() override {
    while (not_received_ >= spec_.held + spec_.ahead) {
      hear();
    }
    if (!next_.defined() && !sent_.empty() && sent_.front().work->test()) {
      sent_.front().work->wait();  // throws when it has failed
      next_ = std::move(sent_.front().message);
      sent_.pop_front();
    }
    if (!next_.defined() || next_.numel() != bytes_) {
      next_ = make_message(spec_, bytes_);
    }
    return next_;
  }

  void send() override {
    WorkPtr work = group_->isend(next_, spec_.peer, spec_.tag);
    sent_.push_back({std::move(work), std::exchange(next_, at::Tensor())});
    ++not_received_;
  }

  void flush() override {
    for (const Pending& pending : sent_) {
      pending.work->wait();
    }
  }

 private:
  static ChannelNumber next_number() {
    static std::atomic<ChannelNumber> count{0};
    return ++count;
  }

  // Waits until the receiver says that it has received a message. A message after a time-out is not
  // lost.
  void hear() {
    if (!heard_.work) {
      heard_.message = to_tensor(0);
      heard_.work = group_->irecv(heard_.message, spec_.peer, received_tag(spec_));
    }
    heard_.work->wait();
    heard_.work = nullptr;
    not_received_ -= to_number(heard_.message) == number_ ? 1 : 0;
  }

  const CommunicatorPtr group_;
  const ChannelSpec spec_;
  const ChannelNumber number_ = next_number();
  int64_t bytes_;
  int not_received_ = 0;  // messages not received, as far as was heard
  Pending heard_;
  at::Tensor next_;
  std::deque<Pending> sent_;  // their memory is used again, oldest first
};

class MessageReceiver final : public Receiver {
 public:
  MessageReceiver(CommunicatorPtr group, const ChannelSpec& spec)
      : group_(std::move(group)), spec_(spec), bytes_(spec.bytes) {
    number_.message = to_tensor(0);
    number_.work = group_->irecv(number_.message, spec_.peer, number_tag(spec_));
  }

  void set_size(const MessageSize& size) override { bytes_ = size.bytes; }

  void expect(int messages) override {
    expected_ += messages;
    post();
  }

  bool has_arrived() override { return !posted_.empty() && posted_.front().work->test(); }

  at::Tensor receive() override {
    SMP_INTERNAL_ASSERT(!posted_.empty(), "a message was not expected");
    Pending pending = std::move(posted_.front());
    posted_.pop_front();
    post();
    pending.work->wait();
    number_.work->wait();  // it came before
    group_->isend(number_.message, spec_.peer, received_tag(spec_));
    return std::move(pending.message);
  }

 private:
  void post() {
    for (; expected_ > 0 && static_cast<int>(posted_.size()) < spec_.ahead; --expected_) {
      at::Tensor message = make_message(spec_, bytes_);
      WorkPtr work = group_->irecv(message, spec_.peer, spec_.tag);
      posted_.push_back({std::move(work), std::move(message)});
    }
  }

  const CommunicatorPtr group_;
  const ChannelSpec spec_;
  int64_t bytes_;
  Pending number_;
  int expected_ = 0;  // and not yet posted
  std::deque<Pending> posted_;
};

}  // namespace

std::unique_ptr<Sender> make_message_sender(CommunicatorPtr group, const ChannelSpec& spec) {
  return std::make_unique<MessageSender>(std::move(group), spec);
}

std::unique_ptr<Receiver> make_message_receiver(CommunicatorPtr group, const ChannelSpec& spec) {
  return std::make_unique<MessageReceiver>(std::move(group), spec);
}

}  // namespace smp::comm
