// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "comm/communicator.h"
#include "dp/joinable.h"
#include "dp/reducer.h"
#include "dp/replica_state.h"
#include "smp/ddp_options.h"

namespace torch::nn {
class Module;
}  // namespace torch::nn

namespace smp::dp {

/// The work of a `DistributedDataParallel` around its module's forward.
class DataParallelCore final : public Joinable {
 public:
  /// Collective; see `DistributedDataParallel`.
  DataParallelCore(std::shared_ptr<torch::nn::Module> module, const DDPOptions& options);

  /// Before forward. Returns whether `end_forward` is to be called after it, which is where
  /// gradients are on. Collective in training.
  bool begin_forward();
  /// After forward, with the tensors that it returned.
  void end_forward(const std::vector<at::Tensor>& outputs);

  bool synchronizes() const { return synchronizes_; }
  void set_synchronizes(bool on) { synchronizes_ = on; }

  void leave_join() override;

  Reducer& reducer() { return *reducer_; }

 private:
  comm::Communicator& replicas() const override { return *group_; }
  void take_part(const Round& round) override;
  void take_model_of(int root) override;

  void check_module() const;
  void check_replicas() const;
  bool broadcasts_now(bool reduces) const;
  void prepare(const Round& round);
  void broadcast_buffers(int root);

  const std::shared_ptr<torch::nn::Module> module_;
  const DDPOptions options_;
  comm::CommunicatorPtr group_;
  std::unique_ptr<Reducer> reducer_;
  std::unique_ptr<TensorBroadcast> buffers_;
  bool synchronizes_ = true;
  bool reduces_ = false;  // the forward pass under way
};

}  // namespace smp::dp
