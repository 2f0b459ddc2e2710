#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <string>

namespace smp::graph {

/// True if some result is no tensor: a number, a bool, a shape.
bool returns_host_value(const c10::FunctionSchema& schema);

/// True for operators whose host result follows from shapes and types alone.
bool reads_only_metadata(const std::string& name);

/// True for normalisations, which update their running statistics (arguments 3 and 4, if argument
/// 5 is true) without saying so in their schema.
bool writes_running_statistics(const std::string& name);

/// True for operators that give a tensor another storage under the feet of its other users.
bool replaces_storage(const std::string& name);

/// The position of an argument that counts elements from the start of a tensor's storage
/// (`as_strided`), or -1.
int storage_offset_argument(const c10::FunctionSchema& schema);

/// True if the schema has an argument that may hold tensors.
bool has_tensor_argument(const c10::FunctionSchema& schema);

/// True for factories that are not random: a step function gets their results themselves, since
/// host code may be about to fill them (`torch::tensor(vector)`, an accessor).
bool host_may_write(const c10::OperatorHandle& op);

/// True for factories that leave their result's content undefined.
bool is_uninitialised_factory(const std::string& name);

}  // namespace smp::graph
