// SPDX-License-Identifier: Apache-2.0
#include "graph/mode_scope.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>

#include "graph/devices.h"

namespace smp::graph {
namespace {

void set_autocast(const ExecutionMode& mode) {
  const at::DeviceType accelerator = accelerator_type();
  at::autocast::set_autocast_enabled(at::kCPU, mode.autocast_cpu);
  at::autocast::set_autocast_enabled(accelerator, mode.autocast_accelerator);
  at::autocast::set_autocast_dtype(at::kCPU, mode.autocast_cpu_dtype);
  at::autocast::set_autocast_dtype(accelerator, mode.autocast_accelerator_dtype);
  at::autocast::set_autocast_cache_enabled(mode.autocast_cache);
}

/// The thread's keys, with those for autograd and views excluded as in `mode`.
c10::impl::LocalDispatchKeySet keys_for(const ExecutionMode& mode) {
  constexpr c10::DispatchKeySet kViews(c10::DispatchKey::ADInplaceOrView);
  c10::impl::LocalDispatchKeySet keys = c10::impl::tls_local_dispatch_key_set();
  if (!mode.inference) {
    keys.excluded_ = mode.below_autograd ? keys.excluded_ | c10::autograd_dispatch_keyset
                                         : keys.excluded_ - c10::autograd_dispatch_keyset;
  }
  keys.excluded_ = mode.below_views ? keys.excluded_ | kViews : keys.excluded_ - kViews;
  return keys;
}

}  // namespace

ModeScope::ModeScope(const ExecutionMode& mode) : before_(ExecutionMode::current()) {
  if (mode.inference != before_.inference) inference_.emplace(mode.inference);
  if (mode.below_autograd != before_.below_autograd || mode.below_views != before_.below_views) {
    keys_.emplace(keys_for(mode));
  }
  if (mode.default_dtype != before_.default_dtype) default_dtype_.emplace(mode.default_dtype);
  at::GradMode::set_enabled(mode.grad);
  set_autocast(mode);
}

ModeScope::~ModeScope() {
  set_autocast(before_);
  default_dtype_.reset();
  keys_.reset();
  inference_.reset();
  at::GradMode::set_enabled(before_.grad);
}

}  // namespace smp::graph
