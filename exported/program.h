// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/ivalue.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/json_reader.h"
#include "exported/linear_size.h"
#include "exported/structure.h"

/// Programs that Python's torch.export.save wrote: an archive, read as an `ExportedProgram`, whose
/// functions are run node by node.
namespace smp::exported {

/// Where a value of a function lies while the function runs.
using Slot = int;
constexpr Slot kNoSlot = -1;

enum class ValueType : uint8_t { kTensor, kInteger, kReal, kBoolean };

const char* to_string(ValueType type);
bool is_of(const c10::IValue& value, ValueType type);
/// Some value of the type.
const c10::IValue& example_of(ValueType type);

struct Function;

/// An argument of a node.
struct Argument {
  enum class Kind : uint8_t {
    kConstant,  ///< `constant`; enumerations as libtorch's schemas have them, as integers
    kSlot,      ///< a value of the function
    kList,
    kDevice,    ///< the program's one
    kFunction,  ///< the function that a higher-order node calls
  };

  Kind kind = Kind::kConstant;
  c10::IValue constant;
  Slot slot = kNoSlot;
  std::vector<Argument> elements;
  std::shared_ptr<const Function> function;
};

struct NamedArgument {
  std::string name;  ///< may be empty: the argument of that number
  Argument value;
};

/// Where a returned value goes. Those of a list lie in several slots.
struct Result {
  bool is_list = false;
  std::vector<Slot> slots;  ///< kNoSlot: nothing reads it
};

struct Frame;

/// The work of a node in a run (see `bind_actions`): returns one value for each of its results.
using Action = std::function<std::vector<c10::IValue>(const Frame&)>;

/// One call in a function.
struct Node {
  std::string name;
  std::string target;  ///< "torch.ops.aten.conv1d.default"
  std::string module;  ///< dotted path of the module that made the call
  std::vector<NamedArgument> arguments;
  std::vector<Result> results;
  std::vector<Slot> last_uses;  ///< slots that nothing reads afterwards
  Action action;
};

struct Value {
  std::string name;
  ValueType type = ValueType::kTensor;
};

/// Nodes in the order in which they run. Each slot is filled once, before it is read.
struct Function {
  std::string name;  ///< empty for that of the program
  std::vector<Slot> inputs;
  std::vector<Node> nodes;
  std::vector<Argument> outputs;
  std::vector<Value> values;  ///< values by slot
};

/// The kind of an input of the program's function.
struct Input {
  enum class Kind : uint8_t { kParameter, kBuffer, kConstant, kUser };

  Kind kind = Kind::kUser;
  std::string name;  ///< dotted path; of users' inputs the name in the program
  /// Fields of users' inputs:
  ValueType type = ValueType::kTensor;
  std::optional<at::ScalarType> dtype;  ///< dtype of a tensor
  std::vector<LinearSize> sizes;        ///< sizes of a tensor; of an integer, that itself
  std::optional<c10::IValue> fixed;     ///< the only value it may have; it has no slot
};

/// The use of a result of the program's function.
struct Output {
  enum class Kind : uint8_t { kUser, kBuffer, kInput };

  Kind kind = Kind::kUser;
  std::string name;  ///< name of the buffer or input that it is copied into
};

/// Both ends are allowed.
struct Range {
  int64_t least;
  int64_t most;
};

struct ExportedProgram {
  std::string file;
  std::string torch_version;  ///< which wrote it
  Function function;
  std::vector<Input> inputs;    ///< one for each of `function`
  std::vector<Output> outputs;  ///< one for each of `function`
  Structure arguments;          ///< a tuple of those by position and a dictionary of those by name
  Structure results;
  std::vector<std::string> argument_names;  ///< names of arguments of Python's forward
  std::map<std::string, Range> ranges;      ///< ranges of symbols
  std::vector<std::string> modules;         ///< dotted paths
  std::optional<at::Device> device;         ///< it was exported on; none if it names none
};

/// Reads models/model.json of an archive. Throws `CheckpointError`, which names file, node and
/// remedy, for malformed JSON, for versions and kinds that are unknown here (`schema_version`,
/// kinds of arguments), and for refused programs: programs on several devices, custom objects,
/// exports with a backward pass. Actions are not bound yet.
ExportedProgram read_program(const core::JsonReader& json);

}  // namespace smp::exported
