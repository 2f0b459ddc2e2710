// SPDX-License-Identifier: Apache-2.0
#include "comm/nccl/group_communicator.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "comm/device/device_communicator.h"
#include "comm/device_streams.h"
#include "comm/nccl/group_channels.h"
#include "comm/nccl/reduce_parts.h"
#include "comm/transport_communicator.h"
#include "core/check.h"

namespace smp::comm {
namespace {

using Tensors = std::vector<at::Tensor>;

std::vector<ChannelSpec> host_parts(std::vector<ChannelSpec> specs) {
  std::transform(specs.begin(), specs.end(), specs.begin(), host_part);
  return specs;
}

// NCCL moves all types as bytes; it has no 16-bit integers and no complex numbers.
at::Tensor as_bytes(const at::Tensor& tensor) { return tensor.view({-1}).view(at::kByte); }

// The operation of NCCL that reduces this, if it means the same: its minimum and maximum lose NaN.
std::optional<c10d::ReduceOp> own_op(at::ScalarType type, ReduceOp op) {
  const bool has_type = at::isFloatingType(type) || type == at::kByte || type == at::kChar ||
                        type == at::kInt || type == at::kLong;
  if (!has_type) {
    return std::nullopt;
  }
  switch (op) {
    case ReduceOp::kSum:
      return c10d::ReduceOp::SUM;
    case ReduceOp::kAverage:
      return c10d::ReduceOp::AVG;
    case ReduceOp::kProduct:
      return c10d::ReduceOp::PRODUCT;
    default:
      return std::nullopt;
  }
}

// The work of a side stream. Keeps the input of the stream, and so its tensors.
class StreamWork final : public Work {
 public:
  StreamWork(at::Device device, c10::Event done, std::function<void()> given)
      : device_(device), done_(std::move(done)), given_(std::move(given)) {}
  // Dropped before anyone has waited, it may still be under way.
  ~StreamWork() override {
    try {
      if (!waited_) let_wait();
    } catch (const c10::Error&) {
      // The device has failed, and uses nothing any more.
    }
  }

  bool test() override { return done_.query(); }
  void wait() override { let_wait(); }

 private:
  void let_wait() {
    done_.block(current_stream(device_));
    waited_ = true;
  }

  const at::Device device_;
  const c10::Event done_;
  // Memory goes back to the stream that it was made on, which has waited.
  const std::function<void()> given_;
  bool waited_ = false;
};

class GroupCommunicator final : public DeviceCommunicator {
 public:
  GroupCommunicator(const CommunicatorPtr& host, at::Device device, MakeDeviceGroup make)
      : DeviceCommunicator(host, device),
        pool_(std::make_shared<GroupPool>(host, device, std::move(make))),
        side_(side_stream(device)),
        is_fast_(host->device_transport().fast_reductions) {}

  ~GroupCommunicator() override {
    if (!has_ended_) let_side_finish();
  }

  Channels open_channels(const std::vector<ChannelSpec>& outgoing,
                         const std::vector<ChannelSpec>& incoming) override;

  void set_timeout(std::chrono::milliseconds timeout) override {
    DeviceCommunicator::set_timeout(timeout);
    pool_->set_timeout(timeout);
  }

 protected:
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
  void let_side_finish() {
    let_finish(
        [this] {
          return c10::impl::VirtualGuardImpl(side_.device_type()).queryStream(side_) ||
                 !host()->abort_text().empty();
        },
        timeout());
  }

  // Channels that outlive this have the groups, too.
  void let_go() {
    let_side_finish();
    has_ended_ = true;
    pool_->close();
  }

  // Collectives on tensors that the current stream has made go on beside its next work.
  WorkPtr on_side_stream(std::function<void()> collective) {
    const at::NoGradGuard no_grad;
    c10::Event ready(device().type()), done(device().type());
    ready.record(current_stream(device()));
    ready.block(side_);
    try {
      const c10::StreamGuard guard(side_);
      collective();
    } catch (...) {
      // The work begun may still use the caller's tensors, which go when this is thrown.
      done.record(side_);
      done.block(current_stream(device()));
      throw;
    }
    done.record(side_);
    return std::make_shared<StreamWork>(device(), std::move(done), std::move(collective));
  }

  void move(const Collective& call) {
    if (call.uniform_tensor().numel() == 0 && call.kind != Collective::Kind::kAllToAll) {
      return;
    }
    if (!call.reduces()) {
      move_elements(call);
      return;
    }
    const auto own = is_fast_ ? own_op(call.input.scalar_type(), call.op) : std::nullopt;
    if (own) {
      reduce_fast(call, *own);
    } else {
      reduce_in_rank_order(call);
    }
  }

  void move_elements(const Collective& call) {
    switch (call.kind) {
      case Collective::Kind::kBroadcast: {
        c10d::BroadcastOptions options;
        options.rootRank = call.root;
        Tensors bytes = {as_bytes(call.output)};
        pool_->of_all()->broadcast(bytes, options)->wait();
        break;
      }
      case Collective::Kind::kAllGather:
        gather(call.output, call.input);
        break;
      case Collective::Kind::kAllToAll:
        exchange(call.output, call.output_splits, call.input, call.input_splits);
        break;
      case Collective::Kind::kGather:
        gather_at(call.root, call.output, call.input);
        break;
      case Collective::Kind::kScatter:
        exchange(call.output, only_for(call.root, call.output.numel()),
                 rank() == call.root ? call.input : at::empty({0}, call.output.options()),
                 only_at(rank() == call.root, call.output.numel()));
        break;
      default:
        SMP_INTERNAL_ASSERT(false, call.name(), " has no tensor on the device");
    }
  }

  void reduce_fast(const Collective& call, const c10d::ReduceOp& op) {
    if (call.kind == Collective::Kind::kReduceScatter) {
      c10d::ReduceScatterOptions options;
      options.reduceOp = op;
      at::Tensor output = call.output.view({-1}), input = call.input.view({-1});
      pool_->of_all()->_reduce_scatter_base(output, input, options)->wait();
    } else if (call.kind == Collective::Kind::kReduce) {
      c10d::ReduceOptions options;
      options.reduceOp = op;
      options.rootRank = call.root;
      // The others' tensors keep their values.
      Tensors tensor = {rank() == call.root ? call.output : call.input.clone()};
      pool_->of_all()->reduce(tensor, options)->wait();
    } else {
      c10d::AllreduceOptions options;
      options.reduceOp = op;
      Tensors tensor = {call.output};
      pool_->of_all()->allreduce(tensor, options)->wait();
    }
  }

  // Each rank reduces a slice, in rank order, and gives it to those that want it.
  void reduce_in_rank_order(const Collective& call) {
    if (call.kind == Collective::Kind::kReduceScatter) {
      call.output.view({-1}).copy_(reduced_part(call.input.view({size(), -1}), call.op));
      return;
    }
    const int64_t numel = call.input.numel();
    const int64_t slice = (numel + size() - 1) / size();
    const at::Tensor rest = at::zeros({slice * size() - numel}, call.input.options());
    const at::Tensor values = at::cat({call.input.view({-1}), rest});
    const at::Tensor own = reduced_part(values.view({size(), slice}), call.op);
    if (call.kind == Collective::Kind::kReduce) {
      gather_at(call.root, values, own);
    } else {
      gather(values, own);
    }
    if (call.writes(rank())) {
      call.output.view({-1}).copy_(values.narrow(0, 0, numel));
    }
  }

  // This rank's row of the sum of all ranks' `values`.
  at::Tensor reduced_part(const at::Tensor& values, ReduceOp op) {
    const at::Tensor parts = at::empty(values.sizes(), values.options());
    exchange(parts, {}, values, {});
    return reduce_parts(parts.unbind(0), op);
  }

  void gather(const at::Tensor& output, const at::Tensor& input) {
    at::Tensor all = as_bytes(output), own = as_bytes(input);
    pool_->of_all()->_allgather_base(all, own)->wait();
  }

  void gather_at(int root, const at::Tensor& output, const at::Tensor& input) {
    exchange(rank() == root ? output : at::empty({0}, input.options()),
             only_at(rank() == root, input.numel()), input, only_for(root, input.numel()));
  }

  void exchange(const at::Tensor& output, std::vector<int64_t> output_splits,
                const at::Tensor& input, std::vector<int64_t> input_splits) {
    for (std::vector<int64_t>* splits : {&output_splits, &input_splits}) {
      for (int64_t& split : *splits) {
        split *= input.element_size();
      }
    }
    at::Tensor from = as_bytes(input), to = as_bytes(output);
    pool_->of_all()->alltoall_base(to, from, output_splits, input_splits)->wait();
  }

  std::vector<int64_t> only_for(int peer, int64_t elements) const {
    std::vector<int64_t> splits(size(), 0);
    splits[peer] = elements;
    return splits;
  }

  std::vector<int64_t> only_at(bool here, int64_t elements) const {
    return std::vector<int64_t>(size(), here ? elements : 0);
  }

  const std::shared_ptr<GroupPool> pool_;
  const c10::Stream side_;
  const bool is_fast_;
  bool has_ended_ = false;
  const AtWorldEnd end_{*this, [this] { let_go(); }};
};

Channels GroupCommunicator::open_channels(const std::vector<ChannelSpec>& outgoing,
                                          const std::vector<ChannelSpec>& incoming) {
  if (is_one_process(*host())) {  // copy engines then leave computations all of the device
    return host()->open_channels(outgoing, incoming);
  }
  Channels channels = host()->open_channels(host_parts(outgoing), host_parts(incoming));
  for (const ChannelEnd& end : connection_order(rank(), outgoing, incoming)) {
    const ChannelSpec& spec = end.sends ? outgoing[end.index] : incoming[end.index];
    DeviceGroup group = pool_->of_lane(spec.peer, spec.tag, end.sends);
    if (end.sends) {
      auto& sender = channels.senders[end.index];
      sender = make_group_sender(std::move(sender), std::move(group), spec, pool_);
    } else {
      auto& receiver = channels.receivers[end.index];
      receiver = make_group_receiver(std::move(receiver), std::move(group), spec, pool_);
    }
  }
  return channels;
}

}  // namespace

CommunicatorPtr make_group_communicator(const CommunicatorPtr& host, at::Device device,
                                        MakeDeviceGroup make) {
  return std::make_shared<GroupCommunicator>(host, device, std::move(make));
}

}  // namespace smp::comm
