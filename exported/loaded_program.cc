// SPDX-License-Identifier: Apache-2.0
#include "exported/loaded_program.h"

#include <c10/core/ScalarType.h>

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "core/check.h"
#include "core/json.h"
#include "core/text.h"
#include "exported/program_json.h"
#include "graph/intercept.h"

namespace smp::exported {
namespace {

using Kind = Input::Kind;

std::string sizes_of(const Input& input) {
  std::string text;
  for (const LinearSize& size : input.sizes) text += (text.empty() ? "" : ", ") + size.to_string();
  return "[" + text + "]";
}

bool is_same(const c10::IValue& value, const c10::IValue& expected) {
  return value.tagKind() == expected.tagKind() && !value.isTensor() && value == expected;
}

std::string shown(const Range& range) {
  using Limits = std::numeric_limits<int64_t>;
  if (range.most == Limits::max()) return std::to_string(range.least) + " and more";
  if (range.least == Limits::min()) return std::to_string(range.most) + " and less";
  return c10::str(range.least, " to ", range.most);
}

std::string shown(const c10::IValue& value) {
  if (value.isString()) return "\"" + core::printable(value.toStringRef(), 60) + "\"";
  return value.isTensor() ? "a tensor" : c10::str(value);
}

}  // namespace

LoadedProgram::LoadedProgram(const std::string& path) {
  Archive archive(path);
  const nlohmann::json json = core::parse_untrusted(archive.program());
  program_ = read_program(program_json(json, path));
  bind_actions(path, program_.function);
  const auto stored = archive.tensors();
  for (const Input& input : program_.inputs) {
    if (input.kind == Kind::kUser) continue;
    const auto found = stored.find(input.name);
    SMP_CHECK_WITH(CheckpointError, found != stored.end(), "exported program \"",
                   core::printable(path), "\" has no data for \"", core::printable(input.name, 100),
                   "\". The file is damaged: write it again by torch.export.save");
    const auto& [tensor, record, requires_grad] = found->second;
    if (input.kind == Kind::kConstant) {
      constants_[input.name] = tensor;
      continue;
    }
    SMP_CHECK_WITH(CheckpointError,
                   !requires_grad || at::isFloatingType(tensor.scalar_type()) ||
                       at::isComplexType(tensor.scalar_type()),
                   "exported program \"", core::printable(path), "\": \"",
                   core::printable(input.name, 100), "\" requires a gradient and has type ",
                   tensor.scalar_type(),
                   ", which has none. The file is damaged: write it again by torch.export.save");
    by_name_[input.name] = tensors_.size();
    tensors_.push_back({input.name, input.kind == Kind::kParameter, tensor, record, requires_grad});
  }
}

void LoadedProgram::share_tensors(const LoadedProgram& other) {
  for (ModelTensor& own : tensors_) {
    const auto found = other.by_name_.find(own.name);
    const bool fits = found != other.by_name_.end() &&
                      other.tensors_[found->second].tensor.sizes() == own.tensor.sizes() &&
                      other.tensors_[found->second].tensor.dtype() == own.tensor.dtype();
    SMP_CHECK_WITH(
        CheckpointError, fits, "exported programs \"", core::printable(other.program_.file),
        "\" and \"", core::printable(program_.file), "\" are not of one model: the first has no \"",
        core::printable(own.name, 100), "\" of type ", own.tensor.scalar_type(), " and shape ",
        own.tensor.sizes(), ". Export the same model after train() and after eval()");
    own.tensor = other.tensors_[found->second].tensor;
  }
}

/// Binds arguments to parameters by Python's rules: a tuple of those by position and a dictionary.
c10::IValue LoadedProgram::arguments_of(const std::vector<c10::IValue>& arguments,
                                        const Named& named) const {
  const Structure& by_position = program_.arguments.children[0];
  const Structure& by_name = program_.arguments.children[1];
  const size_t positions = by_position.children.size();
  std::vector<std::string> names = program_.argument_names;
  if (names.size() != positions + by_name.children.size()) {
    names.assign(positions, "");
    for (const c10::IValue& key : by_name.keys) {
      names.push_back(key.isString() ? key.toStringRef() : "");
    }
  }
  std::string signature;
  for (const std::string& name : names) {
    signature += (signature.empty() ? "" : ", ") + core::printable(name.empty() ? "?" : name, 60);
  }
  SMP_CHECK_WITH(UsageError, arguments.size() <= names.size(), "exported program \"",
                 core::printable(program_.file), "\" takes ", names.size(), " arguments (",
                 signature, "), got ", arguments.size(), ". Pass those that it was exported with");
  Named bound;
  std::vector<c10::IValue> values(positions);
  std::vector<bool> is_given(positions, false);
  const auto give = [&](const std::string& name, size_t place, const c10::IValue& value) {
    const bool is_new = place < positions ? !is_given[place] : bound.emplace(name, value).second;
    SMP_CHECK_WITH(UsageError, is_new, "exported program \"", core::printable(program_.file),
                   "\" got its argument \"", core::printable(name, 60),
                   "\" twice. Pass it by position or by name");
    if (place >= positions) return;
    is_given[place] = true;
    values[place] = value;
  };
  for (size_t i = 0; i < arguments.size(); ++i) give(names[i], i, arguments[i]);
  for (const auto& [name, value] : named) {
    const auto found = std::find(names.begin(), names.end(), name);
    SMP_CHECK_WITH(UsageError, found != names.end() && !name.empty(), "exported program \"",
                   core::printable(program_.file), "\" has no argument \"",
                   core::printable(name, 60), "\": it takes (", signature,
                   "), those that it was exported with");
    give(name, static_cast<size_t>(found - names.begin()), value);
  }
  const bool complete =
      std::all_of(is_given.begin(), is_given.end(), [](bool given) { return given; }) &&
      bound.size() == by_name.children.size();
  SMP_CHECK_WITH(UsageError, complete, "exported program \"", core::printable(program_.file),
                 "\" takes (", signature,
                 "), and not all of these were passed. Pass each, also those that have "
                 "defaults in Python");
  c10::impl::GenericDict dictionary(c10::StringType::get(), c10::AnyType::get());
  for (const auto& [name, value] : bound) dictionary.insert_or_assign(name, value);
  return c10::ivalue::Tuple::create(
      {c10::ivalue::Tuple::create(std::move(values)), c10::IValue(std::move(dictionary))});
}

/// A model that was cast as a whole takes floating point inputs of its own type.
bool LoadedProgram::is_of_type(const at::Tensor& tensor, at::ScalarType expected) const {
  if (tensor.scalar_type() == expected) return true;
  if (!at::isFloatingType(expected)) return false;
  const auto floating = std::find_if(
      tensors_.begin(), tensors_.end(),
      [](const ModelTensor& candidate) { return candidate.tensor.is_floating_point(); });
  return floating != tensors_.end() && floating->tensor.scalar_type() == tensor.scalar_type();
}

void LoadedProgram::check_input(const Input& input, const Leaf& leaf) const {
  if (input.fixed) {
    SMP_CHECK_WITH(UsageError, is_same(leaf.value, *input.fixed), "exported program \"",
                   core::printable(program_.file), "\": argument ", leaf.place, " is ",
                   shown(leaf.value), ", and the program was exported with ", shown(*input.fixed),
                   ", which is part of it. Pass that value, or export again");
    return;
  }
  if (input.type != ValueType::kTensor) {
    const bool is_whole = input.type == ValueType::kReal && leaf.value.isInt();
    SMP_CHECK_WITH(UsageError, is_whole || is_of(leaf.value, input.type), "exported program \"",
                   core::printable(program_.file), "\": argument ", leaf.place,
                   ": expected a number, ", to_string(input.type), ", got a value of type ",
                   leaf.value.tagKind(), ". Pass what the program was exported with");
    return;
  }
  const bool fits = leaf.value.isTensor() && leaf.value.toTensor().defined() &&
                    is_of_type(leaf.value.toTensor(), *input.dtype) &&
                    leaf.value.toTensor().dim() == static_cast<int64_t>(input.sizes.size());
  const std::string got =
      leaf.value.isTensor() && leaf.value.toTensor().defined()
          ? c10::str(leaf.value.toTensor().scalar_type(), " ", leaf.value.toTensor().sizes())
          : "a value of type " + leaf.value.tagKind();
  SMP_CHECK_WITH(UsageError, fits, "exported program \"", core::printable(program_.file),
                 "\": argument ", leaf.place, ": expected a tensor ", *input.dtype, " ",
                 sizes_of(input), ", got ", got, ". Pass what the program was exported with");
}

/// Sizes, and integers, that were fixed at the export have their value; those that were dynamic fit
/// each other and their range.
void LoadedProgram::check_sizes(const std::vector<Leaf>& leaves) const {
  struct Size {
    const LinearSize& expected;
    int64_t got;
    const Leaf& leaf;
    size_t axis;
  };
  std::vector<Size> sizes;
  size_t next = 0;
  Symbols symbols;
  for (const Input& input : program_.inputs) {
    if (input.kind != Kind::kUser) continue;
    const Leaf& leaf = leaves[next++];
    for (size_t axis = 0; axis < input.sizes.size(); ++axis) {
      const int64_t size = leaf.value.isInt()
                               ? leaf.value.toInt()
                               : leaf.value.toTensor().size(static_cast<int64_t>(axis));
      sizes.push_back({input.sizes[axis], size, leaf, axis});
      const auto solved = input.sizes[axis].solve(symbols, size);
      if (solved) symbols.insert(*solved);
    }
  }
  for (const Size& size : sizes) {
    const auto expected = size.expected.evaluate(symbols);
    SMP_CHECK_WITH(UsageError, expected && *expected == size.got, "exported program \"",
                   core::printable(program_.file), "\": argument ", size.leaf.place,
                   size.leaf.value.isInt()
                       ? c10::str(" is ", size.got)
                       : c10::str(" has size ", size.got, " on axis ", size.axis),
                   ", expected ", size.expected.to_string(),
                   expected && !size.expected.terms.empty()
                       ? ", which is " + std::to_string(*expected) + " here"
                       : "",
                   ". Only sizes that the export declared in dynamic_shapes may differ: export "
                   "with torch.export.Dim for this one");
  }
  for (const auto& [symbol, value] : symbols) {
    const auto range = program_.ranges.find(symbol);
    if (range == program_.ranges.end()) continue;
    const bool fits = value >= range->second.least && value <= range->second.most;
    SMP_CHECK_WITH(UsageError, fits, "exported program \"", core::printable(program_.file),
                   "\": its dynamic size ", symbol, " is ", value,
                   " for these arguments, and it was exported for ", shown(range->second),
                   ". Pass a batch in that range, or export with another");
  }
}

at::Device LoadedProgram::device_for(const std::vector<Leaf>& leaves) const {
  if (!tensors_.empty()) return tensors_.front().tensor.device();
  for (const Leaf& leaf : leaves) {
    if (leaf.value.isTensor()) return leaf.value.toTensor().device();
  }
  return at::kCPU;
}

void LoadedProgram::move_constants(at::Device device) {
  const graph::UninterceptedScope scope;
  for (auto& constant : constants_) {
    if (constant.second.device() != device) constant.second = constant.second.to(device);
  }
}

std::vector<c10::IValue> LoadedProgram::inputs_of(const std::vector<Leaf>& leaves) const {
  std::vector<c10::IValue> inputs;
  size_t next = 0;
  for (size_t i = 0; i < program_.inputs.size(); ++i) {
    const Input& input = program_.inputs[i];
    if (input.kind == Kind::kConstant) {
      inputs.emplace_back(constants_.at(input.name));
    } else if (input.kind != Kind::kUser) {
      inputs.emplace_back(tensors_[by_name_.at(input.name)].tensor);
    } else {
      const c10::IValue& value = leaves[next++].value;
      const bool is_real = input.type == ValueType::kReal && value.isInt();
      inputs.push_back(is_real ? c10::IValue(static_cast<double>(value.toInt())) : value);
    }
  }
  return inputs;
}

/// Copies results into buffers and inputs, as Python's module of the program does at its end, and
/// returns the others.
c10::IValue LoadedProgram::finish(const std::vector<c10::IValue>& results,
                                  const std::vector<c10::IValue>& inputs) const {
  std::vector<c10::IValue> leaves;
  for (size_t i = 0; i < results.size(); ++i) {
    const Output& output = program_.outputs[i];
    if (output.kind == Output::Kind::kUser) {
      leaves.push_back(results[i]);
    } else if (output.kind == Output::Kind::kBuffer) {
      tensors_[by_name_.at(output.name)].tensor.copy_(results[i].toTensor());
    } else {
      for (size_t k = 0; k < inputs.size(); ++k) {
        const Input& input = program_.inputs[k];
        if (input.kind != Kind::kUser || input.name != output.name) continue;
        inputs[k].toTensor().copy_(results[i].toTensor());
      }
    }
  }
  return unflatten(program_.results, leaves);
}

c10::IValue LoadedProgram::call(const std::vector<c10::IValue>& arguments, const Named& named,
                                const Autocast& autocast) {
  const c10::IValue given = arguments_of(arguments, named);
  const auto parts = given.toTupleRef().elements();
  std::vector<Leaf> leaves;
  const auto& positional = parts[0].toTupleRef().elements();
  for (size_t i = 0; i < positional.size(); ++i) {
    const bool is_named = i < program_.argument_names.size();
    flatten(program_.arguments.children[0].children[i], positional[i],
            is_named ? program_.argument_names[i] : std::to_string(i), leaves);
  }
  flatten(program_.arguments.children[1], parts[1], "", leaves);
  size_t next = 0;
  for (const Input& input : program_.inputs) {
    if (input.kind == Kind::kUser) check_input(input, leaves[next++]);
  }
  check_sizes(leaves);
  Environment environment;
  environment.file = program_.file;
  if (program_.device) environment.exported_on = program_.device->type();
  environment.device = device_for(leaves);
  move_constants(environment.device);
  if (!tensors_.empty()) {
    environment.root.parameter = tensors_.front().tensor;
    environment.root.parameter_name = tensors_.front().name;
  }
  environment.autocast = autocast;
  const std::vector<c10::IValue> inputs = inputs_of(leaves);
  return finish(run_function(program_.function, inputs, environment), inputs);
}

}  // namespace smp::exported
