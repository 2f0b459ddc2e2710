// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <string>

namespace smp::exported {

/// Writes an archive like that in the file `from`, in which the program's parameters and buffers
/// have the values of `state`, by name: every other record is copied byte for byte. Values are
/// converted to the types of the archive. Names that the program does not have are left out. Throws
/// `CheckpointError` for an archive that cannot be loaded, where `state` lacks a parameter or
/// buffer or has it in another shape, and where `to` cannot be written; then a file that was there
/// is left as it was.
void write_weights(const std::string& from, const std::map<std::string, at::Tensor>& state,
                   const std::string& to);

}  // namespace smp::exported
