// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "exported/archive_writer.h"
#include "exported/export_request.h"

namespace smp::exported {

/// Writes tensors as raw bytes: those that share a storage share one record. `kind` is "weights" or
/// "constants".
void write_tensors(ArchiveWriter& archive, const std::string& kind,
                   const std::vector<ExportRequest::Tensor>& tensors);

/// The bytes of a tensor's storage, on the CPU.
at::Tensor storage_bytes(const at::Tensor& tensor);

}  // namespace smp::exported
