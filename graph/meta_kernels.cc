// SPDX-License-Identifier: Apache-2.0
// Shape rules of operators whose kernels for the meta device libtorch registers from Python only:
// without them a recording on shapes runs the operator on zeros (capture-facts). Each gives the
// sizes, strides and type of the CPU kernel; tests/graph/meta_kernels_test.cc compares them.

#include <ATen/TensorIterator.h>
#include <ATen/WrapDimUtils.h>
#include <ATen/core/Reduction.h>
#include <ATen/native/ConvUtils.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/result_type.h>
#include <ATen/ops/sum.h>
#include <torch/library.h>

#include <algorithm>
#include <tuple>
#include <vector>

#include "graph/shapes.h"

namespace smp::graph {
namespace {

using at::IntArrayRef;
using at::MemoryFormat;
using at::OptionalIntArrayRef;
using at::Tensor;

// ---------------------------------------------------------------------------------------------
// Element by element

/// A tensor of `type` for a result that is computed element by element, with the strides that the
/// CPU's kernels choose.
Tensor elementwise(std::initializer_list<Tensor> inputs, at::ScalarType type) {
  at::TensorIteratorConfig config;
  config.check_all_same_dtype(false).allow_cpu_scalars(true).declare_static_dtype_and_device(
      type, at::kMeta);
  config.add_owned_output(Tensor());
  for (const Tensor& input : inputs) config.add_owned_const_input(input);
  return config.build().output();
}

/// Works like `elementwise`, into a tensor that is given.
Tensor& elementwise_out(Tensor& out, std::initializer_list<Tensor> inputs) {
  at::TensorIteratorConfig config;
  config.check_all_same_dtype(false).allow_cpu_scalars(true).add_owned_output(out);
  for (const Tensor& input : inputs) config.add_owned_const_input(input);
  config.build();
  return out;
}

Tensor same_type(const Tensor& self) { return elementwise({self}, self.scalar_type()); }

Tensor angle(const Tensor& self) {
  const auto type = c10::isIntegralType(self.scalar_type(), /*includeBool=*/true)
                        ? c10::typeMetaToScalarType(at::get_default_dtype())
                        : c10::toRealValueType(self.scalar_type());
  if (self.is_complex()) return at::empty(self.sizes(), self.options().dtype(type));
  return elementwise({self}, type);
}

std::tuple<Tensor, Tensor> log_sigmoid(const Tensor& self) {
  const Tensor result = at::empty_like(self, MemoryFormat::Contiguous);
  return {result, at::empty_like(result)};
}

TORCH_LIBRARY_IMPL(aten, Meta, m) {
  m.impl("where.self", [](const Tensor& condition, const Tensor& self, const Tensor& other) {
    return elementwise({condition, self, other}, at::result_type(self, other));
  });
  for (const char* name : {"relu", "hardswish"}) m.impl(name, &same_type);
  for (const char* name : {"abs.out", "angle.out", "conj_physical.out", "logical_not.out"}) {
    m.impl(name,
           [](const Tensor& self, Tensor& out) -> Tensor& { return elementwise_out(out, {self}); });
  }
  for (const char* name : {"logical_and.out", "logical_or.out", "logical_xor.out"}) {
    m.impl(name, [](const Tensor& self, const Tensor& other, Tensor& out) -> Tensor& {
      return elementwise_out(out, {self, other});
    });
  }
  m.impl("hardtanh",
         [](const Tensor& self, const at::Scalar&, const at::Scalar&) { return same_type(self); });
  m.impl("nan_to_num.out",
         [](const Tensor& self, std::optional<double>, std::optional<double>, std::optional<double>,
            Tensor& out) -> Tensor& { return elementwise_out(out, {self}); });
  m.impl("isnan", [](const Tensor& self) { return elementwise({self}, at::kBool); });
  m.impl("angle", &angle);
  m.impl("floor_divide", [](const Tensor& self, const Tensor& other) {
    return elementwise({self, other}, at::result_type(self, other));
  });
  m.impl("_prelu_kernel", [](const Tensor& self, const Tensor& weight) {
    return elementwise({self, weight}, self.scalar_type());
  });
  m.impl("log_sigmoid_forward", &log_sigmoid);
}

// ---------------------------------------------------------------------------------------------
// Losses

Tensor scalar_like(const Tensor& self) { return at::empty({}, self.options()); }

Tensor huber_loss(const Tensor& self, const Tensor& target, int64_t reduction, double) {
  const auto type = at::result_type(self, target);
  if (reduction == at::Reduction::None) return elementwise({self, target}, type);
  return at::empty({}, self.options().dtype(type));
}

Tensor binary_cross_entropy(const Tensor& self, const Tensor&, const std::optional<Tensor>&,
                            int64_t reduction) {
  return reduction == at::Reduction::None ? at::empty_like(self) : scalar_like(self);
}

Tensor multi_margin_loss(const Tensor& self, const Tensor& target, const at::Scalar&,
                         const at::Scalar&, const std::optional<Tensor>&, int64_t reduction) {
  return reduction == at::Reduction::None && self.dim() > 1
             ? at::empty(target.sizes(), self.options())
             : scalar_like(self);
}

std::tuple<Tensor, Tensor> nll_loss2d(const Tensor& self, const Tensor&,
                                      const std::optional<Tensor>&, int64_t reduction, int64_t) {
  const Tensor total = scalar_like(self);
  if (reduction != at::Reduction::None) return {scalar_like(self), total};
  return {at::empty({self.size(0), self.size(2), self.size(3)}, self.options()), total};
}

TORCH_LIBRARY_IMPL(aten, Meta, m) {
  m.impl("huber_loss", &huber_loss);
  m.impl("binary_cross_entropy", &binary_cross_entropy);
  m.impl("multi_margin_loss", &multi_margin_loss);
  m.impl("nll_loss2d_forward", &nll_loss2d);
}

// ---------------------------------------------------------------------------------------------
// Reductions

Tensor spread(const Tensor& self, OptionalIntArrayRef dims, const std::optional<at::Scalar>&,
              bool keepdim) {
  return at::sum(self, dims, keepdim, c10::toRealValueType(self.scalar_type()));
}

std::tuple<Tensor, Tensor> spread_and_mean(const Tensor& self, OptionalIntArrayRef dims,
                                           const std::optional<at::Scalar>& correction,
                                           bool keepdim) {
  return {spread(self, dims, correction, keepdim), at::sum(self, dims, keepdim)};
}

std::tuple<Tensor&, Tensor&> values_of_dim(const Tensor& self, int64_t dim, bool keepdim,
                                           Tensor& values, Tensor& indices) {
  const Tensor shape = at::sum(self, dim, keepdim, self.scalar_type());
  values.resize_(shape.sizes());
  indices.resize_(shape.sizes());
  return {values, indices};
}

std::tuple<Tensor&, Tensor&> kth_value_out(const Tensor& self, int64_t, int64_t dim, bool keepdim,
                                           Tensor& values, Tensor& indices) {
  return values_of_dim(self, dim, keepdim, values, indices);
}

TORCH_LIBRARY_IMPL(aten, Meta, m) {
  for (const char* name : {"std.correction", "var.correction"}) m.impl(name, &spread);
  for (const char* name : {"std_mean.correction", "var_mean.correction"}) {
    m.impl(name, &spread_and_mean);
  }
  for (const char* name : {"max", "min", "median"}) m.impl(name, &scalar_like);
  for (const char* name : {"dot", "vdot"}) {
    m.impl(name, [](const Tensor& self, const Tensor&) { return scalar_like(self); });
  }
  m.impl("prod", [](const Tensor& self, std::optional<at::ScalarType> type) {
    return at::sum(self, type);
  });
  m.impl("nansum",
         [](const Tensor& self, OptionalIntArrayRef dims, bool keepdim,
            std::optional<at::ScalarType> type) { return at::sum(self, dims, keepdim, type); });
  m.impl("trace", [](const Tensor& self) { return at::sum(self); });
  m.impl("count_nonzero.dim_IntList", [](const Tensor& self, IntArrayRef dims) {
    return at::sum(self, dims, /*keepdim=*/false, at::kLong);
  });
  m.impl("kthvalue.values", &kth_value_out);
  m.impl("median.dim_values", &values_of_dim);
}

// ---------------------------------------------------------------------------------------------
// Moving elements

Tensor index_select(const Tensor& self, int64_t dim, const Tensor& index) {
  if (self.dim() == 0) return at::empty({}, self.options());
  auto sizes = self.sizes().vec();
  sizes[at::maybe_wrap_dim(dim, self.dim())] = index.numel();
  return at::empty(sizes, self.options());
}

Tensor roll(const Tensor& self, IntArrayRef shifts, IntArrayRef dims) {
  if (self.numel() == 0) return at::empty_like(self, MemoryFormat::Preserve);
  if (dims.empty()) return at::empty_like(self, MemoryFormat::Contiguous);
  Tensor result = self;
  for (size_t i = 0; i < dims.size(); ++i) {
    const int64_t size = result.size(dims[i]);
    const int64_t start = ((size - shifts[i]) % size + size) % size;
    result = at::cat(
        {result.narrow(dims[i], start, size - start), result.narrow(dims[i], 0, start)}, dims[i]);
  }
  return result;
}

/// Elements to take, as many as the caller says; else it depends on data.
Tensor repeat_interleave(const Tensor& repeats, std::optional<int64_t> output_size) {
  TORCH_CHECK(output_size, "repeat_interleave(): the result's size depends on data");
  return at::empty({*output_size}, repeats.options());
}

Tensor searchsorted(const Tensor&, const Tensor& values, bool out_int32, bool,
                    std::optional<std::string_view>, const std::optional<Tensor>&) {
  return at::empty(values.sizes(), values.options().dtype(out_int32 ? at::kInt : at::kLong));
}

/// There are as many segments as lengths, or one less than offsets. libtorch checks that they add
/// up, which zeros do not.
Tensor segment_reduce(const Tensor& data, std::string_view, const std::optional<Tensor>& lengths,
                      const std::optional<Tensor>&, const std::optional<Tensor>& offsets,
                      int64_t axis, bool, const std::optional<at::Scalar>&) {
  const bool has_lengths = lengths && lengths->defined();
  TORCH_CHECK(has_lengths || (offsets && offsets->defined()),
              "segment_reduce(): expected lengths or offsets");
  axis = at::maybe_wrap_dim(axis, data.dim());
  std::vector<int64_t> sizes = data.sizes().vec();
  sizes[axis] = has_lengths ? lengths->size(axis) : offsets->size(axis) - 1;
  return at::empty(sizes, data.options());
}

TORCH_LIBRARY_IMPL(aten, Meta, m) {
  m.impl("index_select", &index_select);
  m.impl("flip", [](const Tensor& self, IntArrayRef) {
    return at::empty_like(self, MemoryFormat::Preserve);
  });
  m.impl("roll", &roll);
  m.impl("channel_shuffle", [](const Tensor& self, int64_t) {
    return at::empty_like(self, self.suggest_memory_format());
  });
  // Matrices in columns, as LAPACK has them. Zeros have no such factor.
  m.impl("cholesky", [](const Tensor& self, bool) {
    return at::empty(self.sizes(), self.options()).transpose(-2, -1);
  });
  m.impl("repeat_interleave.Tensor", &repeat_interleave);
  m.impl("take", [](const Tensor& self, const Tensor& index) {
    return at::empty(index.sizes(), self.options());
  });
  m.impl("searchsorted.Tensor", &searchsorted);
  m.impl("bucketize.Tensor", [](const Tensor& self, const Tensor&, bool out_int32, bool) {
    return at::empty(self.sizes(), self.options().dtype(out_int32 ? at::kInt : at::kLong));
  });
  m.impl("segment_reduce", &segment_reduce);
}

// ---------------------------------------------------------------------------------------------
// Layers

/// Element `i` of a list that may hold one element for all dimensions.
int64_t per_dim(IntArrayRef list, size_t i) { return list.size() == 1 ? list[0] : list[i]; }

/// How the CPU lays out the result; it has several ways to compute one, which differ in that.
MemoryFormat convolution_format(const Tensor& input, const Tensor& weight,
                                const std::optional<Tensor>& bias, IntArrayRef stride,
                                IntArrayRef padding, IntArrayRef dilation, bool transposed,
                                IntArrayRef output_padding, int64_t groups) {
  const auto on_cpu = [](const Tensor& tensor) {
    TensorMeta meta = TensorMeta::of(tensor);
    meta.device = at::kCPU;
    meta.requires_grad = false;
    return make_placeholder(meta, "");
  };
  const Tensor cpu_input = on_cpu(input), cpu_weight = on_cpu(weight);
  std::optional<Tensor> cpu_bias;
  if (bias && bias->defined()) cpu_bias = on_cpu(*bias);
  const auto backend = at::native::select_conv_backend(
      cpu_input, cpu_weight, cpu_bias, c10::fromIntArrayRefSlow(stride),
      c10::fromIntArrayRefSlow(padding), c10::fromIntArrayRefSlow(dilation), transposed,
      c10::fromIntArrayRefSlow(output_padding), groups, std::nullopt);
  return at::native::_determine_backend_memory_format(cpu_input, cpu_weight, backend);
}

Tensor convolution(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                   IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation, bool transposed,
                   IntArrayRef output_padding, int64_t groups) {
  std::vector<int64_t> sizes = {input.size(0),
                                transposed ? weight.size(1) * groups : weight.size(0)};
  for (size_t i = 0; i + 2 < static_cast<size_t>(input.dim()); ++i) {
    const auto dim = static_cast<int64_t>(i) + 2;
    const int64_t kernel = per_dim(dilation, i) * (weight.size(dim) - 1);
    const int64_t pad = 2 * per_dim(padding, i);
    sizes.push_back(transposed ? (input.size(dim) - 1) * per_dim(stride, i) - pad + kernel +
                                     per_dim(output_padding, i) + 1
                               : (input.size(dim) + pad - kernel - 1) / per_dim(stride, i) + 1);
  }
  const MemoryFormat format = convolution_format(input, weight, bias, stride, padding, dilation,
                                                 transposed, output_padding, groups);
  return at::empty(sizes, input.options().memory_format(format));
}

/// Statistics of half-precision inputs are kept in the precision of the weights.
at::ScalarType statistics_type(const Tensor& input, const std::optional<Tensor>& weight) {
  return weight && weight->defined() ? weight->scalar_type() : input.scalar_type();
}

std::tuple<Tensor, Tensor, Tensor> batch_norm(
    const Tensor& input, const std::optional<Tensor>& weight, const std::optional<Tensor>&,
    const std::optional<Tensor>&, const std::optional<Tensor>&, bool training, double, double) {
  const auto options = input.options().dtype(statistics_type(input, weight));
  const int64_t count = training ? input.size(1) : 0;
  return {at::empty_like(input, input.suggest_memory_format()), at::empty({count}, options),
          at::empty({count}, options)};
}

std::tuple<Tensor, Tensor, Tensor> layer_norm(const Tensor& input, IntArrayRef normalized,
                                              const std::optional<Tensor>& weight,
                                              const std::optional<Tensor>&, double) {
  const auto kept = input.dim() - static_cast<int64_t>(normalized.size());
  std::vector<int64_t> sizes(input.dim(), 1);
  std::copy_n(input.sizes().begin(), kept, sizes.begin());
  const auto options = input.options().dtype(statistics_type(input, weight));
  return {at::empty_like(input, MemoryFormat::Contiguous), at::empty(sizes, options),
          at::empty(sizes, options)};
}

std::tuple<Tensor, Tensor, Tensor> group_norm(const Tensor& input,
                                              const std::optional<Tensor>& weight,
                                              const std::optional<Tensor>&, int64_t batch, int64_t,
                                              int64_t, int64_t groups, double) {
  const auto options = input.options().dtype(statistics_type(input, weight));
  return {at::empty_like(input, input.suggest_memory_format()), at::empty({batch, groups}, options),
          at::empty({batch, groups}, options)};
}

/// `sizes` with its last dimensions replaced.
std::vector<int64_t> with_last(IntArrayRef sizes, IntArrayRef last) {
  auto result = sizes.vec();
  std::copy(last.begin(), last.end(), result.end() - static_cast<int64_t>(last.size()));
  return result;
}

Tensor adaptive_avg_pool2d(const Tensor& input, IntArrayRef output) {
  const auto format = input.dim() == 3 ? MemoryFormat::Contiguous : input.suggest_memory_format();
  return at::empty(with_last(input.sizes(), output), input.options().memory_format(format));
}

Tensor adaptive_avg_pool3d(const Tensor& input, IntArrayRef output) {
  return at::empty(with_last(input.sizes(), output), input.options());
}

Tensor reflection_pad2d(const Tensor& input, IntArrayRef padding) {
  const int64_t height = input.size(-2) + padding[2] + padding[3];
  const int64_t width = input.size(-1) + padding[0] + padding[1];
  const auto format = input.dim() == 3 ? MemoryFormat::Contiguous : input.suggest_memory_format();
  return at::empty(with_last(input.sizes(), {height, width}),
                   input.options().memory_format(format));
}

Tensor grid_sampler(const Tensor& input, const Tensor& grid, int64_t, int64_t, bool) {
  std::vector<int64_t> sizes = {input.size(0), input.size(1)};
  for (int64_t dim = 1; dim + 1 < grid.dim(); ++dim) sizes.push_back(grid.size(dim));
  return at::empty(sizes, input.options());
}

TORCH_LIBRARY_IMPL(aten, Meta, m) {
  m.impl("convolution_overrideable", &convolution);
  m.impl("native_batch_norm", &batch_norm);
  m.impl("native_layer_norm", &layer_norm);
  m.impl("native_group_norm", &group_norm);
  m.impl("_adaptive_avg_pool2d", &adaptive_avg_pool2d);
  m.impl("_adaptive_avg_pool3d", &adaptive_avg_pool3d);
  m.impl("reflection_pad2d", &reflection_pad2d);
  for (const char* name : {"grid_sampler_2d", "grid_sampler_3d"}) m.impl(name, &grid_sampler);
}

}  // namespace
}  // namespace smp::graph
