// SPDX-License-Identifier: Apache-2.0
#include "runtime/step/captured_tensors.h"

#include <c10/util/StringUtil.h>

namespace smp::runtime {

std::string why_not_captured(const detail::StepCall& call, const StepInputs& known,
                             const at::Tensor& tensor) {
  // A single row is that of every sample.
  if (call.microbatches == 1 || tensor.dim() == 0 || tensor.size(0) <= 1) return "";
  if (known.wholes.holds(tensor)) return "";
  bool is_given_tensors = call.per_microbatch;
  for (size_t i = 0; i < call.tensors.size(); ++i) {
    const auto& axis = call.cuts[i].axis;
    is_given_tensors |= call.places[i] >= 0;
    if (!axis || call.tensors[i].size(*axis) != tensor.size(0)) continue;
    return c10::str("and has the size of the batch (", tensor.size(0), ") on axis 0: each of the ",
                    call.microbatches, " microbatches would get the whole of it");
  }
  if (is_given_tensors) return "";
  return c10::str("and the function has no tensor among its arguments: each of the ",
                  call.microbatches, " microbatches would get the whole of it");
}

}  // namespace smp::runtime
