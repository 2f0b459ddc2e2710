// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/ivalue.h>
#include <torch/arg.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <map>
#include <memory>
#include <ostream>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "smp/export.h"

namespace smp {

/// Programs that torch.export.save wrote in Python, of one model.
struct ExportedPrograms {
  /// The file of the model exported after `model.train()`; empty for none.
  TORCH_ARG(std::string, train);
  /// That of the same model exported after `model.eval()`; empty for none. May be the same file,
  /// where nothing in the model depends on its mode.
  TORCH_ARG(std::string, eval);
};

/// A model written in Python: see `load_exported`.
class SMP_API ExportedModuleImpl : public torch::nn::Module {
 public:
  /// Arguments by their names in Python.
  using Named = std::map<std::string, c10::IValue>;

  /// Loads the programs. Throws `CheckpointError` as `load_exported` does.
  explicit ExportedModuleImpl(const ExportedPrograms& programs);
  ~ExportedModuleImpl() override;

  /// Runs the program of the module's mode, operator by operator, as libtorch code that calls them
  /// would: gradients flow, buffers are written as in Python, random operators draw from the
  /// default generator, or in a step from its streams.
  ///
  /// Takes what Python's `forward` was exported with, by position, and the last argument may be a
  /// `Named` of those by name: tensors, numbers, strings, `c10::IValue()` for None, and for tuples,
  /// lists and dictionaries `std::tuple`, `c10::List` or `std::vector`, and `c10::Dict`. Returns a
  /// tensor, number, tuple, list or dictionary of what Python's `forward` returns:
  /// `model(x).toTensor()`, `model(x).toTuple()->elements()[0].toTensor()`,
  /// `model(x).toGenericDict().at("logits").toTensor()`. Throws `UsageError` for arguments of other
  /// structures, types, or sizes that the export did not declare dynamic.
  template <class... Arguments>
  c10::IValue forward(Arguments&&... arguments) {
    std::vector<c10::IValue> values;
    Named named;
    const auto take = [&](auto&& argument) {
      using T = std::decay_t<decltype(argument)>;
      if constexpr (std::is_same_v<T, Named>) {
        named = std::forward<decltype(argument)>(argument);
      } else {
        values.emplace_back(std::forward<decltype(argument)>(argument));
      }
    };
    (take(std::forward<Arguments>(arguments)), ...);
    return call(values, named);
  }

  /// The same, with the arguments in lists.
  c10::IValue call(const std::vector<c10::IValue>& arguments, const Named& named = {});

  /// Chooses the program of that mode. Throws `UsageError` if it was not loaded.
  void train(bool on = true) override;

  void pretty_print(std::ostream& stream) const override;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

/// Holds a loaded module, as what TORCH_MODULE makes; that has no call for a `forward` that is a
/// template.
class ExportedModule : public torch::nn::ModuleHolder<ExportedModuleImpl> {
 public:
  using torch::nn::ModuleHolder<ExportedModuleImpl>::ModuleHolder;
  using Impl = ExportedModuleImpl;

  /// Calls `ExportedModuleImpl::forward`.
  template <class... Arguments>
  c10::IValue operator()(Arguments&&... arguments) {
    return (*this)->forward(std::forward<Arguments>(arguments)...);
  }
};

/// Loads a model that Python wrote by `torch.export.save(torch.export.export(model, ...), path)`
/// (torch 2.9 and later), to train it or to run it. It is a module like any other: its parameters
/// and buffers have their names in Python, in a tree of submodules as there, tied ones are one
/// tensor, and a `DistributedModel` takes it. Needs no `init`. docs/exported.md
///
/// The program was exported in training mode: the module is in that mode, and stays in it.
///
/// Throws `CheckpointError` for a file that is damaged, of another version of the format, or uses
/// what cannot be loaded, which it names. Nothing that is pickled in the file is read, and no code
/// in it is evaluated; it names operators, which `forward` calls.
SMP_API ExportedModule load_exported(const std::string& path);

/// The same of one model in two modes, or in evaluation alone: `model->train()` and `eval()`
/// choose. Parameters and buffers are those of the program of training, where there is one. Throws
/// `CheckpointError` for programs of different models, and `UsageError` if both names are empty.
SMP_API ExportedModule load_exported(const ExportedPrograms& programs);

}  // namespace smp
