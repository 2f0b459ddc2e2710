#include "dp/bucket_layout.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/view_as_real.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <tuple>
#include <utility>

namespace smp::dp {
namespace {

constexpr int64_t kAlignment = 64;          // bytes
constexpr int64_t kDivisibleElements = 64;  // two vectors of 512 bits in half precision

int64_t bytes_of(const at::TensorOptions& options, int64_t numel) {
  return numel * static_cast<int64_t>(options.dtype().itemsize());
}

int64_t round_up(int64_t numel, int64_t unit) { return (numel + unit - 1) / unit * unit; }

/// What a gradient takes in a bucket.
int64_t padded_numel(int64_t numel, const at::TensorOptions& options, int parts) {
  return round_up(numel, parts > 1 ? kDivisibleElements : kAlignment / bytes_of(options, 1));
}

struct Bucket {
  Bucket(const at::TensorOptions& options, int64_t limit) : options(options), limit(limit) {}

  at::TensorOptions options;
  int64_t limit;  // in bytes
  int64_t numel = 0;
  std::vector<std::pair<size_t, int64_t>> members;  // parameters and their offsets

  bool fits(int64_t more) const {
    return members.empty() || bytes_of(options, numel + more) <= limit;
  }
};

/// In the order in which they become complete.
std::vector<Bucket> fill_buckets(const std::vector<at::Tensor>& parameters,
                                 const std::vector<at::TensorOptions>& options,
                                 const std::vector<size_t>& order, const BucketSizes& sizes) {
  std::vector<Bucket> full;
  std::map<std::tuple<at::ScalarType, at::ScalarType, std::string>, Bucket> open;
  for (size_t index : order) {
    const at::TensorOptions& kind = options[index];
    const auto key = std::tuple(c10::typeMetaToScalarType(kind.dtype()),
                                parameters[index].scalar_type(), kind.device().str());
    Bucket& bucket = open.try_emplace(key, kind, sizes.first).first->second;
    const int64_t numel = padded_numel(parameters[index].numel(), kind, sizes.parts);
    if (!bucket.fits(numel)) full.push_back(std::exchange(bucket, Bucket(kind, sizes.others)));
    bucket.members.emplace_back(index, bucket.numel);
    bucket.numel += numel;
  }
  for (auto& [key, bucket] : open) full.push_back(std::move(bucket));

  std::vector<size_t> time_of(parameters.size());
  for (size_t time = 0; time < order.size(); ++time) time_of[order[time]] = time;
  std::sort(full.begin(), full.end(), [&](const Bucket& a, const Bucket& b) {
    return time_of[a.members.back().first] < time_of[b.members.back().first];
  });
  return full;
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

BucketLayout make_bucket_layout(const std::vector<at::Tensor>& parameters,
                                const std::vector<at::TensorOptions>& options,
                                const std::vector<size_t>& order, const BucketSizes& sizes) {
  BucketLayout layout;
  layout.slots.resize(parameters.size());
  for (const Bucket& bucket : fill_buckets(parameters, options, order, sizes)) {
    std::vector<size_t> members;
    for (const auto& [index, offset] : bucket.members) {
      layout.slots[index] = {layout.size(), offset};
      members.push_back(index);
    }
    layout.members.push_back(std::move(members));
    layout.numel.push_back(
        sizes.parts > 1 ? round_up(bucket.numel, sizes.parts * kDivisibleElements) : bucket.numel);
    layout.options.push_back(bucket.options);
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

std::string describe_bucket(const BucketLayout& layout, size_t bucket,
                            const std::vector<std::string>& names) {
  const auto& members = layout.members[bucket];
  std::string text =
      c10::str("bucket ", bucket + 1, " of ", layout.size(), ": ", names[members[0]]);
  if (members.size() > 1) text += c10::str(" ... ", names[members.back()]);
  return text;
}

}  // namespace smp::dp
