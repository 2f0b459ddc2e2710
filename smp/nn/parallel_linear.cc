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
constexpr const char* kLinearName<RowParallelLinearImpl> = "RowParallelLinear";
template <>
constexpr const char* kLinearName<DistributedLinearImpl> = "DistributedLinear";

void print_sizes(std::ostream& stream, int64_t in_features, int64_t out_features, bool bias,
                 int ranks) {
  stream << "(in_features=" << in_features << ", out_features=" << out_features
         << ", bias=" << (bias ? "true" : "false") << ", ranks=" << ranks;
}

}  // namespace

ColumnParallelLinearImpl::ColumnParallelLinearImpl(const ColumnParallelLinearOptions& options_)
    : options(options_) {
  ColumnParallelLinearImpl::reset();
}

ParameterSplit ColumnParallelLinearImpl::weight_split() const {
  return {{options.out_features(), options.in_features()}, 0, options.blocks(), ranks_};
}

ParameterSplit ColumnParallelLinearImpl::bias_split() const {
  return {{options.out_features()}, 0, options.blocks(), ranks_};
}

void ColumnParallelLinearImpl::reset() {
  ranks_ = tensor_group()->size();
  check_divides("ColumnParallelLinear", "out_features", options.out_features(), ranks_,
                options.blocks());
  weight = register_parameter("weight", at::empty(weight_split().local_sizes()));
  bias = options.bias() ? register_parameter("bias", at::empty(bias_split().local_sizes()))
                        : register_parameter("bias", {}, /*requires_grad=*/false);
  reset_parameters();
}

void ColumnParallelLinearImpl::reset_parameters() {
  draw_linear(weight, weight_split(), bias, bias_split(), tensor_group()->rank(),
              options.init_std());
}

void ColumnParallelLinearImpl::pretty_print(std::ostream& stream) const {
  stream << "smp::nn::ColumnParallelLinear";
  print_sizes(stream, options.in_features(), options.out_features(), options.bias(), ranks_);
  stream << ", blocks=" << options.blocks()
         << ", gather_output=" << (options.gather_output() ? "true" : "false")
         << ", sequence_parallel=" << (options.sequence_parallel() ? "true" : "false") << ")";
}

at::Tensor ColumnParallelLinearImpl::forward(const at::Tensor& input) {
  return run(input, options.sequence_parallel());
}

at::Tensor ColumnParallelLinearImpl::run(const at::Tensor& input, bool sliced) {
  const at::Tensor output = sliced ? gathered_linear(input, weight, bias, -2)
                                   : at::linear(copy_to_group(input), weight, bias);
  return options.gather_output() ? gather_from_group(output, -1, options.blocks()) : output;
}

std::map<std::string, ParameterSplit> ColumnParallelLinearImpl::split_parameters() const {
  std::map<std::string, ParameterSplit> splits{{"weight", weight_split()}};
  if (options.bias()) splits.emplace("bias", bias_split());
  return splits;
}

template <class Derived>
RowDivided<Derived>::RowDivided(const RowParallelLinearOptions& options_) : options(options_) {
  RowDivided::reset();
}

template <class Derived>
std::map<std::string, ParameterSplit> RowDivided<Derived>::split_parameters() const {
  return {{"weight", {{options.out_features(), options.in_features()}, 1, 1, ranks_}}};
}

template <class Derived>
void RowDivided<Derived>::reset() {
  ranks_ = tensor_group()->size();
  check_divides(kLinearName<Derived>, "in_features", options.in_features(), ranks_);
  weight = this->register_parameter(
      "weight", at::empty({options.out_features(), options.in_features() / ranks_}));
  bias = options.bias() ? this->register_parameter("bias", at::empty({options.out_features()}))
                        : this->register_parameter("bias", {}, /*requires_grad=*/false);
  reset_parameters();
}

template <class Derived>
void RowDivided<Derived>::reset_parameters() {
  const ParameterSplit whole{{options.out_features()}, 0, 1, 1};
  draw_linear(weight, split_parameters().at("weight"), bias, whole, tensor_group()->rank(),
              options.init_std());
}

template <class Derived>
void RowDivided<Derived>::pretty_print(std::ostream& stream) const {
  stream << "smp::nn::" << kLinearName<Derived>;
  print_sizes(stream, options.in_features(), options.out_features(), options.bias(), ranks_);
  stream << ", input_is_parallel=" << (options.input_is_parallel() ? "true" : "false")
         << ", sequence_parallel=" << (options.sequence_parallel() ? "true" : "false") << ")";
}

template <class Derived>
at::Tensor RowDivided<Derived>::forward(const at::Tensor& input) {
  return run(input, options.sequence_parallel());
}

template <class Derived>
at::Tensor RowDivided<Derived>::run(const at::Tensor& input, bool sliced) {
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

template class RowDivided<RowParallelLinearImpl>;
template class RowDivided<DistributedLinearImpl>;

}  // namespace smp::nn
