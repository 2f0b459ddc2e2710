// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "runtime/runtime.h"

namespace smp::runtime {

/// How models that were built in host memory come to the ranks' devices, of which none need hold a
/// whole one. Internal; part of the first step.

/// Shows the models' tensors on this rank's device. Those that lie there already stay. The others
/// keep identity, sizes and strides, and tensors that share memory share it there, too; parameters
/// have no data on the device, and their values wait in host memory
/// (`ParameterTable::Entry::waiting`), or are yet to be made. Buffers, which all ranks need, move
/// at once.
void show_on_device(Runtime& runtime);

/// True while the values of some parameter wait.
bool has_waiting(const ParameterTable& table);

/// Moves the waiting values of a parameter or buffer, and its gradient, to the device and frees it
/// here. Throws `c10::OutOfMemoryError` where the device has no room.
void move_in(Runtime& runtime, const ParameterTable::Entry& entry);

}  // namespace smp::runtime
