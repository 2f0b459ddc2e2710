#include "comm/transport_communicator.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <utility>

#include "comm/reduce.h"
#include "comm/rounds.h"
#include "comm/shm/connect.h"
#include "smp/core/error.h"

namespace smp::comm {
namespace {

// The tags above the users' belong to collectives, one for each until they come round again.
constexpr int kCollectiveTags = 1 << 20;

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

// What is wrong with the members that `rank` passes to split(); empty when nothing is.
std::string problem_of(const std::vector<int>& members, int rank, int size) {
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
  return "";
}

}  // namespace

TransportCommunicator::TransportCommunicator(std::shared_ptr<Transport> transport,
                                             std::shared_ptr<Group> group)
    : transport_(std::move(transport)), group_(std::move(group)) {}

WorkPtr TransportCommunicator::isend(const at::Tensor& tensor, int destination, Tag tag) {
  check_tensor("isend", "tensor", tensor);
  check_rank("isend", "destination", destination);
  check_tag("isend", tag);
  const Message message{Message::Direction::kSend, destination,
                        const_cast<void*>(tensor.const_data_ptr()), tensor.nbytes()};
  return start({"isend", tensor.nbytes(), destination, tag}, {{{message}, nullptr}}, {tensor});
}

WorkPtr TransportCommunicator::irecv(const at::Tensor& tensor, int source, Tag tag) {
  check_tensor("irecv", "tensor", tensor);
  check_rank("irecv", "source", source);
  check_tag("irecv", tag);
  const Message message{Message::Direction::kReceive, source, tensor.mutable_data_ptr(),
                        tensor.nbytes()};
  return start({"irecv", tensor.nbytes(), source, tag}, {{{message}, nullptr}}, {tensor});
}

WorkPtr TransportCommunicator::iall_reduce(const at::Tensor& tensor, ReduceOp op) {
  check_tensor("all_reduce", "tensor", tensor);
  check_can_reduce(name(), tensor.scalar_type(), op);
  return start({"all_reduce", tensor.nbytes(), -1, next_collective_tag()},
               all_reduce_rounds(rank(), size(), tensor, op), {tensor});
}

WorkPtr TransportCommunicator::ibroadcast(const at::Tensor& tensor, int root) {
  check_tensor("broadcast", "tensor", tensor);
  check_rank("broadcast", "root", root);
  return start({"broadcast", tensor.nbytes(), -1, next_collective_tag()},
               broadcast_rounds(rank(), size(), tensor, root), {tensor});
}

WorkPtr TransportCommunicator::iall_gather(const at::Tensor& output, const at::Tensor& input) {
  check_tensor("all_gather", "output", output);
  check_tensor("all_gather", "input", input);
  SMP_CHECK_WITH(UsageError,
                 output.scalar_type() == input.scalar_type() &&
                     output.numel() == input.numel() * size(),
                 "all_gather on group '", name(), "': expected an output of ", size(), " x ",
                 input.numel(), " elements of ", input.scalar_type(), ", got ", output.numel(),
                 " of ", output.scalar_type(), ". Allocate size() times the input.");
  return start({"all_gather", input.nbytes(), -1, next_collective_tag()},
               all_gather_rounds(rank(), size(), output, input), {output, input});
}

Channels TransportCommunicator::open_channels(const std::vector<ChannelSpec>& outgoing,
                                              const std::vector<ChannelSpec>& incoming) {
  for (const ChannelSpec& spec : outgoing) {
    check_channel("destination", spec);
  }
  for (const ChannelSpec& spec : incoming) {
    check_channel("source", spec);
  }
  return comm::open_channels(transport_, group_, shared_from_this(), outgoing, incoming);
}

void TransportCommunicator::barrier() {
  start({"barrier", 0, -1, next_collective_tag()}, barrier_rounds(rank(), size()), {})->wait();
}

CommunicatorPtr TransportCommunicator::split(const std::vector<int>& members,
                                             const std::string& name) {
  check_members(members);
  auto group = std::make_shared<Group>();
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
  return std::make_shared<TransportCommunicator>(transport_, std::move(group));
}

// Every rank looks at all lists, so that either all ranks throw or all go on to make the context
// together. An invalid list is told to the others as an empty one.
void TransportCommunicator::check_members(const std::vector<int>& members) {
  const std::string problem = problem_of(members, rank(), size());
  const auto lists = all_gather_bytes(*this, problem.empty() ? bytes_of(members) : "");
  SMP_CHECK_WITH(UsageError, problem.empty(), "split of group '", name(), "' into ranks ",
                 join(members), ": ", problem, ".");
  for (int one = 0; one < size(); ++one) {
    SMP_CHECK_WITH(UsageError, !lists[one].empty(), "split of group '", name(), "': rank ", one,
                   " passes a list of ranks that is refused there; its error says why.");
  }
  for (int one = 0; one < size(); ++one) {
    for (const int other : ranks_of(lists[one])) {
      SMP_CHECK_WITH(UsageError, lists[other] == lists[one], "split of group '", name(),
                     "': rank ", one, " passes the ranks ", join(ranks_of(lists[one])),
                     " but rank ", other, ", one of them, passes ", join(ranks_of(lists[other])),
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

std::chrono::milliseconds TransportCommunicator::timeout() const {
  return std::chrono::milliseconds(group_->timeout_ms.load());
}

void TransportCommunicator::check_tensor(const char* verb, const char* argument,
                                         const at::Tensor& tensor) const {
  SMP_CHECK_WITH(UsageError, tensor.defined(), verb, " on group '", name(), "': ", argument,
                 " is undefined.");
  SMP_CHECK_WITH(UsageError, tensor.device().is_cpu() && tensor.layout() == c10::kStrided, verb,
                 " on group '", name(), "': expected ", argument,
                 " to be a dense tensor on the CPU, got ", tensor.layout(), " on ", tensor.device(),
                 ". Copy it to the CPU first.");
  SMP_CHECK_WITH(UsageError, tensor.is_contiguous(), verb, " on group '", name(), "': expected ",
                 argument, " to be contiguous, got sizes ", tensor.sizes(), " with strides ",
                 tensor.strides(), ". Pass contiguous() of it.");
}

void TransportCommunicator::check_rank(const char* verb, const char* argument, int rank) const {
  SMP_CHECK_WITH(UsageError, rank >= 0 && rank < size(), verb, " on group '", name(),
                 "': expected ", argument, " in 0 to ", size() - 1, ", got ", rank, ".");
}

void TransportCommunicator::check_tag(const char* verb, Tag tag) const {
  SMP_CHECK_WITH(UsageError, tag >= 0 && tag <= kMaxTag, verb, " on group '", name(),
                 "': expected a tag in 0 to ", kMaxTag, ", got ", tag, ".");
}

void TransportCommunicator::check_channel(const char* argument, const ChannelSpec& spec) const {
  check_rank("open_channels", argument, spec.peer);
  check_tag("open_channels", spec.tag);
  SMP_CHECK_WITH(UsageError, spec.bytes >= 0 && spec.held >= 0 && spec.ahead >= 1,
                 "open_channels on group '", name(), "': expected messages of 0 bytes or more, 0 or "
                 "more held and 1 or more ahead, got ", spec.bytes, " bytes, ", spec.held,
                 " held and ", spec.ahead, " ahead.");
}

WorkPtr TransportCommunicator::start(OperationInfo info, std::vector<Round> rounds,
                                     std::vector<at::Tensor> tensors) {
  auto operation = std::make_shared<Operation>(group_, info, std::move(rounds), std::move(tensors));
  operation->start(*transport_);
  return make_work(transport_, std::move(operation));
}

Tag TransportCommunicator::next_collective_tag() {
  return kMaxTag + 1 + collectives_.fetch_add(1) % kCollectiveTags;
}

}  // namespace smp::comm
