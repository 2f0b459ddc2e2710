// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/ivalue.h>

#include <nlohmann/json.hpp>

#include "core/json_reader.h"

// Constants of operators in JSON, which lacks infinity, NaN, complex numbers and devices: the parts
// of a graph's file that say these. Internal.
namespace smp::graph {

/// Null for a value without a JSON form; the caller has dealt with None.
nlohmann::ordered_json constant_to_json(const c10::IValue& value);
/// The inverse. Throws the document's error where it is none.
c10::IValue constant_of(const core::JsonReader& in);
/// A device such as "cpu". Throws the document's error where it is none.
at::Device device_of(const core::JsonReader& in);

}  // namespace smp::graph
