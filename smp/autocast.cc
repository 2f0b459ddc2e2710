// SPDX-License-Identifier: Apache-2.0
#include "smp/autocast.h"

#include <ATen/autocast_mode.h>

#include "runtime/runtime.h"

namespace smp::amp {
namespace {

using runtime::Runtime;

/// Libtorch's cache of casts belongs to the process, and other ranks may be threads of it that
/// replay a step. A step function that runs on shapes casts nothing.
bool may_have_cast() {
  if (!Runtime::exists()) return true;
  const Runtime& runtime = Runtime::get();
  return !runtime.current_step.is_running || runtime.current_step.is_captured;
}

}  // namespace

Autocast::Autocast(at::ScalarType dtype, at::DeviceType device, bool enabled)
    : device_(device),
      was_enabled_(at::autocast::is_autocast_enabled(device)),
      dtype_before_(at::autocast::get_autocast_dtype(device)) {
  at::autocast::set_autocast_enabled(device_, enabled);
  at::autocast::set_autocast_dtype(device_, dtype);
  at::autocast::increment_nesting();
}

Autocast::~Autocast() {
  if (at::autocast::decrement_nesting() == 0 && may_have_cast()) at::autocast::clear_cache();
  at::autocast::set_autocast_enabled(device_, was_enabled_);
  at::autocast::set_autocast_dtype(device_, dtype_before_);
}

}  // namespace smp::amp
