// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <torch/arg.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "smp/detail/as_ivalue.h"
#include "smp/detail/structure.h"
#include "smp/export.h"

namespace smp {

/// A size of inputs that may differ from call to call, as Python's torch.export.Dim. Axes that have
/// one of the same name have the same size in each call.
struct ExportDim {
  ExportDim(std::string name) : name_(std::move(name)) {}  // NOLINT(google-explicit-constructor)

  TORCH_ARG(std::string, name);
  /// The least and the largest size, both allowed.
  TORCH_ARG(int64_t, min) = 1;
  TORCH_ARG(int64_t, max) = std::numeric_limits<int64_t>::max();
};

/// Options of `export_program`.
struct ExportProgramOptions {
  /// The dynamic axes of each tensor among the arguments, in their order; those behind the end have
  /// none. `{{{0, batch}}, {{0, batch}, {1, "time"}}}`.
  using Shapes = std::vector<std::map<int64_t, ExportDim>>;
  TORCH_ARG(Shapes, dynamic_shapes);

  /// Names of the arguments, by which Python may pass them. None: "x", or "x0", "x1" ...
  TORCH_ARG(std::vector<std::string>, argument_names);
};

/// Values of an exported program that are no parameters or buffers, and do not follow from its
/// inputs: they stay as they were at the export.
struct ExportedParts {
  /// How many operators it calls.
  size_t operators = 0;
  /// Tensors that the model made from numbers of its own, or holds unregistered: a name in the
  /// program, and a description.
  std::vector<std::string> constants;
  /// Numbers among the arguments of operators: "blocks.0.drop: aten::dropout(p=0.1)".
  std::vector<std::string> numbers;
  /// Parameters and buffers whose names have a word of Python's language in them, such as
  /// "in.weight", and their names in the program: "in_.weight".
  std::map<std::string, std::string> renamed;
};

namespace detail {

/// Calls a program on tensors in place of those in its arguments.
using ExportedForward = std::function<c10::IValue(const std::vector<at::Tensor>&)>;

SMP_API ExportedParts export_program(const std::string& path, const torch::nn::Module& module,
                                     const ExportedForward& forward,
                                     const std::vector<c10::IValue>& arguments,
                                     const ExportProgramOptions& options);

}  // namespace detail

/// Writes the work of `forward(inputs...)` as a program that Python loads by torch.export.load, and
/// `load_exported` here: for AOTInductor, ONNX, torch.compile, or to go on training there. `module`
/// has the parameters and buffers, which are written under their names, tied ones once; `forward`
/// calls it. As torch.export, in training form: operators stay whole, buffers are written in place,
/// and the program is that of the mode that the module is in. Needs no `init`. docs/exported.md
///
/// \code
///   model->eval();
///   const smp::ExportDim batch("batch");
///   smp::export_program("model.pt2", *model, [&](torch::Tensor x) { return model->forward(x); },
///                       std::make_tuple(x),
///                       smp::ExportProgramOptions().dynamic_shapes({{{0, batch}}}));
/// \endcode
///
/// `inputs` are tensors, numbers and strings, also in containers, tuples and structs with
/// SMP_FIELDS, and of these the program takes tensors of any content; numbers and strings are part
/// of it. Their tensors are stored as the program's sample inputs. `forward` may return the same
/// kinds. It runs on tensors without data, once, and with dynamic sizes once for each of some
/// sizes; buffers and random generators are afterwards as before.
///
/// Throws `CaptureError` for code that cannot be captured (docs/capture.md), and for parts that a
/// program in Python cannot have: leaf modules, torch::autograd::grad, operators that are not
/// libtorch's, operators that change with a dynamic size; `UsageError` for inputs or options that
/// do not fit and inside of a step; `CheckpointError` where the file cannot be written, which
/// leaves the old file.
template <class Forward, class... Inputs>
ExportedParts export_program(const std::string& path, const torch::nn::Module& module,
                             Forward&& forward, const std::tuple<Inputs...>& inputs,
                             const ExportProgramOptions& options = {}) {
  const auto call = [&](const std::vector<at::Tensor>& tensors) {
    std::tuple<Inputs...> own = inputs;
    size_t next = 0;
    detail::for_each_tensor(own, [&](at::Tensor& tensor) {
      if (tensor.defined()) tensor = tensors[next++];
    });
    return detail::as_ivalue(std::apply(forward, own));
  };
  std::vector<c10::IValue> arguments;
  std::apply([&](const auto&... input) { (arguments.push_back(detail::as_ivalue(input)), ...); },
             inputs);
  return detail::export_program(path, module, call, arguments, options);
}

/// The same of `module->forward(inputs...)`.
template <class Net, class... Inputs>
ExportedParts export_program(const std::string& path, const torch::nn::ModuleHolder<Net>& module,
                             const std::tuple<Inputs...>& inputs,
                             const ExportProgramOptions& options = {}) {
  const std::shared_ptr<Net> net = module.ptr();
  const auto forward = [&](const Inputs&... input) { return net->forward(input...); };
  return export_program(path, *net, forward, inputs, options);
}

}  // namespace smp
