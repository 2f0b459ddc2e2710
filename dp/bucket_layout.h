// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/TensorOptions.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace smp::dp {

/// Which gradient lies where: buckets are flat tensors of one dtype and device, for parameters of
/// one dtype, in which each gradient starts at a multiple of 64 bytes.
struct BucketLayout {
  struct Slot {
    size_t bucket;
    int64_t offset;  ///< in elements
  };
  std::vector<std::vector<size_t>> members;  ///< parameters of each bucket, as they become ready
  std::vector<int64_t> numel;                ///< elements of each bucket, with the gaps
  std::vector<at::TensorOptions> options;    ///< dtype and device of each bucket
  std::vector<Slot> slots;                   ///< slot of each parameter

  size_t size() const { return members.size(); }
};

/// How large buckets become, in bytes; a larger gradient has one of its own.
struct BucketSizes {
  int64_t first = 1 << 20;  ///< The first of each dtype: small, so that its reduction starts early.
  int64_t others = 25 << 20;
  /// Into how many equal parts each bucket can be divided. Between two parts, a gradient is cut at
  /// a multiple of 64 elements from its start: there end the vectors of elementwise kernels, which
  /// so compute the same bits from the pieces as from the whole.
  int parts = 1;
};

/// Dtype and device in which gradients of a parameter are summed: half precision in float32.
at::TensorOptions sum_options(const at::Tensor& parameter);
std::vector<at::TensorOptions> sum_options(const std::vector<at::Tensor>& parameters);

/// A gradient on its way into a bucket.
struct BucketItem {
  size_t parameter;
  std::string kind;  ///< A bucket holds gradients of one kind.
  int64_t size;
};

/// Fills buckets with items in their order: the first of each kind up to one size, the others up to
/// another; a larger item has a bucket of its own. Returns the parameters by bucket, buckets in the
/// order in which they become complete.
std::vector<std::vector<size_t>> fill_buckets(const std::vector<BucketItem>& items, int64_t first,
                                              int64_t others);

/// Fills buckets in `order`, the one in which gradients become ready (indices of `parameters`, each
/// once). `options[i]` is the dtype and device of gradient i. Buckets are numbered in the order in
/// which they become complete.
BucketLayout make_bucket_layout(const std::vector<at::Tensor>& parameters,
                                const std::vector<at::TensorOptions>& options,
                                const std::vector<size_t>& order, const BucketSizes& sizes);

/// Gradients become ready about from the last parameter to the first.
std::vector<size_t> reverse_order(size_t count);

/// The part of a bucket from `offset` on as the gradient of `parameter`, in its sizes, and in its
/// strides if those are dense. No view to autograd: optimizers may call `detach_()` on it.
at::Tensor gradient_slice(const at::Tensor& bucket, int64_t offset, const at::Tensor& parameter);

/// Complex numbers are added part by part; communicators know real ones only.
at::Tensor as_real(const at::Tensor& tensor);

/// Flat tensors laid out as buckets, and each gradient's slice of them.
struct BucketMemory {
  std::vector<at::Tensor> buckets;
  std::vector<at::Tensor> slices;  ///< slice of each parameter
};

/// Must be called before a slice is written again. One that the program has kept (as `.grad`) keeps
/// its values in memory of its own, and `slice` becomes another tensor on the bucket.
void claim(at::Tensor& slice);

}  // namespace smp::dp
