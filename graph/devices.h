// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/Device.h>
#include <c10/core/Event.h>

#include <optional>

namespace smp::graph {

/// The device with its index: for "cuda" the current one of this thread.
at::Device with_index(at::Device device);

/// The kind of accelerator that this process has; CUDA, of which a graph may be that another
/// process has captured, where it has none.
at::DeviceType accelerator_type();

/// The device other than the CPU that an operator about to be called works on: that of the first
/// tensor argument there, or the one that its `device` argument names. Nothing when all is on the
/// CPU or has shapes only.
std::optional<at::Device> accelerator_of(const c10::OperatorHandle& op,
                                         const torch::jit::Stack& stack);

/// An event behind all that this thread's current stream of the device, which is not the CPU, was
/// given; of the kind that keeps a time.
c10::Event timed_event(at::Device device);

/// Waits until the device has done all that this thread's current stream of it was given. Returns
/// at once for the CPU.
void synchronize(at::Device device);

/// Whether this thread's current device, if there is one, has failed for good, as after an
/// assertion in a kernel: libraries of kernels report that by errors of their own.
bool current_device_has_failed();

}  // namespace smp::graph
