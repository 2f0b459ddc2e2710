// SPDX-License-Identifier: Apache-2.0
#include "comm/collective_engine.h"

#include <ATen/ops/zeros.h>

#include <utility>

#include "comm/shm/places.h"
#include "core/check.h"
#include "core/env.h"

namespace smp::comm {
namespace {

using Kind = Collective::Kind;

// The tags above the users' belong to collectives, one for each until they come round again.
constexpr int kCollectiveTags = 1 << 20;

constexpr size_t kAlignment = 64;

size_t aligned(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

size_t bytes_of(const Collective& call) {
  return call.kind == Kind::kBarrier ? 0 : call.uniform_tensor().nbytes();
}

bool checks_by_environment() {
  static const bool on = core::env("SMP_COMM_CHECK") == "1";
  return on;
}

}  // namespace

CollectiveEngine::CollectiveEngine(std::shared_ptr<Transport> transport,
                                   std::shared_ptr<const GroupState> group)
    : transport_(std::move(transport)), group_(std::move(group)) {}

void CollectiveEngine::run(const Collective& call, const Deadline& deadline) {
  const OperationInfo info = next_info(call.name(), bytes_of(call));
  set_up(info, deadline);
  if (host_) {
    host_->run(call, info, deadline);
    return;
  }
  const Call own = call_of(signature_of(call));
  if (group_->check_collectives || checks_by_environment()) {
    compare_calls(own, info, deadline);
  }
  const CallExchange calls(own, group_->rank, group_->world_ranks);
  if (chain_ && chain_->takes(call)) {
    chain_->run(call, calls, info, deadline);
  } else {
    run_rounds(call, calls.before(rounds_of(call, group_->rank, group_->size)), info, deadline);
  }
}

int64_t CollectiveEngine::meet(const Collective& call, const Deadline& deadline) {
  return host_->meet(call, next_info(call.name(), bytes_of(call)), deadline);
}

at::Tensor CollectiveEngine::shared_tensor(int64_t numel, at::ScalarType dtype,
                                           const Deadline& deadline) {
  const size_t bytes = static_cast<size_t>(numel) * c10::elementSize(dtype);
  const OperationInfo info = next_info(Collective::name(Kind::kSharedTensor), bytes);
  set_up(info, deadline);
  Signature call;
  call.kind = Kind::kSharedTensor;
  call.dtype = static_cast<int8_t>(dtype);
  call.numel = numel;
  compare_calls(call_of(call), info, deadline);

  const size_t room = aligned(bytes);
  const auto memory =
      share_memory(*group_, layout_, SharedMemory::kReserved + layout_.local_size() * room,
                   messages(info, deadline));
  if (!memory || bytes == 0) {
    return at::zeros({numel}, at::TensorOptions(dtype));
  }
  return tensor_in(memory, SharedMemory::kReserved + layout_.local_rank * room, numel, dtype);
}

// A board for the ranks of this host, if there are others here. Not where a host's ranks are
// scattered over the group: sums in rank order would go from host to host many times.
void CollectiveEngine::set_up(const OperationInfo& info, const Deadline& deadline) {
  if (is_set_up_) {
    return;
  }
  layout_ = find_hosts(*transport_, *group_, messages(info, deadline));
  const bool one_host = layout_.hosts.size() == 1;
  const bool alone = static_cast<int>(layout_.hosts.size()) == group_->size;
  if (one_host || (!alone && layout_.is_contiguous())) {
    const bool in_one_process = one_host && layout_.is_one_process();
    const size_t bytes = HostBoard::bytes(layout_.local_size(), group_->size, !in_one_process);
    if (auto memory = share_memory(*group_, layout_, bytes, messages(info, deadline))) {
      auto board = std::make_unique<HostBoard>(transport_, group_, layout_, std::move(memory));
      if (one_host) {
        host_ = std::make_unique<HostCollectives>(std::move(board), in_one_process);
      } else {
        chain_ = std::make_unique<HostChain>(transport_, group_, layout_, std::move(board));
      }
    }
  }
  is_set_up_ = true;
}

void CollectiveEngine::run_rounds(const Collective& call, std::vector<Round> rounds,
                                  const OperationInfo& info, const Deadline& deadline) {
  const auto operation = std::make_shared<Operation>(
      group_, info, std::move(rounds), std::vector<at::Tensor>{call.output, call.input});
  operation->start(*transport_);
  wait_for(*transport_, *operation, deadline);
}

// Messages that the collective `info` needs; texts speak of that.
MessageCollectives CollectiveEngine::messages(const OperationInfo& info, const Deadline& deadline) {
  return [this, &info, &deadline](const Collective& call) {
    run_rounds(call, rounds_of(call, group_->rank, group_->size), next_info(info.verb, info.bytes),
               deadline);
  };
}

void CollectiveEngine::compare_calls(const Call& call, const OperationInfo& info,
                                     const Deadline& deadline) {
  const std::string text = mismatch_text(
      group_->world_ranks, gather_values(messages(info, deadline), group_->size, call));
  SMP_CHECK_WITH(CommError, text.empty(), describe(*group_, info),
                 " does not match the other ranks' calls: ", text);
}

OperationInfo CollectiveEngine::next_info(const char* verb, size_t bytes) {
  return {verb, bytes, -1, kMaxTag + 1 + static_cast<Tag>(collectives_++ % kCollectiveTags)};
}

}  // namespace smp::comm
