// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/Device.h>

#include <optional>

#include "exported/json_place.h"
#include "exported/program.h"

namespace smp::exported {

/// Reads functions of one program.
class FunctionReader {
 public:
  /// A graph of the schema. Throws `CheckpointError` where a node reads a value that none before it
  /// makes, as in a cycle, or makes one twice.
  Function read(const JsonPlace& graph, const std::string& name);

  /// An argument that holds no value of a function. Anything else is an error.
  Argument read_constant(const JsonPlace& argument);

  /// Notes a device that the program names. Throws `CheckpointError` if it is the second.
  void note_device(const JsonPlace& place);
  std::optional<at::Device> device() const { return device_; }

 private:
  std::optional<at::Device> device_;
};

}  // namespace smp::exported
