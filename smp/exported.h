// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/ivalue.h>
#include <torch/arg.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>
#include <torch/ordered_dict.h>

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
  /// Takes the arguments with which Python's `forward` was exported, by position; the last argument
  /// may be a `Named` of those by name: tensors, numbers, strings, `c10::IValue()` for None, and
  /// for tuples, lists and dictionaries `std::tuple`, `c10::List` or `std::vector`, and
  /// `c10::Dict`. Returns a tensor, number, tuple, list or dictionary, as Python's `forward` does:
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

  /// The path of the program of the module's mode, as it was given.
  const std::string& file() const;

  void pretty_print(std::ostream& stream) const override;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

/// Holds a loaded module, like a holder of TORCH_MODULE, which has no call for a `forward` that is
/// a template.
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
/// parts that cannot be loaded, which it names. Nothing that is pickled in the file is read, and no
/// code in it is evaluated; it names operators, which `forward` calls.
SMP_API ExportedModule load_exported(const std::string& path);

/// The same of one model in two modes, or in evaluation alone: `model->train()` and `eval()`
/// choose. Parameters and buffers are those of the program of training, where there is one. Throws
/// `CheckpointError` for programs of different models, and `UsageError` if both names are empty.
SMP_API ExportedModule load_exported(const ExportedPrograms& programs);

/// Writes a copy of the file `program` to `path`, in which parameters and buffers have the values
/// of `state`, by name; nothing else is changed. Python's torch.export.load, `load_exported` and
/// other readers of such files take it. Values are converted to the program's types; names that it
/// lacks are left out. Needs no `init`, and is not collective:
/// \code
///   const auto state = model->state_dict(/*gather_to_rank0=*/true);
///   if (smp::rank() == 0) smp::save_exported("model.pt2", state, "trained.pt2");
/// \endcode
///
/// Throws `CheckpointError` for a file that cannot be loaded, where `state` lacks a parameter or
/// buffer or has it in another shape, and where `path` cannot be written; it may be `program`
/// itself, and only ever holds a complete file.
SMP_API void save_exported(const std::string& program,
                           const torch::OrderedDict<std::string, at::Tensor>& state,
                           const std::string& path);

/// The same for a module that this process has whole: the program of its mode, which is read again
/// from its file, with the module's parameters and buffers.
SMP_API void save_exported(const ExportedModule& model, const std::string& path);

}  // namespace smp
