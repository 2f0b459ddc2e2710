// SPDX-License-Identifier: Apache-2.0
#include "comm/device/staged_communicator.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <memory>
#include <utility>

#include "comm/device/device_communicator.h"
#include "comm/device/staging.h"

namespace smp::comm {
namespace {

// The same call in host memory.
Collective staged_call(const Collective& call, int rank) {
  const bool in_place = call.input.is_same(call.output), reads = call.reads(rank);
  Collective staged = call;
  staged.input = reads ? staged_copy(call.input) : at::Tensor();
  staged.output = in_place && reads       ? staged.input
                  : call.output.defined() ? staging_room(call.output)
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
  WorkPtr start_on_device(const Collective& call) override {
    const Collective staged = staged_call(call, rank());
    return staged_work(host()->start(staged), staged.output,
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
};

}  // namespace

CommunicatorPtr make_staged_communicator(CommunicatorPtr host, at::Device device) {
  return std::make_shared<StagedCommunicator>(std::move(host), device);
}

}  // namespace smp::comm
