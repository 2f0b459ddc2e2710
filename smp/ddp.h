// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "smp/comm_hooks.h"
#include "smp/ddp_options.h"
#include "smp/detail/structure.h"
#include "smp/export.h"
#include "smp/init.h"
#include "smp/join.h"

namespace torch::nn {
class Module;
}  // namespace torch::nn

namespace smp {

namespace dp {
class DataParallelCore;
}  // namespace dp

/// While it lives, passes only add gradients up; see `DistributedDataParallel::no_sync`.
class [[nodiscard]] SMP_API NoSync {
 public:
  explicit NoSync(std::shared_ptr<dp::DataParallelCore> core);
  ~NoSync();
  NoSync(const NoSync&) = delete;
  NoSync& operator=(const NoSync&) = delete;

 private:
  const std::shared_ptr<dp::DataParallelCore> core_;
  const bool before_;
};

namespace detail {

/// The part of `DistributedDataParallel` that does not depend on the type of its module.
class SMP_API DataParallel {
 public:
  /// While the result lives, passes only add gradients up on this rank; the first pass after it
  /// reduces the whole sum. A pass is inside if its forward is.
  [[nodiscard]] NoSync no_sync();

  /// While the result lives, ranks may run out of data: at the end of the block they go on with
  /// gradients of zero until all ranks have ended, then all take the model of those that were last.
  /// Each forward pass with gradients is followed by one backward pass. Collective. Throws
  /// `UsageError` inside another `join`.
  [[nodiscard]] Join join(const JoinOptions& options = {});

  /// Reduces each bucket by `hook` instead of the mean: see comm_hooks.h. Called on all ranks with
  /// the same hook, once, before the first backward pass; throws `UsageError` the second time.
  void register_comm_hook(CommHook hook);

  /// The names of the parameters in each bucket, in the order in which buckets are reduced.
  std::vector<std::vector<std::string>> buckets() const;

 protected:
  DataParallel(std::shared_ptr<torch::nn::Module> module, const DDPOptions& options);

  /// Runs before forward. Returns whether `end_forward` is to be called after it.
  bool begin_forward();
  void end_forward(const std::vector<at::Tensor>& outputs);

 private:
  std::shared_ptr<dp::DataParallelCore> core_;
};

}  // namespace detail

/// A module of which each rank trains a replica on data of its own, in any libtorch loop: gradients
/// are averaged over the ranks while `backward()` computes them, so that replicas stay equal. `M`
/// is the module's holder (of TORCH_MODULE) or a shared_ptr to it. Copies refer to the same
/// replica. The C++ counterpart of torch.nn.parallel.DistributedDataParallel; see
/// docs/data_parallel.md.
///
///     smp::init();
///     smp::DistributedDataParallel<Net> model(net);
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
class DistributedDataParallel : public detail::DataParallel {
 public:
  /// Gives all replicas the first one's parameters and buffers. Collective over the replicas.
  /// Throws `UsageError` on all ranks when they wrap different models, naming the first difference;
  /// and for a module without parameters to train, on several devices, or in a `DistributedModel`.
  /// Parameters must not be added, replaced or moved afterwards.
  explicit DistributedDataParallel(M module, const DDPOptions& options = {})
      : DataParallel(plain(module), options), module_(std::move(module)) {}

  /// Calls the module's `forward`. With gradients on, throws `UsageError` when the last backward
  /// pass left out parameters without `find_unused_parameters`.
  template <class... Arguments>
  auto operator()(Arguments&&... arguments) {
    const bool trains = begin_forward();
    auto result = module_->forward(std::forward<Arguments>(arguments)...);
    if (trains) {
      static_assert(!detail::content_of<decltype(result)>().unknown,
                    "the forward of this module returns a class in which tensors may be that are "
                    "not found. Inside of the class, list its fields: SMP_FIELDS(x, y)");
      std::vector<at::Tensor> outputs;
      detail::for_each_tensor(std::as_const(result), [&](const at::Tensor& output) {
        if (output.defined()) outputs.push_back(output);
      });
      end_forward(outputs);
    }
    return result;
  }

  /// The module: `model->parameters()`, `model->train()` ...
  auto operator->() { return &*module_; }
  auto operator->() const { return &*module_; }
  /// The wrapped module, for `torch::save` and `torch::load`.
  M& module() { return module_; }

 private:
  static std::shared_ptr<torch::nn::Module> plain(const M& module) {
    if constexpr (std::is_convertible_v<M, std::shared_ptr<torch::nn::Module>>) {
      return module;
    } else {
      return module.is_empty() ? nullptr : module.ptr();
    }
  }

  M module_;
};

}  // namespace smp
