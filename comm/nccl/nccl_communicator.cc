#include "comm/nccl/nccl_communicator.h"

#include <ATen/ops/add.h>
#include <ATen/ops/bitwise_and.h>
#include <ATen/ops/bitwise_or.h>
#include <ATen/ops/bitwise_xor.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/div.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/zeros.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <cuda_runtime_api.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <tuple>
#include <utility>

#include "comm/device/device_communicator.h"
#include "smp/core/error.h"

namespace smp::comm {
namespace {

using NcclGroup = std::shared_ptr<c10d::ProcessGroupNCCL>;
using NcclWork = c10::intrusive_ptr<c10d::Work>;
using Tensors = std::vector<at::Tensor>;

std::string host_name() {
  std::array<char, 256> name{};
  SMP_INTERNAL_ASSERT(gethostname(name.data(), name.size() - 1) == 0, "gethostname failed");
  return name.data();
}

c10::Stream current_stream(at::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

// Where the ranks of a group leave word for each other while NCCL connects: rank 0 serves it, and
// tells the others over the host's communicator where.
c10::intrusive_ptr<c10d::Store> make_store(Communicator& host) {
  const std::vector<std::string> names = all_gather_bytes(host, host_name());
  const bool one_host = std::all_of(names.begin(), names.end(),
                                    [&](const std::string& name) { return name == names[0]; });
  const std::string address = one_host ? "127.0.0.1" : names[0];
  c10d::TCPStoreOptions options;
  options.port = 0;  // any that is free
  options.isServer = host.rank() == 0;
  options.waitWorkers = false;
  options.timeout = host.timeout();
  c10::intrusive_ptr<c10d::TCPStore> store;
  if (options.isServer) {
    store = c10::make_intrusive<c10d::TCPStore>(address, options);
  }
  const std::string port =
      broadcast_bytes(host, store ? std::to_string(store->getPort()) : "", /*root=*/0);
  if (!store) {
    options.port = static_cast<uint16_t>(std::stoi(port));
    store = c10::make_intrusive<c10d::TCPStore>(address, options);
  }
  return store;
}

NcclGroup make_group(c10::intrusive_ptr<c10d::Store> store, int rank, int size,
                     const Communicator& host) {
  const auto options = c10d::ProcessGroupNCCL::Options::create();
  options->timeout = host.timeout();
  options->group_name = host.name();
  auto group = c10::make_intrusive<c10d::ProcessGroupNCCL>(std::move(store), rank, size, options);
  // Ranks let go of a group at different times, so it cannot end in step with the others'.
  return NcclGroup(group.get(), [group](c10d::ProcessGroupNCCL* ended) { ended->abort(); });
}

// Before a group is aborted: peers may still be taking what this rank gave. Not while an error is
// thrown, when they may never take it.
void let_finish(const std::function<bool()>& finished, std::chrono::milliseconds at_most) {
  const auto end = std::chrono::steady_clock::now() + at_most;
  while (std::uncaught_exceptions() == 0 && !finished() && std::chrono::steady_clock::now() < end) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

// NCCL moves all types as bytes; it has no 16-bit integers and no complex numbers.
at::Tensor as_bytes(const at::Tensor& tensor) { return tensor.view({-1}).view(at::kByte); }

at::Tensor combine(const at::Tensor& left, const at::Tensor& right, ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kAverage:
      return at::add(left, right);
    case ReduceOp::kMin:
      return at::minimum(left, right);
    case ReduceOp::kMax:
      return at::maximum(left, right);
    case ReduceOp::kProduct:
      return at::mul(left, right);
    case ReduceOp::kBitAnd:
      return at::bitwise_and(left, right);
    case ReduceOp::kBitOr:
      return at::bitwise_or(left, right);
    case ReduceOp::kBitXor:
      return at::bitwise_xor(left, right);
  }
  SMP_INTERNAL_ASSERT(false, "reduction number ", static_cast<int>(op));
}

// ((parts[0] op parts[1]) op parts[2]) ..., as reduce_in_order does it on the host.
at::Tensor reduce_parts(const at::Tensor& parts, ReduceOp op) {
  const at::ScalarType dtype = parts.scalar_type();
  const at::ScalarType wide = dtype == at::kHalf || dtype == at::kBFloat16 ? at::kFloat : dtype;
  at::Tensor result = parts[0].to(wide);
  for (int64_t rank = 1; rank < parts.size(0); ++rank) {
    result = combine(result, parts[rank].to(wide), op);
  }
  if (op == ReduceOp::kAverage) {
    result = at::div(result, parts.size(0));
  }
  return result.to(dtype);
}

// A message under way, which libtorch's group knows.
class MessageWork final : public Work {
 public:
  MessageWork(NcclWork work, at::Tensor tensor)
      : work_(std::move(work)), tensor_(std::move(tensor)) {}

  bool test() override { return work_->isCompleted(); }
  void wait() override { work_->wait(); }

 private:
  const NcclWork work_;
  const at::Tensor tensor_;
};

// What a side stream works on.
class StreamWork final : public Work {
 public:
  StreamWork(at::Device device, c10::Event done, Tensors tensors)
      : device_(device), done_(std::move(done)), tensors_(std::move(tensors)) {}

  bool test() override { return done_.query(); }
  void wait() override { done_.block(current_stream(device_)); }

 private:
  const at::Device device_;
  const c10::Event done_;
  const Tensors tensors_;  // memory goes back to the stream that it was made on, which has waited
};

// A message whose device part is on its way.
struct Pending {
  NcclWork work;
  at::Tensor part;
};

at::Tensor make_part(const ChannelSpec& spec) {
  return at::empty({spec.bytes - spec.host_bytes},
                   at::TensorOptions(at::kByte).device(spec.device));
}

// The group of a channel has two ranks, of which the sender is the first.
constexpr int kSenderRank = 0;
constexpr int kReceiverRank = 1;

class NcclSender final : public Sender {
 public:
  NcclSender(std::unique_ptr<Sender> host, NcclGroup group, const ChannelSpec& spec)
      : host_(std::move(host)), group_(std::move(group)), spec_(spec) {}

  ~NcclSender() override {
    if (!sent_.empty()) {  // they end in order
      let_finish([this] { return sent_.back().work->isCompleted(); },
                 group_->getOptions()->timeout);
    }
  }

  const at::Tensor& prepare() override {
    if (!next_.defined() && !sent_.empty() && sent_.front().work->isCompleted()) {
      next_ = std::move(sent_.front().part);
      sent_.pop_front();
    }
    if (!next_.defined()) {
      next_ = make_part(spec_);
    }
    return host_->prepare();
  }

  at::Tensor device_part() override { return next_; }

  void send() override {
    Tensors part = {std::exchange(next_, at::Tensor())};
    NcclWork work = group_->send(part, kReceiverRank, /*tag=*/0);
    sent_.push_back({std::move(work), std::move(part[0])});
    host_->send();
  }

  void flush() override { host_->flush(); }

 private:
  const std::unique_ptr<Sender> host_;
  const NcclGroup group_;
  const ChannelSpec spec_;
  at::Tensor next_;
  std::deque<Pending> sent_;  // their memory is used again, oldest first
};

class NcclReceiver final : public Receiver {
 public:
  NcclReceiver(std::unique_ptr<Receiver> host, NcclGroup group, const ChannelSpec& spec)
      : host_(std::move(host)), group_(std::move(group)), spec_(spec) {}

  void expect(int messages) override {
    host_->expect(messages);
    expected_ += messages;
    post();
  }

  at::Tensor receive() override {
    at::Tensor message = host_->receive();
    Pending pending = std::move(posted_.front());
    posted_.pop_front();
    post();
    pending.work->wait();
    received_ = std::move(pending.part);
    return message;
  }

  at::Tensor device_part() override { return std::exchange(received_, at::Tensor()); }

 private:
  void post() {
    for (; expected_ > 0 && static_cast<int>(posted_.size()) < spec_.ahead; --expected_) {
      Tensors part = {make_part(spec_)};
      NcclWork work = group_->recv(part, kSenderRank, /*tag=*/0);
      posted_.push_back({std::move(work), std::move(part[0])});
    }
  }

  const std::unique_ptr<Receiver> host_;
  const NcclGroup group_;
  const ChannelSpec spec_;
  int expected_ = 0;  // and not yet posted
  std::deque<Pending> posted_;
  at::Tensor received_;
};

class NcclCommunicator final : public DeviceCommunicator {
 public:
  NcclCommunicator(const CommunicatorPtr& host, at::Device device)
      : DeviceCommunicator(host, device),
        store_(make_store(*host)),
        group_(make_group(store_, host->rank(), host->size(), *host)),
        side_(c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device)) {}

  ~NcclCommunicator() override {
    let_finish(
        [this] { return c10::impl::VirtualGuardImpl(side_.device_type()).queryStream(side_); },
        timeout());
  }

  Channels open_channels(const std::vector<ChannelSpec>& outgoing,
                         const std::vector<ChannelSpec>& incoming) override;

 protected:
  WorkPtr send_from_device(const at::Tensor& tensor, int destination, Tag /*tag*/) override {
    Tensors bytes = {as_bytes(tensor)};
    return std::make_shared<MessageWork>(group_->send(bytes, destination, /*tag=*/0), tensor);
  }

  WorkPtr receive_on_device(const at::Tensor& tensor, int source, Tag /*tag*/) override {
    Tensors bytes = {as_bytes(tensor)};
    return std::make_shared<MessageWork>(group_->recv(bytes, source, /*tag=*/0), tensor);
  }

  WorkPtr start_on_device(const Collective& call) override {
    return on_side_stream({call.output, call.input}, [&] { move(call); });
  }

 private:
  // Collectives on tensors that the current stream has made go on beside what it is given next.
  WorkPtr on_side_stream(Tensors tensors, const std::function<void()>& collective) {
    const at::NoGradGuard no_grad;
    c10::Event ready(device().type()), done(device().type());
    ready.record(current_stream(device()));
    ready.block(side_);
    {
      const c10::StreamGuard guard(side_);
      collective();
    }
    done.record(side_);
    return std::make_shared<StreamWork>(device(), std::move(done), std::move(tensors));
  }

  void move(const Collective& call) {
    if (call.uniform_tensor().numel() == 0 && call.kind != Collective::Kind::kAllToAll) {
      return;
    }
    switch (call.kind) {
      case Collective::Kind::kAllReduce:
        call.output.view({-1}).copy_(reduced(call.input, call.op));
        break;
      case Collective::Kind::kReduce: {
        const at::Tensor result = reduced(call.input, call.op);
        if (rank() == call.root) {
          call.output.view({-1}).copy_(result);
        }
        break;
      }
      case Collective::Kind::kReduceScatter:
        call.output.view({-1}).copy_(reduced_part(call.input.view({size(), -1}), call.op));
        break;
      case Collective::Kind::kBroadcast: {
        c10d::BroadcastOptions options;
        options.rootRank = call.root;
        Tensors bytes = {as_bytes(call.output)};
        group_->broadcast(bytes, options)->wait();
        break;
      }
      case Collective::Kind::kAllGather: {
        at::Tensor all = as_bytes(call.output), own = as_bytes(call.input);
        group_->_allgather_base(all, own)->wait();
        break;
      }
      case Collective::Kind::kAllToAll:
        exchange(call.output, call.output_splits, call.input, call.input_splits);
        break;
      case Collective::Kind::kGather:
        exchange(rank() == call.root ? call.output : at::empty({0}, call.input.options()),
                 only_at(rank() == call.root, call.input.numel()), call.input,
                 only_for(call.root, call.input.numel()));
        break;
      case Collective::Kind::kScatter:
        exchange(call.output, only_for(call.root, call.output.numel()),
                 rank() == call.root ? call.input : at::empty({0}, call.output.options()),
                 only_at(rank() == call.root, call.output.numel()));
        break;
      case Collective::Kind::kBarrier:
      case Collective::Kind::kSharedTensor:
        SMP_INTERNAL_ASSERT(false, call.name(), " has no tensor on the device");
    }
  }

  // Each rank reduces a slice, in rank order, and gives it to all: the algorithm of rounds.h.
  at::Tensor reduced(const at::Tensor& tensor, ReduceOp op) {
    const int64_t slice = (tensor.numel() + size() - 1) / size();
    const at::Tensor rest = at::zeros({slice * size() - tensor.numel()}, tensor.options());
    const at::Tensor values = at::cat({tensor.view({-1}), rest});
    at::Tensor all = as_bytes(values);
    at::Tensor own = as_bytes(reduced_part(values.view({size(), slice}), op));
    group_->_allgather_base(all, own)->wait();
    return values.narrow(0, 0, tensor.numel());
  }

  // This rank's row of the sum of all ranks' `values`.
  at::Tensor reduced_part(const at::Tensor& values, ReduceOp op) {
    const at::Tensor parts = at::empty(values.sizes(), values.options());
    exchange(parts, {}, values, {});
    return reduce_parts(parts, op);
  }

  void exchange(const at::Tensor& output, std::vector<int64_t> output_splits,
                const at::Tensor& input, std::vector<int64_t> input_splits) {
    for (std::vector<int64_t>* splits : {&output_splits, &input_splits}) {
      for (int64_t& split : *splits) {
        split *= input.element_size();
      }
    }
    at::Tensor from = as_bytes(input), to = as_bytes(output);
    group_->alltoall_base(to, from, output_splits, input_splits)->wait();
  }

  std::vector<int64_t> only_for(int peer, int64_t elements) const {
    std::vector<int64_t> splits(size(), 0);
    splits[peer] = elements;
    return splits;
  }

  std::vector<int64_t> only_at(bool here, int64_t elements) const {
    return std::vector<int64_t>(size(), here ? elements : 0);
  }

  NcclGroup connect(const ChannelSpec& spec, bool sends);

  const c10::intrusive_ptr<c10d::Store> store_;
  const NcclGroup group_;
  const c10::Stream side_;
  std::map<std::tuple<Tag, int, int>, int> opened_;  // by tag, sender and receiver
};

// NCCL connects two ranks when both use the group for the first time, and each waits for the other.
NcclGroup NcclCommunicator::connect(const ChannelSpec& spec, bool sends) {
  const int sender = sends ? rank() : spec.peer;
  const int receiver = sends ? spec.peer : rank();
  const int number = opened_[{spec.tag, sender, receiver}]++;
  const std::string prefix =
      c10::str("channel/", spec.tag, "/", sender, "/", receiver, "/", number);
  NcclGroup group = make_group(c10::make_intrusive<c10d::PrefixStore>(prefix, store_),
                               sends ? kSenderRank : kReceiverRank, 2, *host());
  Tensors token = {at::zeros({1}, at::TensorOptions(at::kByte).device(device()))};
  const NcclWork work = sends ? group->send(token, kReceiverRank, /*tag=*/0)
                              : group->recv(token, kSenderRank, /*tag=*/0);
  work->wait();
  return group;
}

Channels NcclCommunicator::open_channels(const std::vector<ChannelSpec>& outgoing,
                                         const std::vector<ChannelSpec>& incoming) {
  // The host's channels carry the first bytes; those of the CPU's tensors carry all.
  const auto on_host = [](std::vector<ChannelSpec> specs) {
    for (ChannelSpec& spec : specs) {
      spec.bytes = spec.device.is_cpu() ? spec.bytes : spec.host_bytes;
      spec.device = at::kCPU;
    }
    return specs;
  };
  Channels channels = host()->open_channels(on_host(outgoing), on_host(incoming));

  // All ranks connect in one order, so that none waits for another in a circle.
  struct End {
    Tag tag;
    int sender;
    size_t index;
  };
  std::vector<End> ends;
  for (size_t i = 0; i < outgoing.size(); ++i) {
    ends.push_back({outgoing[i].tag, rank(), i});
  }
  for (size_t i = 0; i < incoming.size(); ++i) {
    ends.push_back({incoming[i].tag, incoming[i].peer, i});
  }
  std::sort(ends.begin(), ends.end(), [](const End& a, const End& b) {
    return std::tie(a.tag, a.sender) < std::tie(b.tag, b.sender);
  });
  for (const End& end : ends) {
    const bool sends = end.sender == rank();
    const ChannelSpec& spec = sends ? outgoing[end.index] : incoming[end.index];
    if (spec.device.is_cpu()) {
      continue;
    }
    NcclGroup group = connect(spec, sends);
    if (sends) {
      auto& sender = channels.senders[end.index];
      sender = std::make_unique<NcclSender>(std::move(sender), std::move(group), spec);
    } else {
      auto& receiver = channels.receivers[end.index];
      receiver = std::make_unique<NcclReceiver>(std::move(receiver), std::move(group), spec);
    }
  }
  return channels;
}

}  // namespace

std::string nccl_gpu(at::Device device) {
  if (!device.is_cuda()) {
    return "";
  }
  cudaDeviceProp properties;
  const cudaError_t code = cudaGetDeviceProperties(&properties, device.index());
  SMP_INTERNAL_ASSERT(code == cudaSuccess, cudaGetErrorString(code));
  return std::string(properties.uuid.bytes, sizeof(properties.uuid.bytes));
}

CommunicatorPtr make_nccl_communicator(const CommunicatorPtr& host, at::Device device) {
  return std::make_shared<NcclCommunicator>(host, device);
}

}  // namespace smp::comm
