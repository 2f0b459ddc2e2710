// SPDX-License-Identifier: Apache-2.0
#include "runtime/step/microbatches.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <numeric>

#include "core/check.h"
#include "graph/replay.h"
#include "runtime/run_state.h"

namespace smp::runtime {
namespace {

/// Whether a tensor has the axis that it is to be cut along.
bool has_axis(const at::Tensor& tensor, int64_t axis) {
  return axis < tensor.dim() && axis >= -tensor.dim();
}

/// The axis along which the call's tensor i is cut, counted from the first. Throws `UsageError`
/// where it cannot be.
int64_t checked_axis(const detail::StepCall& call, size_t i, const std::string& step_name) {
  const at::Tensor& tensor = call.tensors[i];
  int64_t axis = *call.cuts[i].axis;
  SMP_CHECK_WITH(UsageError, has_axis(tensor, axis), "step function \"", step_name,
                 "\": input tensor ", call.places[i], " of shape ", tensor.sizes(), " has no axis ",
                 axis,
                 " to cut into microbatches. Pass it by smp::whole(x), or name its argument in "
                 "StepOptions().non_split_inputs({...}), to give every microbatch the whole");
  if (axis < 0) axis += tensor.dim();
  SMP_CHECK_WITH(UsageError, tensor.size(axis) > 0, "step function \"", step_name,
                 "\": input tensor ", call.places[i], " of shape ", tensor.sizes(),
                 " is empty: its batch has no samples (0 on axis ", axis,
                 "). Leave out the call on all ranks, or pass a tensor that is no batch by "
                 "smp::whole(x)");
  return axis;
}

}  // namespace

int64_t count_microbatches(const detail::StepCall& call, int64_t most, int64_t unit) {
  int64_t common = 0;  // the greatest number that divides all sizes
  for (size_t i = 0; i < call.tensors.size(); ++i) {
    const at::Tensor& tensor = call.tensors[i];
    const auto& axis = call.cuts[i].axis;
    // A nested tensor is refused later, and may have no size on the axis.
    if (!axis || tensor.is_nested() || !has_axis(tensor, *axis)) continue;
    common = std::gcd(common, tensor.size(*axis));
  }
  if (common % unit != 0) unit = 1;
  int64_t count = most;
  while (common % count != 0 || count % unit != 0) --count;
  return count;
}

std::vector<std::vector<at::Tensor>> cut_microbatches(const detail::StepCall& call, int64_t count,
                                                      const std::string& step_name) {
  std::vector<std::vector<at::Tensor>> result(count);
  for (size_t i = 0; i < call.tensors.size(); ++i) {
    const at::Tensor& tensor = call.tensors[i];
    const bool whole = !call.cuts[i].axis.has_value();
    const int64_t axis = whole ? 0 : checked_axis(call, i, step_name);
    const int64_t size = whole ? 0 : tensor.size(axis) / count;
    for (int64_t m = 0; m < count; ++m) {
      result[m].push_back(graph::aligned(whole ? tensor : tensor.narrow(axis, m * size, size)));
    }
  }
  return result;
}

void check_shards(const detail::StepCall& call, int64_t unit, const std::string& step_name) {
  for (size_t i = 0; i < call.tensors.size(); ++i) {
    if (!call.cuts[i].axis) continue;
    const at::Tensor& tensor = call.tensors[i];
    const int64_t axis = checked_axis(call, i, step_name);
    SMP_CHECK_WITH(UsageError, tensor.size(axis) % unit == 0, "step function \"", step_name,
                   "\": input tensor ", call.places[i], " of shape ", tensor.sizes(),
                   " cannot be cut into microbatches: the batch (", tensor.size(axis), " on axis ",
                   axis, ") is not divisible by ", unit,
                   ", the number of gradient shards that a replica sums (\"gradient_shards\"). "
                   "Choose a divisible batch size, or drop the last incomplete batch (drop_last)");
  }
}

void check_same_microbatches(const std::vector<int64_t>& counts, const std::string& step_name,
                             const std::string& reason) {
  const auto has_batch = [](int64_t count) { return count > 0; };
  const auto first = std::find_if(counts.begin(), counts.end(), has_batch);
  const auto other = std::find_if(
      first, counts.end(), [&](int64_t count) { return has_batch(count) && count != *first; });
  if (other == counts.end()) return;
  core::fail<UsageError>("step function \"", step_name, "\" cut its batch into ", *first,
                         " microbatches on replica ", first - counts.begin(), " and into ", *other,
                         " on replica ", other - counts.begin(),
                         ": as many as divide the batch, up to \"microbatches\". ", reason,
                         ", so give all replicas batches of one size, or drop the last incomplete "
                         "batch (drop_last)");
}

core::Refusal why_no_constant(const detail::StepCall& call, const StepInputs& known,
                              const at::Tensor& tensor) {
  // A single row is that of every sample.
  if (call.microbatches == 1 || tensor.dim() == 0 || tensor.size(0) <= 1) return std::nullopt;
  if (known.wholes.holds(tensor)) return std::nullopt;
  bool is_given_tensors = call.per_microbatch;
  for (size_t i = 0; i < call.tensors.size(); ++i) {
    const auto& axis = call.cuts[i].axis;
    is_given_tensors |= call.places[i] >= 0;
    if (!axis || call.tensors[i].size(*axis) != tensor.size(0)) continue;
    return c10::str("and has the size of the batch (", tensor.size(0), ") on axis 0: each of the ",
                    call.microbatches, " microbatches would get the whole of it");
  }
  if (is_given_tensors) return std::nullopt;
  return c10::str("and the function has no tensor among its arguments: each of the ",
                  call.microbatches, " microbatches would get the whole of it");
}

std::vector<graph::TensorMeta> metas_of(const std::vector<at::Tensor>& tensors) {
  std::vector<graph::TensorMeta> metas;
  for (const at::Tensor& tensor : tensors) metas.push_back(graph::TensorMeta::of(tensor));
  return metas;
}

}  // namespace smp::runtime
