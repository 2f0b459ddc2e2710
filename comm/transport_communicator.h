// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/collective_engine.h"
#include "comm/collective_queue.h"
#include "comm/communicator.h"
#include "comm/operation.h"
#include "comm/transport.h"

namespace smp::comm {

/// The turn of a collective that moves its tensors by a way of its own, among the collectives of a
/// group of several ranks.
class CollectiveTurn {
 public:
  CollectiveTurn(CollectiveEngine& engine, const GroupState& group, const Deadline& deadline)
      : engine_(engine), group_(group), deadline_(deadline) {}

  /// Returns when the hosts of all ranks have come here with the same call, whose tensors are not
  /// touched: the longest split of all ranks of an all_to_all, otherwise 0. Throws as `Work::wait`
  /// does, and on all ranks where the calls differ.
  int64_t meet(const Collective& call) { return engine_.meet(call, deadline_); }

  /// Gathers on the CPU.
  void all_gather(const at::Tensor& output, const at::Tensor& input);

 private:
  CollectiveEngine& engine_;
  const GroupState& group_;
  const Deadline& deadline_;
};
using TurnTask = std::function<void(CollectiveTurn&)>;

/// The one implementation of Communicator: checks arguments, makes operations and starts them on
/// the transport of its back end; queues collectives for the engine.
class TransportCommunicator final : public Communicator {
 public:
  TransportCommunicator(std::shared_ptr<Transport> transport, std::shared_ptr<GroupState> group);

  int rank() const override { return group_->rank; }
  int size() const override { return group_->size; }
  const std::string& name() const override { return group_->name; }

  WorkPtr isend(const at::Tensor& tensor, int destination, Tag tag) override;
  WorkPtr irecv(const at::Tensor& tensor, int source, Tag tag) override;
  ReceiveWorkPtr irecv_from_any(const at::Tensor& tensor, Tag tag) override;
  WorkPtr start(const Collective& call) override;
  WorkPtr start(at::Device device, CollectiveTask task) override;
  void run(const Collective& call) override;
  at::Tensor shared_tensor(int64_t numel, at::ScalarType dtype) override;
  Channels open_channels(const std::vector<ChannelSpec>& outgoing,
                         const std::vector<ChannelSpec>& incoming) override;
  CommunicatorPtr split(const std::vector<int>& members, const std::string& name) override;
  void set_device_transport(const DeviceTransport& transport) override {
    group_->device_transport = transport;
  }
  DeviceTransport device_transport() const override { return group_->device_transport; }
  const std::shared_ptr<WorldEnd>& world_end() const override { return group_->world_end; }
  void abort(const std::string& reason) noexcept override;
  std::string abort_text() const override { return transport_->abort_text(); }
  void set_timeout(std::chrono::milliseconds timeout) override;
  std::chrono::milliseconds timeout() const override { return group_->timeout(); }
  void check_collectives(bool on) override { group_->check_collectives = on; }

 private:
  friend bool is_one_process(const Communicator& group);
  friend bool is_one_host(const Communicator& group);
  friend bool has_turns(const Communicator& group);
  friend void take_turn(Communicator& group, const TurnTask& task);
  friend WorkPtr start_turn(Communicator& group, TurnTask task);

  /// Whether the transport has a property between this rank and each of a group.
  template <class Property>
  static bool has_everywhere(const Communicator& group, const Property& property);
  int in_world(const ChannelSpec& spec) const;
  HandOverQueues* queues_of(const ChannelSpec& spec) const;
  std::vector<ChannelSpec> of_host(std::vector<ChannelSpec> specs) const;
  void check_tag(const char* verb, Tag tag) const;
  void check_channel(const char* argument, const ChannelSpec& spec) const;
  void check_members(const std::vector<int>& members);
  ReceiveWorkPtr receive(const at::Tensor& tensor, int source, Tag tag);
  ReceiveWorkPtr start(OperationInfo info, std::vector<Round> rounds,
                       std::vector<at::Tensor> tensors);

  const std::shared_ptr<Transport> transport_;
  const std::shared_ptr<GroupState> group_;
  const std::shared_ptr<CollectiveEngine> engine_;
  const std::shared_ptr<CollectiveQueue> queue_;
};

/// Whether the ranks of a group of several are threads of one process, so that its channels hand
/// tensors of devices over (comm/hand_over.h).
bool is_one_process(const Communicator& group);

/// Whether the ranks of a group can map the same memory.
bool is_one_host(const Communicator& group);

/// Whether a group of several ranks has turns: all on one host, with memory that they share. The
/// same on all ranks, after a first collective.
bool has_turns(const Communicator& group);

/// Waits for the next turn and runs `task` in it, on this thread or that of the group's
/// collectives. Throws its errors.
void take_turn(Communicator& group, const TurnTask& task);

/// Does so on the thread of the group's collectives; the work throws the errors.
WorkPtr start_turn(Communicator& group, TurnTask task);

}  // namespace smp::comm
