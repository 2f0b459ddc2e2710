// SPDX-License-Identifier: Apache-2.0
#include "smp/nn/parallel_linear.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>

#include "nn/initialization.h"
#include "nn/tensor_group.h"
#include "smp/nn/operators.h"

namespace smp::nn {
namespace {

/// Its own name without "Impl" and the namespace, in errors and prints.
template <class Module>
constexpr const char* kLinearName = "";
template <>
constexpr const char* kLinearName<ColumnParallelLinearImpl> = "ColumnParallelLinear";
template <>
constexpr const char* kLinearName<RowParallelLinearImpl> = "RowParallelLinear";
template <>
constexpr const char* kLinearName<DistributedLinearImpl> = "DistributedLinear";

ParameterSplit weight_split(const ColumnParallelLinearOptions& options, int ranks) {
  return {{options.out_features(), options.in_features()}, 0, options.blocks(), ranks};
}

ParameterSplit weight_split(const RowParallelLinearOptions& options, int ranks) {
  return {{options.out_features(), options.in_features()}, 1, 1, ranks};
}

/// It is divided like the weight's rows, and whole where columns are divided.
ParameterSplit bias_split(const ParameterSplit& weight) {
  if (weight.dim == 0) return {{weight.sizes[0]}, 0, weight.blocks, weight.ranks};
  return {{weight.sizes[0]}, 0, 1, 1};
}

void print_own(std::ostream& stream, const ColumnParallelLinearOptions& options) {
  stream << ", blocks=" << options.blocks()
         << ", gather_output=" << (options.gather_output() ? "true" : "false");
}

void print_own(std::ostream& stream, const RowParallelLinearOptions& options) {
  stream << ", input_is_parallel=" << (options.input_is_parallel() ? "true" : "false");
}

at::Tensor product(const ColumnParallelLinearOptions& options, const at::Tensor& input,
                   const at::Tensor& weight, const at::Tensor& bias, bool sliced) {
  const at::Tensor output = sliced ? gathered_linear(input, weight, bias, -2)
                                   : at::linear(copy_to_group(input), weight, bias);
  return options.gather_output() ? gather_from_group(output, -1, options.blocks()) : output;
}

at::Tensor product(const RowParallelLinearOptions& options, const at::Tensor& input,
                   const at::Tensor& weight, const at::Tensor& bias, bool sliced) {
  if (group_size() == 1) return at::linear(input, weight, bias);
  const at::Tensor part = options.input_is_parallel() ? input : scatter_to_group(input, -1);
  const at::Tensor term = at::linear(part, weight);
  const at::Tensor sum = sliced ? reduce_scatter_from_group(term, -2) : reduce_from_group(term);
  if (!options.bias()) return sum;
  // Each rank adds it to its part of the sequence, and has that part of its gradient.
  const at::Tensor added = sliced ? copy_to_group(bias) : bias;
  // Under autocast the sum has a lower precision, in which a plain layer adds.
  return added.scalar_type() == sum.scalar_type() ? sum + added : sum + added.to(sum.scalar_type());
}

}  // namespace

template <class Derived, class Options>
DividedLinear<Derived, Options>::DividedLinear(const Options& options_) : options(options_) {
  DividedLinear::reset();
}

template <class Derived, class Options>
std::map<std::string, ParameterSplit> DividedLinear<Derived, Options>::split_parameters() const {
  const ParameterSplit split = weight_split(options, ranks_);
  std::map<std::string, ParameterSplit> splits{{"weight", split}};
  if (options.bias() && split.dim == 0) splits.emplace("bias", bias_split(split));
  return splits;
}

template <class Derived, class Options>
void DividedLinear<Derived, Options>::reset() {
  ranks_ = tensor_group()->size();
  const ParameterSplit split = weight_split(options, ranks_);
  check_divides(kLinearName<Derived>, split.dim == 0 ? "out_features" : "in_features",
                split.sizes[split.dim], ranks_, split.blocks);
  weight = this->register_parameter("weight", at::empty(split.local_sizes()));
  bias = options.bias()
             ? this->register_parameter("bias", at::empty(bias_split(split).local_sizes()))
             : this->register_parameter("bias", {}, /*requires_grad=*/false);
  reset_parameters();
}

template <class Derived, class Options>
void DividedLinear<Derived, Options>::reset_parameters() {
  const ParameterSplit split = weight_split(options, ranks_);
  draw_linear(weight, split, bias, bias_split(split), tensor_group()->rank(), options.init_std());
}

template <class Derived, class Options>
void DividedLinear<Derived, Options>::pretty_print(std::ostream& stream) const {
  stream << "smp::nn::" << kLinearName<Derived> << "(in_features=" << options.in_features()
         << ", out_features=" << options.out_features()
         << ", bias=" << (options.bias() ? "true" : "false") << ", ranks=" << ranks_;
  print_own(stream, options);
  stream << ", sequence_parallel=" << (options.sequence_parallel() ? "true" : "false") << ")";
}

template <class Derived, class Options>
at::Tensor DividedLinear<Derived, Options>::forward(const at::Tensor& input) {
  return run(input, options.sequence_parallel());
}

template <class Derived, class Options>
at::Tensor DividedLinear<Derived, Options>::run(const at::Tensor& input, bool sliced) {
  return product(options, input, weight, bias, sliced);
}

template class DividedLinear<ColumnParallelLinearImpl, ColumnParallelLinearOptions>;
template class DividedLinear<RowParallelLinearImpl, RowParallelLinearOptions>;
template class DividedLinear<DistributedLinearImpl, RowParallelLinearOptions>;

}  // namespace smp::nn
