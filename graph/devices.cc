// SPDX-License-Identifier: Apache-2.0
#include "graph/devices.h"

#include <ATen/DeviceAccelerator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include "graph/stack_tensors.h"

namespace smp::graph {
namespace {

bool is_accelerator(at::Device device) { return !device.is_cpu() && !device.is_meta(); }

}  // namespace

at::Device with_index(at::Device device) {
  if (!is_accelerator(device) || device.has_index()) return device;
  return c10::impl::VirtualGuardImpl(device.type()).getDevice();
}

at::DeviceType accelerator_type() {
  static const at::DeviceType type = at::getAccelerator().value_or(at::kCUDA);
  return type;
}

std::optional<at::Device> accelerator_of(const c10::OperatorHandle& op,
                                         const torch::jit::Stack& stack) {
  const size_t count = op.schema().arguments().size();
  for (size_t i = stack.size() - count; i < stack.size(); ++i) {
    if (stack[i].isDevice() && is_accelerator(stack[i].toDevice())) {
      return with_index(stack[i].toDevice());
    }
  }
  for (const at::Tensor& tensor : tensors_in(stack, count)) {
    if (tensor.defined() && is_accelerator(tensor.device())) return tensor.device();
  }
  return std::nullopt;
}

c10::Event timed_event(at::Device device) {
  c10::Event event(device.type(), c10::EventFlag::BACKEND_DEFAULT);
  event.record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
  return event;
}

void synchronize(at::Device device) {
  if (!is_accelerator(device)) return;
  const c10::impl::VirtualGuardImpl guard(device.type());
  guard.synchronizeStream(guard.getStream(device));
}

/// Asks for the free memory, for which a device may be asked during a capture, too.
bool current_device_has_failed() {
  const auto type = at::getAccelerator();
  if (!type) return false;
  try {
    const c10::Device device = c10::impl::VirtualGuardImpl(*type).getDevice();
    c10::getDeviceAllocator(*type)->getMemoryInfo(device.index());
    return false;
  } catch (const c10::AcceleratorError&) {
    return true;
  } catch (const c10::Error&) {  // nothing can be asked of this kind of device
    return false;
  }
}

}  // namespace smp::graph
