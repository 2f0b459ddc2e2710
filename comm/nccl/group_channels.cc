// SPDX-License-Identifier: Apache-2.0
#include "comm/nccl/group_channels.h"

#include <ATen/ops/empty.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <deque>
#include <tuple>
#include <utility>

#include "core/kept_tensors.h"

namespace smp::comm {
namespace {

c10::impl::VirtualGuardImpl guard_of(at::Device device) {
  return c10::impl::VirtualGuardImpl(device.type());
}

at::Tensor make_part(const MessageSize& size, at::Device device) {
  return at::empty({size.bytes - size.host_bytes}, at::TensorOptions(at::kByte).device(device));
}

class GroupSender final : public Sender {
 public:
  GroupSender(std::unique_ptr<Sender> host, DeviceGroup group, const ChannelSpec& spec,
              std::shared_ptr<GroupPool> pool)
      : host_(std::move(host)),
        pool_(std::move(pool)),
        group_(std::move(group)),
        device_(spec.device),
        size_{spec.bytes, spec.host_bytes} {}

  ~GroupSender() override {
    for (DeviceTransfer& sent : sent_) {
      pool_->keep(std::move(sent));
    }
  }

  void set_size(const MessageSize& size) override {
    host_->set_size({size.host_bytes});
    size_ = size;
  }

  const at::Tensor& prepare() override {
    const at::Tensor& message = host_->prepare();
    if (!next_.defined()) {
      next_ = take_part();
    }
    return message;
  }

  at::Tensor device_part() override { return next_; }

  void send() override {
    std::vector<at::Tensor> part = {std::exchange(next_, at::Tensor())};
    auto work = group_->send(part, kReceiverRank, /*tag=*/0);
    sent_.push_back({std::move(work), std::move(part[0])});
    host_->send();
  }

  void flush() override { host_->flush(); }

 private:
  // Memory is used again, oldest first.
  at::Tensor take_part() {
    if (sent_.empty() || !sent_.front().work->isCompleted()) {
      return make_part(size_, device_);
    }
    const at::Tensor part = std::move(sent_.front().tensor);
    sent_.pop_front();
    return part.numel() == size_.bytes - size_.host_bytes ? part : make_part(size_, device_);
  }

  const std::unique_ptr<Sender> host_;
  const std::shared_ptr<GroupPool> pool_;
  const DeviceGroup group_;
  const at::Device device_;
  MessageSize size_;
  at::Tensor next_;
  std::deque<DeviceTransfer> sent_;  // elements on their way, which arrive in this order
};

class GroupReceiver final : public Receiver {
 public:
  GroupReceiver(std::unique_ptr<Receiver> host, DeviceGroup group, const ChannelSpec& spec,
                std::shared_ptr<GroupPool> pool)
      : host_(std::move(host)),
        pool_(std::move(pool)),
        group_(std::move(group)),
        device_(spec.device),
        side_(guard_of(spec.device).getStreamFromGlobalPool(spec.device)),
        size_{spec.bytes, spec.host_bytes} {}

  void set_size(const MessageSize& size) override {
    host_->set_size({size.host_bytes});
    size_ = size;
  }

  void expect(int messages) override { host_->expect(messages); }

  at::Tensor receive() override {
    at::Tensor message = host_->receive();
    std::vector<at::Tensor> part;
    c10::intrusive_ptr<c10d::Work> work;
    {
      // A group waits for the current stream before it writes: the elements do not wait for
      // computations here, since their memory is another stream's.
      const c10::StreamGuard guard(side_);
      part = {make_part(size_, device_)};
      work = group_->recv(part, kSenderRank, /*tag=*/0);
    }
    work->wait();
    received_ = part[0].clone();  // in memory of the current stream
    arrived_.keep(std::move(part), guard_of(device_).getStream(device_));
    return message;
  }

  at::Tensor device_part() override { return std::exchange(received_, at::Tensor()); }

 private:
  const std::unique_ptr<Receiver> host_;
  const std::shared_ptr<GroupPool> pool_;  // kept as long as the group is used
  const DeviceGroup group_;
  const at::Device device_;
  const c10::Stream side_;
  MessageSize size_;
  core::KeptTensors arrived_;
  at::Tensor received_;
};

}  // namespace

std::vector<ChannelEnd> connection_order(int rank, const std::vector<ChannelSpec>& outgoing,
                                         const std::vector<ChannelSpec>& incoming) {
  std::vector<std::pair<std::tuple<int, int, int>, ChannelEnd>> ends;  // tag, sender, receiver
  for (size_t i = 0; i < outgoing.size(); ++i) {
    if (moves_on_device(outgoing[i])) {
      ends.push_back({{outgoing[i].tag, rank, outgoing[i].peer}, {/*sends=*/true, i}});
    }
  }
  for (size_t i = 0; i < incoming.size(); ++i) {
    if (moves_on_device(incoming[i])) {
      ends.push_back({{incoming[i].tag, incoming[i].peer, rank}, {/*sends=*/false, i}});
    }
  }
  std::stable_sort(ends.begin(), ends.end(),
                   [](const auto& a, const auto& b) { return a.first < b.first; });
  std::vector<ChannelEnd> order;
  for (const auto& end : ends) {
    order.push_back(end.second);
  }
  return order;
}

std::unique_ptr<Sender> make_group_sender(std::unique_ptr<Sender> host, DeviceGroup group,
                                          const ChannelSpec& spec,
                                          std::shared_ptr<GroupPool> pool) {
  return std::make_unique<GroupSender>(std::move(host), std::move(group), spec, std::move(pool));
}

std::unique_ptr<Receiver> make_group_receiver(std::unique_ptr<Receiver> host, DeviceGroup group,
                                              const ChannelSpec& spec,
                                              std::shared_ptr<GroupPool> pool) {
  return std::make_unique<GroupReceiver>(std::move(host), std::move(group), spec, std::move(pool));
}

}  // namespace smp::comm
