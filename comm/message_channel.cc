// SPDX-License-Identifier: Apache-2.0
#include "comm/message_channel.h"

#include <ATen/ops/empty.h>

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

class MessageSender final : public Sender {
 public:
  MessageSender(CommunicatorPtr group, const ChannelSpec& spec)
      : group_(std::move(group)), spec_(spec), bytes_(spec.bytes) {}

  void set_size(const MessageSize& size) override { bytes_ = size.bytes; }

  const at::Tensor& prepare() override {
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
  }

  void flush() override {
    for (const Pending& pending : sent_) {
      pending.work->wait();
    }
  }

 private:
  const CommunicatorPtr group_;
  const ChannelSpec spec_;
  int64_t bytes_;
  at::Tensor next_;
  std::deque<Pending> sent_;  // their memory is used again, oldest first
};

class MessageReceiver final : public Receiver {
 public:
  MessageReceiver(CommunicatorPtr group, const ChannelSpec& spec)
      : group_(std::move(group)), spec_(spec), bytes_(spec.bytes) {}

  void set_size(const MessageSize& size) override { bytes_ = size.bytes; }

  void expect(int messages) override {
    expected_ += messages;
    post();
  }

  at::Tensor receive() override {
    SMP_INTERNAL_ASSERT(!posted_.empty(), "a message was not expected");
    Pending pending = std::move(posted_.front());
    posted_.pop_front();
    post();
    pending.work->wait();
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
