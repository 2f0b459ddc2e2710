// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include "smp/detail/by_arrow.h"
#include "smp/detail/cast_forward.h"
#include "smp/detail/structure.h"
#include "smp/model_core.h"
#include "smp/model_options.h"

namespace torch::jit {
struct Module;
}  // namespace torch::jit

namespace smp {

namespace detail {

/// True for the class that TORCH_MODULE makes, and for a shared pointer to a module.
template <class M>
constexpr bool is_holder() {
  return std::is_base_of_v<torch::detail::ModuleHolderIndicator, M> ||
         std::is_convertible_v<M, std::shared_ptr<torch::nn::Module>>;
}

/// The model that `->` of a `DistributedModel` reaches, which can be called by `forward`, too.
template <class M>
class CallableCore : public ModelCore {
  static_assert(!std::is_base_of_v<torch::jit::Module, M>,
                "DistributedModel takes a torch::nn module, not a torch::jit::Module: TorchScript "
                "code runs outside of the dispatcher calls that a step captures");
  static_assert(is_holder<M>() || std::is_base_of_v<torch::jit::Module, M>,
                "DistributedModel takes the holder of a module, DistributedModel<Net> of what "
                "TORCH_MODULE(Net) makes, or a std::shared_ptr to the module: not the class of the "
                "module itself, NetImpl");

 public:
  CallableCore(M module, const ModelOptions& options)
      : ModelCore(plain(module), options), module_(std::move(module)) {}

  /// Does the same as a call of the `DistributedModel`.
  template <class... Arguments>
  auto forward(Arguments&&... arguments) const {
    std::vector<at::Tensor> inputs;
    [[maybe_unused]] const auto take = [&](const at::Tensor& input) { inputs.push_back(input); };
    (for_each_tensor(std::as_const(arguments), take), ...);
    const ModelCall call(*this, inputs);
    using Result = std::decay_t<decltype(module_->forward(std::forward<Arguments>(arguments)...))>;
    if (const auto half = this->half()) {
      return static_cast<Result>(
          forward_in(*half, *module_, std::forward<Arguments>(arguments)...));
    }
    return static_cast<Result>(module_->forward(std::forward<Arguments>(arguments)...));
  }

  M& get_module() { return module_; }

 private:
  static std::shared_ptr<torch::nn::Module> plain(const M& module) {
    if constexpr (std::is_base_of_v<torch::detail::ModuleHolderIndicator, M>) {
      return module.is_empty() ? nullptr : module.ptr();
    } else if constexpr (is_holder<M>()) {
      return module;
    } else {
      return nullptr;  // does not compile
    }
  }

  mutable M module_;  // a const holder would make its module const
};

}  // namespace detail

/// An ordinary libtorch module, trained over all ranks of a pipeline. `M` is the module's holder
/// (of TORCH_MODULE) or a shared_ptr to it. Copies refer to the same model.
///
/// Call it like the module, inside step functions. `->` gives `backward`, `parameters`,
/// `state_dict` and the rest of `ModelCore`.
///
/// Wrap each module once and do not wrap it in anything else. The first step captures the step
/// function, partitions the graph and divides the parameters. Before, only `fp16` or `bf16` of the
/// configuration changes floating point parameters and buffers, to that type.
template <class M>
class DistributedModel : public detail::ByArrow<DistributedModel<M>> {
 public:
  /// Throws `UsageError` before `smp::init`, for an empty holder, for a module that is wrapped
  /// already and after the first step.
  explicit DistributedModel(M module, const ModelOptions& options = {})
      : core_(std::move(module), options) {}

  /// Calls the module's `forward`. With `fp16` or `bf16` it casts the arguments to that type, and
  /// the results to float32. Outside a step function it throws `UsageError`, unless this rank has
  /// the whole model (also after `model->cpu()`) or, after the first step, the layers are those of
  /// `smp::nn`. The ranks of a tensor-parallel group call these together, with the same arguments,
  /// and draw the same random numbers, from streams of the call's own.
  template <class... Arguments>
  auto operator()(Arguments&&... arguments) const {
    return core_.forward(std::forward<Arguments>(arguments)...);
  }
  /// The same, as the plain module has it; `model->forward(x)` does as well.
  template <class... Arguments>
  auto forward(Arguments&&... arguments) const {
    return core_.forward(std::forward<Arguments>(arguments)...);
  }

  const detail::CallableCore<M>* operator->() const { return &core_; }
  /// Converts to the argument of functions such as `smp::save`.
  operator const ModelCore&() const { return core_; }  // NOLINT(google-explicit-constructor)

  /// The wrapped module's holder. Parameters that other ranks own hold no data here; a tied one
  /// that this rank reads, too, has the owner's value of the last step.
  M& get_module() { return core_.get_module(); }

 private:
  detail::CallableCore<M> core_;
};

/// Models are no part of a batch.
template <>
inline constexpr bool holds_no_tensors<ModelCore> = true;
template <class M>
inline constexpr bool holds_no_tensors<DistributedModel<M>> = true;

}  // namespace smp
