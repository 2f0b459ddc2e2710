// SPDX-License-Identifier: Apache-2.0
#include "comm/nccl/group_channels.h"

#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <deque>
#include <tuple>
#include <utility>

#include "comm/device_streams.h"
#include "comm/split_channel.h"
#include "core/kept_tensors.h"

namespace smp::comm {
namespace {

class GroupSender final : public SplitSender {
 public:
  GroupSender(std::unique_ptr<Sender> host, DeviceGroup group, const ChannelSpec& spec,
              std::shared_ptr<GroupPool> pool)
      : SplitSender(std::move(host), spec), pool_(std::move(pool)), group_(std::move(group)) {}

  ~GroupSender() override {
    for (DeviceTransfer& sent : sent_) {
      pool_->keep(std::move(sent));
    }
  }

 private:
  // Memory is used again, oldest first.
  at::Tensor take_elements(int64_t bytes) override {
    if (sent_.empty() || !sent_.front().work->isCompleted()) {
      return make_elements(bytes, device());
    }
    const at::Tensor part = std::move(sent_.front().tensor);
    sent_.pop_front();
    return part.numel() == bytes ? part : make_elements(bytes, device());
  }

  void send_elements(at::Tensor elements) override {
    std::vector<at::Tensor> part = {std::move(elements)};
    auto work = group_->send(part, kReceiverRank, /*tag=*/0);
    sent_.push_back({std::move(work), std::move(part[0])});
  }

  const std::shared_ptr<GroupPool> pool_;
  const DeviceGroup group_;
  std::deque<DeviceTransfer> sent_;  // elements on their way, which arrive in this order
};

class GroupReceiver final : public SplitReceiver {
 public:
  GroupReceiver(std::unique_ptr<Receiver> host, DeviceGroup group, const ChannelSpec& spec,
                std::shared_ptr<GroupPool> pool)
      : SplitReceiver(std::move(host), spec),
        pool_(std::move(pool)),
        group_(std::move(group)),
        side_(side_stream(spec.device)) {}

 private:
  at::Tensor receive_elements(int64_t bytes) override {
    std::vector<at::Tensor> part;
    c10::intrusive_ptr<c10d::Work> work;
    {
      // A group waits for the current stream before it writes: the elements do not wait for
      // computations here, since their memory is another stream's.
      const c10::StreamGuard guard(side_);
      part = {make_elements(bytes, device())};
      work = group_->recv(part, kSenderRank, /*tag=*/0);
    }
    work->wait();
    const at::Tensor received = part[0].clone();  // in memory of the current stream
    arrived_.keep(std::move(part), current_stream(device()));
    return received;
  }

  const std::shared_ptr<GroupPool> pool_;  // kept as long as the group is used
  const DeviceGroup group_;
  const c10::Stream side_;
  core::KeptTensors arrived_;
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
