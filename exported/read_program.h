// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "core/json_reader.h"
#include "exported/program.h"

namespace smp::exported {

/// Reads models/model.json of an archive. Throws `CheckpointError`, which names file, node and
/// remedy, for malformed JSON, for versions and kinds that are unknown here (`schema_version`,
/// kinds of arguments), and for refused programs: programs on several devices, custom objects,
/// exports with a backward pass. Actions are not bound yet.
ExportedProgram read_program(const core::JsonReader& json);

}  // namespace smp::exported
