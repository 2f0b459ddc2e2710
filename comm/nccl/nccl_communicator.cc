// SPDX-License-Identifier: Apache-2.0
#include "comm/nccl/nccl_communicator.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <functional>
#include <map>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <tuple>
#include <utility>

#include "comm/device/device_communicator.h"
#include "comm/nccl/group_channels.h"
#include "comm/nccl/reduce_parts.h"
#include "core/check.h"
#include "core/host.h"

namespace smp::comm {
namespace {

using NcclGroup = std::shared_ptr<c10d::ProcessGroupNCCL>;
using NcclWork = c10::intrusive_ptr<c10d::Work>;
using Tensors = std::vector<at::Tensor>;

c10::Stream current_stream(at::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

// The store through which the ranks of a group find each other while NCCL connects: rank 0 serves
// it, and gives the others its address over the host's communicator.
c10::intrusive_ptr<c10d::Store> make_store(Communicator& host) {
  const std::vector<std::string> names = all_gather_bytes(host, core::host_name());
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
  return NcclGroup(group.get(), [group](c10d::ProcessGroupNCCL* ended) {
    try {
      ended->abort();
    } catch (const std::exception& error) {  // it could not be ended in time
      TORCH_WARN("NCCL group '", ended->getOptions()->group_name, "': ", error.what());
    }
  });
}

// NCCL moves all types as bytes; it has no 16-bit integers and no complex numbers.
at::Tensor as_bytes(const at::Tensor& tensor) { return tensor.view({-1}).view(at::kByte); }

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

// What a side stream works on. Keeps what the stream was given to do, and so its tensors.
class StreamWork final : public Work {
 public:
  StreamWork(at::Device device, c10::Event done, std::function<void()> given)
      : device_(device), done_(std::move(done)), given_(std::move(given)) {}

  bool test() override { return done_.query(); }
  void wait() override { done_.block(current_stream(device_)); }

 private:
  const at::Device device_;
  const c10::Event done_;
  // Memory goes back to the stream that it was made on, which has waited.
  const std::function<void()> given_;
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

  // Of collectives and messages; channels have the time-out that there was when they were opened.
  void set_timeout(std::chrono::milliseconds timeout) override {
    DeviceCommunicator::set_timeout(timeout);
    group_->setTimeout(timeout);
  }

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
    return on_side_stream([this, call] { move(call); });
  }

  WorkPtr start_on_device(const CollectiveTask& task) override {
    return on_side_stream([this, task] {
      TaskCollectives collectives([this](const Collective& call) { move(call); });
      task(collectives);
    });
  }

 private:
  // Collectives on tensors that the current stream has made go on beside what it is given next.
  WorkPtr on_side_stream(std::function<void()> collective) {
    const at::NoGradGuard no_grad;
    c10::Event ready(device().type()), done(device().type());
    ready.record(current_stream(device()));
    ready.block(side_);
    {
      const c10::StreamGuard guard(side_);
      collective();
    }
    done.record(side_);
    return std::make_shared<StreamWork>(device(), std::move(done), std::move(collective));
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
  Channels channels = host()->open_channels(host_parts(outgoing), host_parts(incoming));
  for (const ChannelEnd& end : connection_order(rank(), outgoing, incoming)) {
    const ChannelSpec& spec = end.sends ? outgoing[end.index] : incoming[end.index];
    NcclGroup group = connect(spec, end.sends);
    if (end.sends) {
      auto& sender = channels.senders[end.index];
      sender = make_group_sender(std::move(sender), std::move(group), spec, timeout());
    } else {
      auto& receiver = channels.receivers[end.index];
      receiver = make_group_receiver(std::move(receiver), std::move(group), spec);
    }
  }
  return channels;
}

}  // namespace

bool has_nccl() { return true; }

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
