// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <type_traits>

#include "smp/optimizer_core.h"

namespace torch::nn {
class Module;
}  // namespace torch::nn
namespace torch::optim {
class Optimizer;
}  // namespace torch::optim
namespace torch::detail {
struct ModuleHolderIndicator;
}  // namespace torch::detail

namespace smp::detail {

/// True for an optimizer of libtorch's that is not a `DistributedOptimizer`.
template <class T>
inline constexpr bool is_plain_optimizer =
    std::is_base_of_v<torch::optim::Optimizer, T> && !std::is_base_of_v<OptimizerCore, T>;

/// True for a module of libtorch's, its holder and a shared pointer to it.
template <class T>
inline constexpr bool is_plain_module =
    std::is_base_of_v<torch::nn::Module, T> ||
    std::is_base_of_v<torch::detail::ModuleHolderIndicator, T> ||
    std::is_convertible_v<const T&, std::shared_ptr<torch::nn::Module>>;

/// Exists where one of the arguments is plain.
template <class... Arguments>
using IfPlain =
    std::enable_if_t<((is_plain_optimizer<Arguments> || is_plain_module<Arguments>) || ...)>;

/// Does not compile: names the argument that checkpoints take in its place.
template <class... Arguments>
constexpr void refuse_plain() {
  static_assert(!(is_plain_optimizer<Arguments> || ...),
                "checkpoints hold the state of a smp::DistributedOptimizer, not of a plain "
                "torch::optim optimizer: wrap it, auto optimizer = smp::distributed(plain), and "
                "step and save that");
  static_assert(!(is_plain_module<Arguments> || ...),
                "checkpoints hold a smp::DistributedModel, not the module that it wraps: pass the "
                "DistributedModel. Without one, torch::save(module, path) writes a module, and "
                "smp::load_into_module(path, *module) reads a checkpoint");
}

/// The same for calls between steps.
template <class... Arguments>
constexpr void refuse_plain_between_steps() {
  static_assert(!(is_plain_module<Arguments> || ...),
                "this call takes a smp::DistributedModel, whose parameters lie on several ranks, "
                "not the module that it wraps: pass the DistributedModel");
  static_assert(!(is_plain_optimizer<Arguments> || ...),
                "this call takes a smp::DistributedOptimizer, not a plain torch::optim optimizer: "
                "wrap it, auto optimizer = smp::distributed(plain), and pass that");
}

}  // namespace smp::detail
