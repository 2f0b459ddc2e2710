// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "nn/rewrite/builtin_rules.h"
#include "nn/rewrite/factors.h"

namespace smp::nn::rewrite {
namespace {

/// A sum of parts stays one if no other operator needs the sum.
bool keeps_terms(const Call& call, const Factors& factors) {
  return call.layout(0).is_partial() && call.users(0).size() == 1 && !call.in_place() &&
         factors.linear.count({0}) > 0;
}

}  // namespace

std::optional<Treatment> follow(const Call& call) {
  const std::optional<Factors> factors = factors_of(call);
  return factors ? follow_factors(call, *factors) : std::nullopt;
}

std::optional<Treatment> follow_factors(const Call& call, const Factors& factors) {
  const Layout& first = call.layout(0);
  Treatment treatment = call.all_shared();
  treatment.arguments[0] = first;
  if (!first.is_divided()) {
    if (!keeps_terms(call, factors)) return std::nullopt;
    std::fill(treatment.results.begin(), treatment.results.end(), first);
    return treatment;
  }
  const int factor = factors.arguments[0][first.dim];
  const int64_t block = block_of(call.meta(0).sizes, first);
  if (factor == Factors::kAlong) return std::nullopt;
  const auto place = [&](c10::IntArrayRef sizes, const Factors::Dims& dims, Layout& layout) {
    const auto at = std::find(dims.begin(), dims.end(), factor) - dims.begin();
    const bool has = at < static_cast<int64_t>(std::min(dims.size(), sizes.size()));
    const bool fits = has && sizes[at] > 0 && sizes[at] % block == 0;
    if (!fits) return false;
    layout = first.along(static_cast<int>(at));
    layout.blocks = sizes[at] / block;
    return true;
  };
  for (int i = 1; i < static_cast<int>(call.tensors().size()); ++i) {
    place(call.meta(i).sizes, factors.arguments[i], treatment.arguments[i]);
  }
  for (size_t r = 0; r < call.results().size(); ++r) {
    const auto& sizes = call.result_meta(static_cast<int>(r)).sizes;
    if (!place(sizes, factors.results[r], treatment.results[r])) return std::nullopt;
  }
  return treatment;
}

}  // namespace smp::nn::rewrite
