// SPDX-License-Identifier: Apache-2.0
#include "comm/device/staged_communicator.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>

#include <memory>
#include <optional>
#include <utility>

#include "comm/device/device_communicator.h"
#include "comm/device/ipc_channels.h"
#include "comm/device/ipc_collectives.h"
#include "comm/device/staging.h"
#include "comm/device_streams.h"
#include "comm/nccl/group_pool.h"
#include "comm/transport_communicator.h"

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

class StagedCommunicator final : public DeviceCommunicator {
 public:
  StagedCommunicator(CommunicatorPtr host, at::Device device, DeviceIpc* ipc)
      : DeviceCommunicator(std::move(host), device),
        ipc_(ipc != nullptr && !is_one_process(*this->host()) ? ipc : nullptr) {
    if (ipc != nullptr) {
      shared_ = std::make_shared<IpcCollectives>(*this->host(), device, *ipc);
    }
  }

  ~StagedCommunicator() override { let_go(); }

  Channels open_channels(const std::vector<ChannelSpec>& outgoing,
                         const std::vector<ChannelSpec>& incoming) override {
    return ipc_ == nullptr ? DeviceCommunicator::open_channels(outgoing, incoming)
                           : open_ipc_channels(host(), *ipc_, outgoing, incoming);
  }

 protected:
  void run_on_device(const Collective& call) override {
    if (shared_) {
      shared_->run(*host(), call);
    } else {
      DeviceCommunicator::run_on_device(call);
    }
  }

  WorkPtr start_on_device(const Collective& call) override {
    if (shared_) return shared_->start(*host(), call);
    const Collective staged = staged_call(call, rank());
    return staged_work(host()->start(staged), staged.output,
                       call.writes(rank()) ? call.output : at::Tensor());
  }

  // On the host's thread, so that neither this rank nor a thread of the device waits for others,
  // and on a stream of its own, so that it goes on beside the device's next computations.
  WorkPtr start_on_device(const CollectiveTask& task) override {
    if (shared_) return shared_->start(*host(), task);
    const auto ready = std::make_shared<c10::Event>(device().type());
    ready->record(current_stream(device()));
    return host()->start(at::kCPU,
                         [task, ready, side = side(), rank = rank()](TaskCollectives& host) {
                           const at::NoGradGuard no_grad;
                           const c10::StreamGuard guard(side);
                           ready->block(side);
                           TaskCollectives collectives([&](const Collective& call) {
                             const Collective staged = staged_call(call, rank);
                             host.issue(staged);
                             if (call.writes(rank)) {
                               copy_staged(staged.output, call.output);
                             }
                           });
                           // Also before a task that throws lets go of its tensors.
                           run_finally([&] { task(collectives); }, [&] { side.synchronize(); });
                         });
  }

 private:
  // Others may be waiting for this rank's part.
  void let_go() {
    if (shared_) {
      let_finish([this] { return shared_->is_idle() || !host()->abort_text().empty(); }, timeout());
    }
    shared_ = nullptr;
  }

  c10::Stream side() {
    if (!side_) {
      side_ = side_stream(device());
    }
    return *side_;
  }

  DeviceIpc* const ipc_;                    // null: channels go another way
  std::shared_ptr<IpcCollectives> shared_;  // null: through host memory
  std::optional<c10::Stream> side_;         // from the first task on
  const AtWorldEnd end_{*this, [this] { let_go(); }};
};

}  // namespace

CommunicatorPtr make_staged_communicator(CommunicatorPtr host, at::Device device, DeviceIpc* ipc) {
  return std::make_shared<StagedCommunicator>(std::move(host), device, ipc);
}

}  // namespace smp::comm
