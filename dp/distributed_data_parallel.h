#pragma once

#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include "dp/comm_hooks.h"
#include "dp/data_parallel_core.h"
#include "dp/data_parallel_options.h"
#include "dp/outputs.h"

namespace torch::nn {
class Module;
}  // namespace torch::nn

namespace smp::dp {

/// A module of which each rank trains a replica on data of its own, in any libtorch loop: gradients
/// are averaged over the ranks while `backward()` computes them, so that replicas stay equal. `M`
/// is the module's holder (what TORCH_MODULE makes) or a shared_ptr to it. Copies refer to the same
/// replica. The C++ counterpart of torch.nn.parallel.DistributedDataParallel.
///
///     smp::init();
///     smp::dp::DistributedDataParallel<Net> model(net);
///     torch::optim::SGD optimizer(model->parameters(), 0.1);
///     for (auto& batch : *loader) {
///       optimizer.zero_grad();
///       torch::nll_loss(model(batch.data), batch.target).backward();
///       optimizer.step();
///     }
///
/// In evaluation (`model->eval()`, under a `torch::NoGradGuard`) it is the plain module and
/// communicates nothing, so that one rank alone may evaluate.
template <class M>
class DistributedDataParallel {
 public:
  /// Gives all replicas the first one's parameters and buffers. Collective over the replicas.
  /// Throws `UsageError` on all ranks when they wrap different models, naming the first difference;
  /// and for a module without parameters to train, on several devices, or in a `DistributedModel`.
  /// Parameters must not be added, replaced or moved afterwards.
  explicit DistributedDataParallel(M module, const DDPOptions& options = {})
      : module_(std::move(module)),
        core_(std::make_shared<DataParallelCore>(plain(module_), options)) {}

  /// Calls the module's `forward`. With gradients on, throws `UsageError` when the last backward
  /// pass left out parameters without `find_unused_parameters`.
  template <class... Arguments>
  auto operator()(Arguments&&... arguments) {
    const bool trains = core_->begin_forward();
    auto result = module_->forward(std::forward<Arguments>(arguments)...);
    if (trains) {
      std::vector<at::Tensor> outputs;
      detail::collect_tensors(result, outputs);
      core_->end_forward(outputs);
    }
    return result;
  }

  /// The module: `model->parameters()`, `model->train()` ...
  auto operator->() { return &*module_; }
  auto operator->() const { return &*module_; }
  /// What was wrapped, for `torch::save` and `torch::load`.
  M& module() { return module_; }

  /// While what this returns lives, passes only add gradients up on this rank; those of the first
  /// pass after it reduce the whole sum. Forward passes count: those made inside are not reduced.
  NoSync no_sync() { return NoSync(core_); }

  /// While what this returns lives, ranks may run out of data: at the end of the block they go on
  /// with gradients of zero until all have, then all take the model of those that were last. Each
  /// forward pass with gradients is followed by one backward pass. Collective.
  Join join(const JoinOptions& options = {}) { return Join(core_, options); }

  /// Reduces each bucket by `hook` instead of the mean: see comm_hooks.h and power_sgd.h. On all
  /// ranks the same, once, before the first backward pass.
  void register_comm_hook(CommHook hook) { core_->register_comm_hook(std::move(hook)); }

  /// For tests and reports.
  const Reducer& reducer() const { return core_->reducer(); }

 private:
  static std::shared_ptr<torch::nn::Module> plain(const M& module) {
    if constexpr (std::is_convertible_v<M, std::shared_ptr<torch::nn::Module>>) {
      return module;
    } else {
      return module.is_empty() ? nullptr : module.ptr();
    }
  }

  M module_;
  std::shared_ptr<DataParallelCore> core_;
};

}  // namespace smp::dp
