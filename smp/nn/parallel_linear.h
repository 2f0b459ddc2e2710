// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/arg.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <map>
#include <optional>
#include <ostream>
#include <string>

#include "smp/export.h"
#include "smp/nn/split_module.h"

namespace smp::nn {

/// Options of `ColumnParallelLinear`. Sizes are those of the whole.
struct ColumnParallelLinearOptions {
  ColumnParallelLinearOptions(int64_t in_features, int64_t out_features)
      : in_features_(in_features), out_features_(out_features) {}

  TORCH_ARG(int64_t, in_features);
  TORCH_ARG(int64_t, out_features);
  TORCH_ARG(bool, bias) = true;
  /// How many equal blocks the output consists of: 3 for queries, keys and values in one, so that
  /// every rank has its part of all three.
  TORCH_ARG(int64_t, blocks) = 1;
  /// Whether the output is made whole, instead of divided along its last dimension.
  TORCH_ARG(bool, gather_output) = false;
  /// Whether the input is divided along its last but one dimension, the sequence, instead of whole.
  /// It is gathered for the product, forward and backward; this rank keeps its part.
  TORCH_ARG(bool, sequence_parallel) = false;
  /// Standard deviation of the normal distribution that the weight is drawn from; by default it is
  /// drawn as `torch::nn::Linear` draws it.
  TORCH_ARG(std::optional<double>, init_std) = std::nullopt;
};

/// Options of `RowParallelLinear` and `DistributedLinear`. Sizes are those of the whole.
struct RowParallelLinearOptions {
  RowParallelLinearOptions(int64_t in_features, int64_t out_features)
      : in_features_(in_features), out_features_(out_features) {}

  TORCH_ARG(int64_t, in_features);
  TORCH_ARG(int64_t, out_features);
  TORCH_ARG(bool, bias) = true;
  /// Whether the input is divided along its last dimension already, instead of whole.
  TORCH_ARG(bool, input_is_parallel) = true;
  /// Whether the output is divided along its last but one dimension, the sequence, instead of
  /// whole.
  TORCH_ARG(bool, sequence_parallel) = false;
  /// See `ColumnParallelLinearOptions`.
  TORCH_ARG(std::optional<double>, init_std) = std::nullopt;
};

/// The common part of the layers below: ranks of the tensor-parallel group divide `weight` along
/// the dimension that `Options` is made for.
template <class Derived, class Options>
class SMP_API DividedLinear : public torch::nn::Cloneable<Derived>, public SplitModule {
 public:
  explicit DividedLinear(const Options& options);

  /// Registers the parameters anew, for the group of now, and draws them.
  void reset() override;
  /// Draws the values of the whole, as `torch::nn::Linear` does, and keeps this rank's.
  void reset_parameters();
  void pretty_print(std::ostream& stream) const override;
  /// Runs the layer. All ranks of the group call it together.
  at::Tensor forward(const at::Tensor& input);
  /// forward() with `sliced` in place of the option `sequence_parallel`.
  at::Tensor run(const at::Tensor& input, bool sliced);
  std::map<std::string, ParameterSplit> split_parameters() const override;

  Options options;
  at::Tensor weight;
  at::Tensor bias;  ///< undefined without

 private:
  int ranks_ = 1;
};

/// A linear layer whose outputs are divided among the ranks of the tensor-parallel group: rank r
/// has rows of `weight` [out_features / ranks, in_features] and of `bias`. Input [..., in_features]
/// whole (or, with `sequence_parallel`, this rank's part of the sequence); output [...,
/// out_features / ranks], or whole with `gather_output`. Parameters begin with the values that
/// `torch::nn::Linear` draws from the same generator. Throws `UsageError` if out_features is no
/// multiple of blocks x ranks.
class SMP_API ColumnParallelLinearImpl
    : public DividedLinear<ColumnParallelLinearImpl, ColumnParallelLinearOptions> {
 public:
  ColumnParallelLinearImpl(int64_t in_features, int64_t out_features)
      : DividedLinear(ColumnParallelLinearOptions(in_features, out_features)) {}
  using DividedLinear::DividedLinear;
};
TORCH_MODULE(ColumnParallelLinear);

/// The common part of `RowParallelLinear` and `DistributedLinear`.
template <class Derived>
using RowDivided = DividedLinear<Derived, RowParallelLinearOptions>;

/// A linear layer whose inputs are divided among the ranks of the tensor-parallel group: rank r has
/// columns of `weight` [out_features, in_features / ranks]; `bias` is whole and added once, to the
/// sum over the ranks. Input [..., in_features / ranks], or whole without `input_is_parallel`;
/// output [..., out_features] whole (or, with `sequence_parallel`, this rank's part of the
/// sequence). Parameters begin with the values that `torch::nn::Linear` draws from the same
/// generator. Throws `UsageError` if in_features is no multiple of the ranks.
class SMP_API RowParallelLinearImpl : public RowDivided<RowParallelLinearImpl> {
 public:
  RowParallelLinearImpl(int64_t in_features, int64_t out_features)
      : DividedLinear(RowParallelLinearOptions(in_features, out_features)) {}
  using DividedLinear::DividedLinear;
};
TORCH_MODULE(RowParallelLinear);

/// Takes the place of a `torch::nn::Linear`: input and output are whole, and the input channels of
/// the weight are divided, as in `RowParallelLinear`.
class SMP_API DistributedLinearImpl : public RowDivided<DistributedLinearImpl> {
 public:
  DistributedLinearImpl(int64_t in_features, int64_t out_features)
      : DistributedLinearImpl(RowParallelLinearOptions(in_features, out_features)) {}
  /// `input_is_parallel` and `sequence_parallel` are taken to be false.
  explicit DistributedLinearImpl(RowParallelLinearOptions options)
      : DividedLinear(options.input_is_parallel(false).sequence_parallel(false)) {}
};
TORCH_MODULE(DistributedLinear);

}  // namespace smp::nn
