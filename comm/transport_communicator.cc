// SPDX-License-Identifier: Apache-2.0
#include "comm/transport_communicator.h"

#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <utility>

#include "comm/hand_over.h"
#include "comm/message_channel.h"
#include "comm/rounds.h"
#include "comm/shm/connect.h"
#include "core/check.h"
#include "core/refusal.h"

namespace smp::comm {
namespace {

// Longer ones would overflow the clock.
constexpr std::chrono::milliseconds kMaxTimeout = std::chrono::hours(24 * 365);

std::string join(const std::vector<int>& values) {
  return c10::str("[", c10::Join(", ", values), "]");
}

std::string bytes_of(const std::vector<int>& ranks) {
  return std::string(reinterpret_cast<const char*>(ranks.data()), ranks.size() * sizeof(int));
}

std::vector<int> ranks_of(const std::string& bytes) {
  std::vector<int> ranks(bytes.size() / sizeof(int));
  std::memcpy(ranks.data(), bytes.data(), bytes.size());
  return ranks;
}

// Why the members that `rank` passes to split() make no group.
core::Refusal why_no_group(const std::vector<int>& members, int rank, int size) {
  if (std::adjacent_find(members.begin(), members.end(), std::greater_equal<int>()) !=
      members.end()) {
    return "they must ascend";
  }
  if (std::find(members.begin(), members.end(), rank) == members.end()) {
    return c10::str("rank ", rank, ", which asks, must be among them");
  }
  if (members.front() < 0 || members.back() >= size) {
    return c10::str("they must lie in 0 to ", size - 1);
  }
  return std::nullopt;
}

Collective checked(const Collective& call, const GroupState& group) {
  Collective valid = call;
  check_collective(valid, group.name, group.rank, group.size);
  return valid;
}

}  // namespace

TransportCommunicator::TransportCommunicator(std::shared_ptr<Transport> transport,
                                             std::shared_ptr<GroupState> group)
    : transport_(std::move(transport)),
      group_(std::move(group)),
      engine_(std::make_shared<CollectiveEngine>(transport_, group_)),
      queue_(std::make_shared<CollectiveQueue>(group_)) {}

WorkPtr TransportCommunicator::isend(const at::Tensor& tensor, int destination, Tag tag) {
  check_tensor(name(), "isend", "tensor", tensor);
  check_rank(name(), "isend", "destination", destination, size());
  check_tag("isend", tag);
  const Message message{Message::Direction::kSend, destination,
                        const_cast<void*>(tensor.const_data_ptr()), tensor.nbytes()};
  return start({"isend", tensor.nbytes(), destination, tag}, {{{message}, nullptr}}, {tensor});
}

WorkPtr TransportCommunicator::irecv(const at::Tensor& tensor, int source, Tag tag) {
  check_rank(name(), "irecv", "source", source, size());
  return receive(tensor, source, tag);
}

ReceiveWorkPtr TransportCommunicator::irecv_from_any(const at::Tensor& tensor, Tag tag) {
  return receive(tensor, kAnyRank, tag);
}

ReceiveWorkPtr TransportCommunicator::receive(const at::Tensor& tensor, int source, Tag tag) {
  check_tensor(name(), "irecv", "tensor", tensor);
  check_tag("irecv", tag);
  const Message message{Message::Direction::kReceive, source, tensor.mutable_data_ptr(),
                        tensor.nbytes()};
  return start({"irecv", tensor.nbytes(), source, tag}, {{{message}, nullptr}}, {tensor});
}

WorkPtr TransportCommunicator::start(const Collective& call) {
  const Collective valid = checked(call, *group_);
  if (size() == 1) {
    return start({valid.name(), 0, -1, 0}, rounds_of(valid, 0, 1), {valid.output, valid.input});
  }
  return queue_->push(
      [engine = engine_, valid](const Deadline& deadline) { engine->run(valid, deadline); });
}

WorkPtr TransportCommunicator::start(at::Device /*device*/, CollectiveTask task) {
  if (size() == 1) {
    TaskCollectives alone([this](const Collective& call) { run(call); });
    task(alone);
    return start(Collective());
  }
  return queue_->push(
      [engine = engine_, group = group_, task = std::move(task)](const Deadline& deadline) {
        TaskCollectives collectives(
            [&](const Collective& call) { engine->run(checked(call, *group), deadline); });
        task(collectives);
      });
}

void TransportCommunicator::run(const Collective& call) {
  if (size() == 1) {
    start(call)->wait();
    return;
  }
  const Collective valid = checked(call, *group_);
  queue_->run([&](const Deadline& deadline) { engine_->run(valid, deadline); });
}

at::Tensor TransportCommunicator::shared_tensor(int64_t numel, at::ScalarType dtype) {
  SMP_CHECK_WITH(UsageError, numel >= 0, "shared_tensor on group '", name(),
                 "': expected 0 elements or more, got ", numel, ".");
  if (size() == 1) {
    return at::zeros({numel}, at::TensorOptions(dtype));
  }
  at::Tensor tensor;
  queue_->run(
      [&](const Deadline& deadline) { tensor = engine_->shared_tensor(numel, dtype, deadline); });
  return tensor;
}

Channels TransportCommunicator::open_channels(const std::vector<ChannelSpec>& outgoing,
                                              const std::vector<ChannelSpec>& incoming) {
  for (const ChannelSpec& spec : outgoing) {
    check_channel("destination", spec);
  }
  for (const ChannelSpec& spec : incoming) {
    check_channel("source", spec);
  }
  Channels channels = comm::open_channels(transport_, group_, shared_from_this(), of_host(outgoing),
                                          of_host(incoming));
  const auto hand_over = [&](const auto& specs, bool sends, auto& ends, const auto& make) {
    for (size_t i = 0; i < specs.size(); ++i) {
      HandOverQueues* const queues = queues_of(specs[i]);
      if (queues == nullptr) continue;
      int from = group_->world_rank, to = in_world(specs[i]);
      if (!sends) std::swap(from, to);
      auto queue = queues->open({group_->context, from, to, specs[i].tag}, sends);
      ends[i] = make(std::move(ends[i]), std::move(queue), specs[i]);
    }
  };
  hand_over(outgoing, /*sends=*/true, channels.senders, make_handing_sender);
  hand_over(incoming, /*sends=*/false, channels.receivers, make_handing_receiver);
  return channels;
}

int TransportCommunicator::in_world(const ChannelSpec& spec) const {
  return group_->world_ranks[spec.peer];
}

HandOverQueues* TransportCommunicator::queues_of(const ChannelSpec& spec) const {
  return moves_on_device(spec) ? transport_->queues_between(group_->world_rank, in_world(spec))
                               : nullptr;
}

std::vector<ChannelSpec> TransportCommunicator::of_host(std::vector<ChannelSpec> specs) const {
  for (ChannelSpec& spec : specs) {
    spec = queues_of(spec) == nullptr ? spec : host_part(spec);
  }
  return specs;
}

template <class Property>
bool TransportCommunicator::has_everywhere(const Communicator& group, const Property& property) {
  const auto* of_transport = dynamic_cast<const TransportCommunicator*>(&group);
  if (of_transport == nullptr) {
    return false;
  }
  const GroupState& state = *of_transport->group_;
  return std::all_of(state.world_ranks.begin(), state.world_ranks.end(), [&](int other) {
    return property(*of_transport->transport_, state.world_rank, other);
  });
}

bool is_one_process(const Communicator& group) {
  const auto hands_over = [](Transport& transport, int rank, int other) {
    return transport.queues_between(rank, other) != nullptr;
  };
  return group.size() > 1 && TransportCommunicator::has_everywhere(group, hands_over);
}

bool is_one_host(const Communicator& group) {
  return TransportCommunicator::has_everywhere(group, std::mem_fn(&Transport::shares_memory));
}

void CollectiveTurn::all_gather(const at::Tensor& output, const at::Tensor& input) {
  Collective call;
  call.kind = Collective::Kind::kAllGather;
  call.output = output;
  call.input = input;
  engine_.run(checked(call, group_), deadline_);
}

bool has_turns(const Communicator& group) {
  const auto* of_transport = dynamic_cast<const TransportCommunicator*>(&group);
  return of_transport != nullptr && of_transport->engine_->can_meet();
}

void take_turn(Communicator& group, const TurnTask& task) {
  auto& of_transport = dynamic_cast<TransportCommunicator&>(group);
  of_transport.queue_->run(
      [&, engine = of_transport.engine_, state = of_transport.group_](const Deadline& deadline) {
        CollectiveTurn turn(*engine, *state, deadline);
        task(turn);
      });
}

WorkPtr start_turn(Communicator& group, TurnTask task) {
  auto& of_transport = dynamic_cast<TransportCommunicator&>(group);
  return of_transport.queue_->push([engine = of_transport.engine_, state = of_transport.group_,
                                    task = std::move(task)](const Deadline& deadline) {
    CollectiveTurn turn(*engine, *state, deadline);
    task(turn);
  });
}

CommunicatorPtr TransportCommunicator::split(const std::vector<int>& members,
                                             const std::string& name) {
  check_members(members);
  auto group = std::make_shared<GroupState>();
  group->name = name;
  group->size = static_cast<int>(members.size());
  group->rank =
      static_cast<int>(std::find(members.begin(), members.end(), rank()) - members.begin());
  group->world_rank = group_->world_rank;
  for (const int member : members) {
    group->world_ranks.push_back(group_->world_ranks[member]);
  }
  group->context = transport_->make_context(*group_, members.front());
  group->timeout_ms = group_->timeout_ms.load();
  group->check_collectives = group_->check_collectives.load();
  group->device_transport = group_->device_transport;
  group->world_end = group_->world_end;
  return std::make_shared<TransportCommunicator>(transport_, std::move(group));
}

// Every rank looks at all lists, so that either all ranks throw or all go on to make the context
// together. An invalid list is told to the others as an empty one.
void TransportCommunicator::check_members(const std::vector<int>& members) {
  const core::Refusal refusal = why_no_group(members, rank(), size());
  const auto lists = all_gather_bytes(*this, refusal ? "" : bytes_of(members));
  SMP_CHECK_WITH(UsageError, !refusal, "split of group '", name(), "' into ranks ", join(members),
                 ": ", *refusal, ".");
  for (int one = 0; one < size(); ++one) {
    SMP_CHECK_WITH(UsageError, !lists[one].empty(), "split of group '", name(), "': rank ", one,
                   " passes a list of ranks that is refused there; its error says why.");
  }
  for (int one = 0; one < size(); ++one) {
    for (const int other : ranks_of(lists[one])) {
      SMP_CHECK_WITH(UsageError, lists[other] == lists[one], "split of group '", name(), "': rank ",
                     one, " passes the ranks ", join(ranks_of(lists[one])), " but rank ", other,
                     ", one of them, passes ", join(ranks_of(lists[other])),
                     ". All members must pass the same list.");
    }
  }
}

void TransportCommunicator::abort(const std::string& reason) noexcept {
  transport_->abort(group_->world_rank, reason);
}

void TransportCommunicator::set_timeout(std::chrono::milliseconds timeout) {
  SMP_CHECK_WITH(UsageError, timeout.count() > 0, "set_timeout on group '", name(),
                 "': expected a positive time, got ", timeout.count(), " ms.");
  group_->timeout_ms = std::min(timeout, kMaxTimeout).count();
}

void TransportCommunicator::check_tag(const char* verb, Tag tag) const {
  SMP_CHECK_WITH(UsageError, tag >= 0 && tag <= kMaxTag, verb, " on group '", name(),
                 "': expected a tag in 0 to ", kMaxTag, ", got ", tag, ".");
}

void TransportCommunicator::check_channel(const char* argument, const ChannelSpec& spec) const {
  check_rank(name(), "open_channels", argument, spec.peer, size());
  SMP_CHECK_WITH(UsageError, spec.tag >= 0 && spec.tag <= kMaxChannelTag,
                 "open_channels on group '", name(), "': expected a tag in 0 to ", kMaxChannelTag,
                 ", got ", spec.tag, ".");
  SMP_CHECK_WITH(UsageError, spec.bytes >= 0 && spec.held >= 0 && spec.ahead >= 1,
                 "open_channels on group '", name(),
                 "': expected messages of 0 bytes or more, 0 or "
                 "more held and 1 or more ahead, got ",
                 spec.bytes, " bytes, ", spec.held, " held and ", spec.ahead, " ahead.");
}

ReceiveWorkPtr TransportCommunicator::start(OperationInfo info, std::vector<Round> rounds,
                                            std::vector<at::Tensor> tensors) {
  auto operation = std::make_shared<Operation>(group_, info, std::move(rounds), std::move(tensors));
  operation->start(*transport_);
  return make_work(transport_, std::move(operation));
}

}  // namespace smp::comm
