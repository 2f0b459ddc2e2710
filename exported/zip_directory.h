// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

namespace smp::exported {

/// Holds a zip file to the form that torch.export.save writes: records without compression, which
/// are together no larger than their file, and a directory of them at its end. So reading them
/// takes no more memory than the file is large. Throws `CheckpointError` for any other file.
void check_zip_directory(const std::string& path);

}  // namespace smp::exported
