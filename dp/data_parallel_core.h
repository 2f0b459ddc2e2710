// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "comm/communicator.h"
#include "dp/reducer.h"
#include "dp/replica_state.h"
#include "smp/ddp_options.h"

namespace torch::nn {
class Module;
}  // namespace torch::nn

namespace smp::dp {

/// What a `DistributedDataParallel` does around its module's forward.
class DataParallelCore {
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

  /// The begin and end of `join`, and its end where an exception is on its way.
  void begin_join(const JoinOptions& options);
  void end_join();
  void leave_join();

  Reducer& reducer() { return *reducer_; }

 private:
  /// What the ranks tell each other before a forward pass under `join`.
  struct Round {
    int active = 0;  // ranks that have data
    int first_active = 0;
    bool reduces = false;
    bool broadcasts = false;
  };

  void check_module() const;
  void check_replicas() const;
  bool broadcasts_now(bool reduces) const;
  Round exchange(bool active, bool reduces, bool broadcasts) const;
  void prepare(const Round& round);
  void broadcast_buffers(int root);
  void take_model_of(int root);

  const std::shared_ptr<torch::nn::Module> module_;
  const DDPOptions options_;
  comm::CommunicatorPtr group_;
  std::unique_ptr<Reducer> reducer_;
  std::unique_ptr<TensorBroadcast> buffers_;
  bool synchronizes_ = true;
  bool reduces_ = false;  // the forward pass under way
  bool is_joining_ = false;
  JoinOptions join_;
};

}  // namespace smp::dp
