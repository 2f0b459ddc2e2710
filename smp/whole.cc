// SPDX-License-Identifier: Apache-2.0
#include "smp/whole.h"

#include "core/check.h"
#include "graph/shapes.h"
#include "runtime/runtime.h"

namespace smp {

WholeTensor whole(const at::Tensor& tensor) {
  SMP_CHECK_WITH(UsageError, !tensor.defined() || !graph::is_placeholder(tensor),
                 "smp::whole was given a tensor of shape ", tensor.sizes(),
                 " that a step function computes, or got as an argument, so it is that of one "
                 "microbatch. Say it of an argument where the step function is called: "
                 "train(x, smp::whole(mask)); and inside of it only of tensors made outside");
  const bool is_kept = tensor.defined() && tensor.has_storage() && runtime::Runtime::exists();
  if (is_kept) runtime::Runtime::get().step_inputs.wholes.add(tensor.storage());
  return WholeTensor(tensor);
}

}  // namespace smp
