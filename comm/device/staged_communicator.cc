// SPDX-License-Identifier: Apache-2.0
#include "comm/device/staged_communicator.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <memory>
#include <utility>

#include "comm/device/device_communicator.h"

namespace smp::comm {
namespace {

// An operation on `staged`, in host memory, whose result belongs into `result`, if that is defined.
class StagedWork final : public Work {
 public:
  StagedWork(WorkPtr work, at::Tensor staged, at::Tensor result)
      : work_(std::move(work)), staged_(std::move(staged)), result_(std::move(result)) {}

  bool test() override { return work_->test(); }

  void wait() override {
    work_->wait();
    if (const at::Tensor result = std::exchange(result_, at::Tensor()); result.defined()) {
      const at::NoGradGuard no_grad;
      result.copy_(staged_);
    }
  }

 private:
  const WorkPtr work_;
  const at::Tensor staged_;
  at::Tensor result_;
};

// Waits until the device has made it.
at::Tensor copy_of(const at::Tensor& tensor) { return tensor.detach().cpu().contiguous(); }

at::Tensor room_for(const at::Tensor& tensor) {
  return at::empty(tensor.sizes(), at::TensorOptions(tensor.scalar_type()));
}

// The same call in host memory.
Collective staged_call(const Collective& call, int rank) {
  const bool in_place = call.input.is_same(call.output), reads = call.reads(rank);
  Collective staged = call;
  staged.input = reads ? copy_of(call.input) : at::Tensor();
  staged.output = in_place && reads       ? staged.input
                  : call.output.defined() ? room_for(call.output)
                                          : at::Tensor();
  if (in_place) {
    staged.input = staged.output;
  }
  return staged;
}

c10::Stream current_stream(at::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

class StagedCommunicator final : public DeviceCommunicator {
 public:
  using DeviceCommunicator::DeviceCommunicator;

 protected:
  WorkPtr send_from_device(const at::Tensor& tensor, int destination, Tag tag) override {
    const at::Tensor staged = copy_of(tensor);
    return work(host()->isend(staged, destination, tag), staged, at::Tensor());
  }

  WorkPtr receive_on_device(const at::Tensor& tensor, int source, Tag tag) override {
    const at::Tensor staged = room_for(tensor);
    return work(host()->irecv(staged, source, tag), staged, tensor);
  }

  WorkPtr start_on_device(const Collective& call) override {
    const Collective staged = staged_call(call, rank());
    return work(host()->start(staged), staged.output,
                call.writes(rank()) ? call.output : at::Tensor());
  }

  // On the host's thread, so that neither this rank nor a thread of the device waits for others.
  WorkPtr start_on_device(const CollectiveTask& task) override {
    const auto ready = std::make_shared<c10::Event>(device().type());
    ready->record(current_stream(device()));
    return host()->start(at::kCPU,
                         [task, ready, device = device(), rank = rank()](TaskCollectives& host) {
                           const at::NoGradGuard no_grad;
                           const c10::DeviceGuard guard(device);
                           const c10::Stream stream = current_stream(device);
                           ready->block(stream);
                           TaskCollectives collectives([&](const Collective& call) {
                             const Collective staged = staged_call(call, rank);
                             host.issue(staged);
                             if (call.writes(rank)) {
                               call.output.copy_(staged.output);
                             }
                           });
                           task(collectives);
                           stream.synchronize();
                         });
  }

 private:
  static WorkPtr work(WorkPtr work, const at::Tensor& staged, const at::Tensor& result) {
    return std::make_shared<StagedWork>(std::move(work), staged, result);
  }
};

}  // namespace

CommunicatorPtr make_staged_communicator(CommunicatorPtr host, at::Device device) {
  return std::make_shared<StagedCommunicator>(std::move(host), device);
}

}  // namespace smp::comm
