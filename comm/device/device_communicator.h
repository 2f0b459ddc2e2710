// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <string>
#include <vector>

#include "comm/communicator.h"

namespace smp::comm {

/// A communicator for tensors of the CPU and of one other device: this rank's part of the model
/// lies there. Those of the CPU go over a communicator of their own, whose rank, name, time-out and
/// abort are this one's too. Messages of the device's go through host memory: a sent message is
/// copied there first, for which this waits, and a received one is copied to the device by
/// `Work::wait()`. How collectives and channels move them is up to the classes that derive from it.
///
/// On the device, a collective starts when the current stream has come to it, and when `wait()` has
/// returned, the current stream goes on after it: the host does not wait for the device where
/// nothing but the device needs the result.
class DeviceCommunicator : public Communicator {
 public:
  /// `device` has an index and is not the CPU.
  DeviceCommunicator(CommunicatorPtr host, at::Device device);

  int rank() const override { return host_->rank(); }
  int size() const override { return host_->size(); }
  const std::string& name() const override { return host_->name(); }

  WorkPtr isend(const at::Tensor& tensor, int destination, Tag tag) override;
  WorkPtr irecv(const at::Tensor& tensor, int source, Tag tag) override;
  ReceiveWorkPtr irecv_from_any(const at::Tensor& tensor, Tag tag) override {
    return host_->irecv_from_any(tensor, tag);
  }
  WorkPtr start(const Collective& call) override;
  WorkPtr start(at::Device device, CollectiveTask task) override;
  void run(const Collective& call) override;
  /// Always of the host.
  at::Tensor shared_tensor(int64_t numel, at::ScalarType dtype) override {
    return host_->shared_tensor(numel, dtype);
  }
  Channels open_channels(const std::vector<ChannelSpec>& outgoing,
                         const std::vector<ChannelSpec>& incoming) override;
  /// The new one is for the same device.
  CommunicatorPtr split(const std::vector<int>& members, const std::string& name) override;
  void set_device_transport(const DeviceTransport& transport) override {
    host_->set_device_transport(transport);
  }
  DeviceTransport device_transport() const override { return host_->device_transport(); }
  const std::shared_ptr<WorldEnd>& world_end() const override { return host_->world_end(); }
  void abort(const std::string& reason) noexcept override { host_->abort(reason); }
  std::string abort_text() const override { return host_->abort_text(); }
  void set_timeout(std::chrono::milliseconds timeout) override { host_->set_timeout(timeout); }
  std::chrono::milliseconds timeout() const override { return host_->timeout(); }
  void check_collectives(bool on) override { host_->check_collectives(on); }

 protected:
  const CommunicatorPtr& host() const { return host_; }
  at::Device device() const { return device_; }

  // Starts a collective of two ranks or more, on tensors of the device.
  virtual WorkPtr start_on_device(const Collective& call) = 0;
  virtual WorkPtr start_on_device(const CollectiveTask& task) = 0;
  // Does one at once.
  virtual void run_on_device(const Collective& call) { start_on_device(call)->wait(); }

 private:
  friend CommunicatorPtr make_device_communicator(const CommunicatorPtr& host, at::Device device);
  friend std::string device_route(const Communicator& group);

  bool is_on_device(const char* verb, const at::Tensor& tensor) const;
  bool is_on_device(const Collective& call) const;
  bool moves(const Collective& call) const;

  const CommunicatorPtr host_;
  const at::Device device_;
  std::string route_;
};

/// The communicator of a group whose ranks' models lie on `device`, each rank's own and all of one
/// kind: `host` itself for the CPU. Between GPUs it goes over NCCL, if this is a CUDA build and no
/// two ranks of the group share a GPU, or it throws a `ConfigError` on all ranks, if the host's
/// `device_transport()` says that it must. Otherwise, and for other devices, it goes through memory
/// of devices that the ranks of one host share, if they can (ipc_channels.h, ipc_collectives.h),
/// else through host memory. Where the ranks are threads of one process, channels hand tensors over
/// on the device in any case.
///
/// The environment variable SMP_DEVICE_IPC, 0 on any rank, leaves memory of devices unshared; 1 on
/// any rank prefers it to NCCL, whatever `fast_reductions` says, but not where `only_nccl` is set.
/// Collective over `host`.
CommunicatorPtr make_device_communicator(const CommunicatorPtr& host, at::Device device);

/// Which way tensors of its device take in a group that `make_device_communicator` has made, and
/// why, as the end of a sentence: "through host memory: ranks share a GPU". Empty where none
/// travel: in a group of one rank, and of the CPU.
std::string device_route(const Communicator& group);

}  // namespace smp::comm
