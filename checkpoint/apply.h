// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/ordered_dict.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/index.h"
#include "checkpoint/reader.h"
#include "checkpoint/writer.h"

namespace torch::nn {
class Module;
}

namespace smp::checkpoint {

/// The tensors of a module by dotted name, in registration order.
using StateDict = torch::OrderedDict<std::string, at::Tensor>;

/// Parameters, then buffers, of `module`. A tied tensor appears under each of its names; the
/// tensors are the module's own, not copies.
StateDict state_dict(const torch::nn::Module& module);

/// The tensors of `dict` each once, under the first of their names and with the others as aliases:
/// as a `Shard` holds them.
std::vector<NamedTensor> named_tensors(const StateDict& dict);

/// A model tensor that a checkpoint is expected to hold.
struct ExpectedTensor {
  std::vector<std::string> names;  ///< More than one for a tied tensor; any of them will do.
  TensorSpec spec;
};

/// The expectations of `tensors` towards a checkpoint.
std::vector<ExpectedTensor> expectations(const std::vector<NamedTensor>& tensors);

/// Permitted differences between a checkpoint and the model that it is loaded into.
struct Tolerance {
  bool strict = true;    ///< Missing and unexpected tensors are errors.
  bool convert = false;  ///< Floating point tensors may be stored in another floating point type.
  /// The model of this name among several, for a module whose names lack it; empty: all there is.
  std::string model = "";
};

/// Whether a stored tensor can be loaded into an expected one: it is of the same shape and type, or
/// with `convert` of another floating point type.
bool fits(const TensorSpec& stored, const TensorSpec& expected, bool convert);

/// Problems with tensors, by their names, and a list of them with a line for each.
using Problems = std::map<std::string, std::string>;
std::string list_problems(const Problems& problems);

/// Compares the model section of `index` with the expectations: throws one CheckpointError that
/// lists, sorted by name, every missing tensor, every unexpected one, every other shape or dtype,
/// and every tied tensor that the checkpoint stores with different contents. Where it has none of
/// the expected tensors, they are missing without `strict`, too. `path` is for the message.
void check_names(const std::vector<ExpectedTensor>& expected, const Index& index,
                 const std::string& path, const Tolerance& tolerance = {});

/// The field of a parameter's optimizer state that holds its float32 master weight, if the
/// parameter itself has a lower precision.
constexpr const char* kMasterField = "master";

/// The key of an index's "optimizer" under which the averages of parameters are, by name: how often
/// each was updated.
constexpr const char* kAverages = "averages";
/// The field of a parameter's state that holds its average of this name.
std::string average_field(const std::string& name);
/// The field of a parameter's state that holds the program's tensor of this name.
std::string tensors_field(const std::string& name);
/// Throws UsageError for a name of either that a checkpoint cannot have. `call` is the user's, and
/// `field` one of the functions above.
void check_field_name(const char* call, const std::string& name,
                      std::string (*field)(const std::string&));
/// Whether a field of a parameter's state is one of these two, and so none of the optimizer's.
bool is_of_program(const std::string& field);
/// How often average `name` was updated; none if the checkpoint has no such average, or one that
/// does not fit: one of its tensors has another shape than the parameter that is expected, or a
/// parameter that the checkpoint's model has is not in it.
std::optional<int64_t> average_updates(const std::vector<ExpectedTensor>& parameters,
                                       const Index& index, const std::string& name);
/// Throws CheckpointError if that is none. `path` is for the message.
void check_average(const std::vector<ExpectedTensor>& parameters, const Index& index,
                   const std::string& name, const std::string& path);
/// The average of an expected tensor, of any floating point type; undefined if the checkpoint has
/// none.
at::Tensor read_average(Reader& reader, const ExpectedTensor& expected, const std::string& name);

/// The values of an expected tensor in its type; undefined if the checkpoint has none. Where the
/// model's type is not the stored one, those of the master weight, if there is one. With `average`
/// those of the average of this name, where the tensor has one.
at::Tensor read_values(Reader& reader, const ExpectedTensor& expected,
                       const std::string& average = "");

/// Loads the model section of the checkpoint `path` into a plain module in this process, with
/// `average` in values of the average of this name.
/// Names, shapes, dtypes and the bytes of all files are checked before any tensor of the module
/// changes; a tied tensor is found under any of its names. Tensors keep their device, strides
/// and identity. Throws CheckpointError.
void load_into_module(torch::nn::Module& module, const std::string& path,
                      const Tolerance& tolerance = {}, const std::string& average = "");

}  // namespace smp::checkpoint
