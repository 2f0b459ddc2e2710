// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/arg.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <memory>
#include <optional>

#include "smp/export.h"
#include "smp/tensor_parallelism_options.h"

namespace smp {

/// Options of `model_creation`.
struct ModelCreationOptions {
  /// The type of the parameters: libtorch's default floating point type while the scope lives, in
  /// all threads of the process, as `torch::set_default_dtype` sets it. By default it stays.
  TORCH_ARG(std::optional<at::ScalarType>, dtype) = std::nullopt;
  /// Make parameters later, and only those that this rank owns; by default as the configuration's
  /// `delayed_parameter_initialization` says.
  TORCH_ARG(std::optional<bool>, delayed) = std::nullopt;
  /// Mark the modules made for tensor parallelism, as `smp::tensor_parallelism` does; by default as
  /// around the scope.
  TORCH_ARG(std::optional<bool>, tensor_parallelism) = std::nullopt;
  /// The options of that mark; to be given together with `tensor_parallelism`.
  TORCH_ARG(std::optional<TensorParallelismOptions>, tensor_parallelism_options) = std::nullopt;
  /// Draw the random numbers of each delayed parameter from a stream keyed by the seed and the
  /// parameter's name. Saves one drawing of all of them, and gives other weights than plain
  /// construction: the same for any number of stages.
  TORCH_ARG(bool, fast) = false;
  /// Tensors of at most so many bytes are made at once even if the rest is delayed.
  TORCH_ARG(int64_t, eager_bytes) = 16 << 10;
};

/// The scope that `model_creation` begins; it ends with the block.
class [[nodiscard]] SMP_API ModelCreation {
 public:
  explicit ModelCreation(const ModelCreationOptions& options);
  ~ModelCreation();
  ModelCreation(const ModelCreation&) = delete;
  ModelCreation& operator=(const ModelCreation&) = delete;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

/// Begins a scope in which to construct modules:
/// \code
///   Net net{nullptr};
///   {
///     const auto scope = smp::model_creation(smp::ModelCreationOptions().dtype(torch::kBFloat16));
///     net = Net();
///   }
///   smp::DistributedModel<Net> model(net);
/// \endcode
/// Its parameters have sizes and types but no memory. The first step captures the step function on
/// shapes and partitions the model; then each rank makes the parameters that it owns, with the
/// values that plain construction would have given them, bit for bit. See docs/memory.md.
///
/// Scopes nest; the innermost one counts. Belongs to one thread. Needs `smp::init` unless
/// `delayed` is given. Throws `UsageError` for a `dtype` that is no floating point type, and for
/// `tensor_parallelism_options` without `tensor_parallelism`.
SMP_API ModelCreation model_creation(const ModelCreationOptions& options = {});

/// `model_creation` for this purpose alone. In a scope that delays, `enabled = false` makes tensors
/// constructed inside at once.
SMP_API ModelCreation delayed_parameter_initialization(bool enabled = true);

/// Makes the module's parameters and buffers that have no data yet, on this rank, as if they had
/// been constructed plainly: for modules that are used without a step. Not collective.
SMP_API void materialize(const torch::nn::Module& module);

}  // namespace smp
