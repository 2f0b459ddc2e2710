// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/serialize/archive.h>

#include <map>
#include <nlohmann/json.hpp>
#include <string>

namespace smp::optim {

/// The fields of a libtorch options or state struct, by the names it serialises them under.
/// Scalars are bool, integer, float, string, null, and arrays of these (tuples); floats that
/// JSON lacks are {"float": "inf"}, "-inf" or "nan".
struct Fields {
  std::map<std::string, at::Tensor> tensors;
  nlohmann::json scalars = nlohmann::json::object();
};

/// The fields that were written to `archive`, the tensors themselves. Throws UsageError for a field
/// of another type.
Fields read_archive(const torch::serialize::OutputArchive& archive);

/// An archive from which `serialize` reads `fields`. Throws CheckpointError for other JSON.
torch::serialize::InputArchive make_archive(const Fields& fields);

/// The fields of a struct, with its own tensors. `T` has libtorch's two `serialize` functions,
/// the only access to the fields of a type that is not known here.
template <class T>
Fields fields_of(const T& value) {
  torch::serialize::OutputArchive archive;
  value.serialize(archive);
  return read_archive(archive);
}

/// The inverse; tensors are copied. Throws c10::Error if `value` misses a field.
template <class T>
void assign_fields(T& value, const Fields& fields) {
  torch::serialize::InputArchive archive = make_archive(fields);
  value.serialize(archive);
}

}  // namespace smp::optim
