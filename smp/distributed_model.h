#pragma once

#include <memory>
#include <type_traits>
#include <utility>

#include "core/check.h"
#include "smp/model_core.h"
#include "smp/precision.h"

namespace torch::jit {
struct Module;
}  // namespace torch::jit

namespace smp {

/// An ordinary libtorch module, trained over all ranks of a pipeline. `M` is the module's holder
/// (what TORCH_MODULE makes) or a shared_ptr to it. Copies refer to the same model.
///
/// Call it like the module, inside step functions only. `->` gives `backward`, `parameters`,
/// `state_dict` and the rest of `ModelCore`.
///
/// Wrap each module once and do not wrap it in anything else. Nothing changes until the first
/// step, which captures the step function, partitions the graph and divides the parameters; but
/// with the configuration's `fp16` or `bf16`, floating point parameters and buffers get that type
/// at once.
template <class M>
class DistributedModel {
  static_assert(!std::is_base_of_v<torch::jit::Module, M>,
                "DistributedModel takes a torch::nn module, not a torch::jit::Module: TorchScript "
                "code runs outside of the dispatcher calls that a step captures");

 public:
  /// Throws `UsageError` before `smp::init`, for an empty holder, for a module that is wrapped
  /// already and after the first step.
  explicit DistributedModel(M module, ModelOptions options = {})
      : module_(std::move(module)), core_(make_core(module_, std::move(options))) {
    Runtime::get().add_model(core_);
  }

  /// Calls the module's `forward`; with `fp16` or `bf16` on arguments cast to that type, and casts
  /// its results to float32. Throws `UsageError` outside a step function.
  template <class... Arguments>
  auto operator()(Arguments&&... arguments) {
    SMP_CHECK_WITH(UsageError, Runtime::get().in_step,
                   "a DistributedModel was called outside a step function: its parameters lie on "
                   "several ranks. Call it inside smp::step([&](torch::Tensor x) { return "
                   "model(x); })");
    using Result = std::decay_t<decltype(module_->forward(std::forward<Arguments>(arguments)...))>;
    if (core_->half()) {
      return static_cast<Result>(
          detail::forward_in(*core_->half(), *module_, std::forward<Arguments>(arguments)...));
    }
    return static_cast<Result>(module_->forward(std::forward<Arguments>(arguments)...));
  }

  ModelCore* operator->() const { return core_.get(); }
  ModelCore& core() const { return *core_; }

  /// The wrapped module's holder. Its parameters that other ranks own hold no data, but for tied
  /// ones that this rank reads too: they have the owner's value since the last step.
  M& get_module() { return module_; }

 private:
  static std::shared_ptr<ModelCore> make_core(const M& module, ModelOptions options) {
    std::shared_ptr<torch::nn::Module> plain;
    if constexpr (std::is_convertible_v<M, std::shared_ptr<torch::nn::Module>>) {
      plain = module;
    } else {
      plain = module.is_empty() ? nullptr : module.ptr();
    }
    return std::make_shared<ModelCore>(std::move(plain), std::move(options), Runtime::get_shared());
  }

  M module_;
  std::shared_ptr<ModelCore> core_;
};

}  // namespace smp
