// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nlohmann/json.hpp>
#include <vector>

#include "exported/export_request.h"
#include "exported/write_function.h"

namespace smp::exported {

/// The inputs and outputs of a program: the schema's "signature". All outputs are results: buffers
/// are written in place.
nlohmann::json write_signature(const std::vector<WrittenInput>& inputs,
                               const std::vector<nlohmann::json>& outputs);

/// The model's modules, with the structures of the arguments and results of the outermost.
nlohmann::json write_calls(const ExportRequest& request);

/// The ranges of dynamic sizes, by symbol.
nlohmann::json write_ranges(const ExportRequest& request);

}  // namespace smp::exported
