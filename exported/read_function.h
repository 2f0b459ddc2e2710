// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/Device.h>

#include <optional>

#include "core/json_reader.h"
#include "exported/program.h"

namespace smp::exported {

// Reading functions of one program. `device` is the one that it has named so far.

/// A graph of the schema. Throws `CheckpointError` where a node reads a value that none before it
/// makes, as in a cycle, or makes one twice.
Function read_function(const core::JsonReader& graph, const std::string& name,
                       std::optional<at::Device>& device);

/// An argument that holds no value of a function. Anything else is an error.
Argument read_constant(const core::JsonReader& argument, std::optional<at::Device>& device);

/// Notes a device that the program names. Throws `CheckpointError` if it is the second.
void note_device(const core::JsonReader& place, std::optional<at::Device>& device);

}  // namespace smp::exported
