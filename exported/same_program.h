// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "exported/export_request.h"

namespace smp::exported {

/// Throws `CaptureError` unless the captures call the same operators on the same values, so that
/// only numbers differ with dynamic sizes. It names the first operator that differs.
void check_same_program(const ExportRequest& request);

}  // namespace smp::exported
