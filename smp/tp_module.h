// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/nn/modules/container/any.h>

#include <functional>
#include <typeindex>
#include <utility>

#include "smp/export.h"

namespace smp {

namespace detail {

using TpModuleMaker = std::function<torch::nn::AnyModule(const void* options)>;

SMP_API void register_tp_module(std::type_index module, std::type_index options,
                                TpModuleMaker make);
/// The maker of the module that takes the place of one of that type; null if that one itself is
/// made.
SMP_API TpModuleMaker tp_module_maker(std::type_index module, std::type_index options);

}  // namespace detail

/// Registers a distributed module of your own for the modules `M` (a holder), which are constructed
/// from `Options`: within `smp::tensor_parallelism()`, `make_module<M>(options)` makes the result
/// of `make(options)`, a holder of a module of any type. Another registration for `M` takes the
/// place of the first. To be called on every rank, before such modules are made.
///
/// For SMP's `smp.tp_register_with_module`: `make` is its init_hook and the construction; the
/// `forward` of the distributed module makes the changes of its forward_hook and return_hook.
///
/// Example:
/// \code
///   smp::tp_register_with_module<Mlp, MlpOptions>(
///       [](const MlpOptions& options) { return DistributedMlp(options.width()); });
/// \endcode
template <class M, class Options, class Make>
void tp_register_with_module(Make make) {
  detail::register_tp_module(
      typeid(M), typeid(Options), [make = std::move(make)](const void* options) {
        return torch::nn::AnyModule(make(*static_cast<const Options*>(options)));
      });
}

/// Makes the module `M(options)` or, within `smp::tensor_parallelism()`, the module registered for
/// it: on one rank, too, so that parameters have the same names for any number of ranks. Put the
/// result into a `torch::nn::Sequential`, or register its `ptr()` and call its `forward`. Throws
/// `UsageError` if `M` is registered with options of another type.
///
/// Example:
/// \code
///   torch::nn::AnyModule mlp = smp::make_module<Mlp>(MlpOptions(512));
///   register_module("mlp", mlp.ptr());
///   ...
///   x = mlp.forward<torch::Tensor>(x);
/// \endcode
template <class M, class Options>
torch::nn::AnyModule make_module(const Options& options) {
  if (const auto make = detail::tp_module_maker(typeid(M), typeid(Options))) return make(&options);
  return torch::nn::AnyModule(M(options));
}

}  // namespace smp
