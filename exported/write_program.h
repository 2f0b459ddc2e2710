// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "exported/export_request.h"

namespace smp::exported {

/// Writes the capture as an archive that Python's torch.export.load reads. Throws `CaptureError`
/// for a part that a program cannot have, which it names, and `CheckpointError` where `path` cannot
/// be written; then a file that was there is left as it was.
ExportReport write_program(const ExportRequest& request, const std::string& path);

}  // namespace smp::exported
