// SPDX-License-Identifier: Apache-2.0
#include "comm/device/staging.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <utility>

namespace smp::comm {

at::Tensor staged_copy(const at::Tensor& tensor) {
  const at::NoGradGuard no_grad;
  // A device copies bytes that follow each other without help of the host.
  const at::Tensor plain = tensor.detach().resolve_conj().resolve_neg().contiguous();
  const at::Tensor copy = staging_room(plain);
  copy.view({-1}).copy_(plain.view({-1}), /*non_blocking=*/true);
  const c10::impl::VirtualGuardImpl device(tensor.device().type());
  device.synchronizeStream(device.getStream(tensor.device()));
  return copy;
}

at::Tensor staging_room(const at::Tensor& tensor) {
  return at::empty(tensor.sizes(), at::TensorOptions(tensor.scalar_type()).pinned_memory(true));
}

void copy_staged(const at::Tensor& staged, const at::Tensor& result) {
  const at::NoGradGuard no_grad;
  result.view({-1}).copy_(staged.view({-1}), /*non_blocking=*/true);
}

WorkPtr staged_work(WorkPtr work, const at::Tensor& staged, const at::Tensor& result) {
  return then(std::move(work), [staged, result] {
    if (result.defined()) copy_staged(staged, result);
  });
}

}  // namespace smp::comm
