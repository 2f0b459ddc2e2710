// SPDX-License-Identifier: Apache-2.0
#include "dp/bucket_layout.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/view_as_real.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <utility>

namespace smp::dp {
namespace {

constexpr int64_t kAlignment = 64;          // bytes
constexpr int64_t kDivisibleElements = 64;  // two vectors of 512 bits in half precision

int64_t bytes_of(const at::TensorOptions& options, int64_t numel) {
  return numel * static_cast<int64_t>(options.dtype().itemsize());
}

int64_t round_up(int64_t numel, int64_t unit) { return (numel + unit - 1) / unit * unit; }

/// The number of elements that a gradient takes in a bucket.
int64_t padded_numel(int64_t numel, const at::TensorOptions& options, int parts) {
  return round_up(numel, parts > 1 ? kDivisibleElements : kAlignment / bytes_of(options, 1));
}

}  // namespace

at::TensorOptions sum_options(const at::Tensor& parameter) {
  const at::ScalarType type = parameter.scalar_type();
  const bool half = type == at::kHalf || type == at::kBFloat16;
  return at::TensorOptions(half ? at::kFloat : type).device(parameter.device());
}

std::vector<at::TensorOptions> sum_options(const std::vector<at::Tensor>& parameters) {
  std::vector<at::TensorOptions> options;
  for (const at::Tensor& parameter : parameters) options.push_back(sum_options(parameter));
  return options;
}

std::vector<std::vector<size_t>> fill_buckets(const std::vector<BucketItem>& items, int64_t first,
                                              int64_t others) {
  struct Bucket {
    int64_t limit;
    int64_t size = 0;
    size_t completed = 0;  // index of the item that completes it
    std::vector<size_t> members = {};
  };
  std::vector<Bucket> full;
  std::map<std::string, Bucket> open;
  for (size_t i = 0; i < items.size(); ++i) {
    Bucket& bucket = open.try_emplace(items[i].kind, Bucket{first}).first->second;
    if (!bucket.members.empty() && bucket.size + items[i].size > bucket.limit) {
      full.push_back(std::exchange(bucket, Bucket{others}));
    }
    bucket.members.push_back(items[i].parameter);
    bucket.size += items[i].size;
    bucket.completed = i;
  }
  for (auto& [kind, bucket] : open) full.push_back(std::move(bucket));
  std::sort(full.begin(), full.end(),
            [](const Bucket& a, const Bucket& b) { return a.completed < b.completed; });
  std::vector<std::vector<size_t>> members;
  for (Bucket& bucket : full) members.push_back(std::move(bucket.members));
  return members;
}

BucketLayout make_bucket_layout(const std::vector<at::Tensor>& parameters,
                                const std::vector<at::TensorOptions>& options,
                                const std::vector<size_t>& order, const BucketSizes& sizes) {
  const auto numel_of = [&](size_t i) {
    return padded_numel(parameters[i].numel(), options[i], sizes.parts);
  };
  std::vector<BucketItem> items;
  for (size_t i : order) {
    items.push_back({i,
                     c10::str(options[i].dtype(), " of ", parameters[i].scalar_type(), " on ",
                              options[i].device()),
                     bytes_of(options[i], numel_of(i))});
  }
  BucketLayout layout;
  layout.slots.resize(parameters.size());
  layout.members = fill_buckets(items, sizes.first, sizes.others);
  for (size_t bucket = 0; bucket < layout.size(); ++bucket) {
    int64_t numel = 0;
    for (size_t i : layout.members[bucket]) {
      layout.slots[i] = {bucket, numel};
      numel += numel_of(i);
    }
    layout.numel.push_back(sizes.parts > 1 ? round_up(numel, sizes.parts * kDivisibleElements)
                                           : numel);
    layout.options.push_back(options[layout.members[bucket].front()]);
  }
  return layout;
}

std::vector<size_t> reverse_order(size_t count) {
  std::vector<size_t> order(count);
  std::iota(order.rbegin(), order.rend(), 0);
  return order;
}

at::Tensor gradient_slice(const at::Tensor& bucket, int64_t offset, const at::Tensor& parameter) {
  const at::AutoDispatchBelowADInplaceOrView no_view;
  const at::Tensor flat = bucket.narrow(0, offset, parameter.numel());
  if (parameter.is_non_overlapping_and_dense()) {
    return flat.as_strided(parameter.sizes(), parameter.strides());
  }
  return flat.view(parameter.sizes());
}

at::Tensor as_real(const at::Tensor& tensor) {
  return tensor.is_complex() ? at::view_as_real(tensor) : tensor;
}

void claim(at::Tensor& slice) {
  if (slice.use_count() <= 1) return;
  const at::AutoDispatchBelowADInplaceOrView no_view;
  const at::Tensor other = slice.as_strided(slice.sizes(), slice.strides(), slice.storage_offset());
  slice.set_data(slice.clone());
  slice = other;
}

}  // namespace smp::dp
