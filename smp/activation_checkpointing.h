// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/arg.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <string>
#include <type_traits>

#include "smp/export.h"

namespace smp {

/// The strategies of `set_activation_checkpointing` that have no number.
enum class CheckpointStrategy { kEach, kContiguous };

/// Options of `set_activation_checkpointing`.
struct SMP_API CheckpointOptions {
  /// For a `Sequential` or `ModuleList`, which of its children run again together: "each" child by
  /// itself, "contiguous": all neighbours on one stage, or "group_N": N neighbours on one stage,
  /// "group_2" for example. Other modules know "each" only, and run again as a whole.
  TORCH_ARG(std::string, strategy) = "each";
  /// Accepted both ways: random operators draw from keyed streams, so they always draw the same
  /// numbers again, at no cost.
  TORCH_ARG(bool, preserve_rng_state) = true;

 public:
  /// "each" or "contiguous".
  CheckpointOptions& strategy(CheckpointStrategy strategy);
  /// "group_N" with N = `neighbours`.
  CheckpointOptions& group(int64_t neighbours);
};

namespace detail {
SMP_API void checkpoint_module(const torch::nn::Module& module, const CheckpointOptions& options);
}  // namespace detail

/// Runs `module` (a holder, a module or a pointer to one) again in the backward pass instead of
/// keeping until then the tensors that its operators save: only its inputs are kept. Losses,
/// gradients and weights are the same, bit for bit, with dropout too. Part of a model, to be called
/// before the first step, before or after the model is wrapped.
///
/// A module that is divided among several stages runs again on each of them, with its part. The
/// outermost of modules inside each other counts. Which operators belong to a module, its costs and
/// savings: docs/memory.md.
///
/// As documented for SMP's `smp.set_activation_checkpointing`; without `pack_args_as_tuple`, since
/// the modules are not called anew: their operators are. Throws `UsageError` after the first step,
/// for an unknown strategy, and for one that the module does not know; the first step throws one if
/// the module (of a call after `init`) is not inside a `DistributedModel` or cannot run again. May
/// be called on any thread.
template <class M>
void set_activation_checkpointing(const M& module, const CheckpointOptions& options = {}) {
  if constexpr (std::is_base_of_v<torch::nn::Module, M>) {
    detail::checkpoint_module(module, options);
  } else {
    detail::checkpoint_module(*module, options);
  }
}

}  // namespace smp
