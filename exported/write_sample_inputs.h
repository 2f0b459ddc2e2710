// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/ivalue.h>

#include <vector>

#include "exported/archive_writer.h"

namespace smp::exported {

/// Writes the arguments that a program was captured with, as torch.export.load and AOTInductor want
/// them in an archive: a pickle of tensors, numbers and containers, which Python reads with
/// `weights_only=True`.
void write_sample_inputs(ArchiveWriter& archive, const std::vector<c10::IValue>& arguments);

}  // namespace smp::exported
