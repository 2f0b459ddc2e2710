// SPDX-License-Identifier: Apache-2.0
#include "smp/export_program.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cctype>
#include <memory>
#include <set>

#include "core/check.h"
#include "core/text.h"
#include "exported/export_request.h"
#include "exported/structure.h"
#include "exported/write_program.h"
#include "graph/absent.h"
#include "graph/live_results.h"
#include "graph/recording.h"
#include "graph/tracer.h"

namespace smp::detail {
namespace {

using exported::ExportRequest;
using exported::SizeGrid;

constexpr const char* kStep = "smp::export_program";

std::vector<at::Tensor> tensors_of(const std::vector<c10::IValue>& values) {
  std::vector<c10::IValue> leaves;
  for (const c10::IValue& value : values) exported::structure_of(value, leaves);
  std::vector<at::Tensor> tensors;
  for (const c10::IValue& leaf : leaves) {
    if (leaf.isTensor()) tensors.push_back(leaf.toTensor());
  }
  return tensors;
}

void check_leaves(const std::vector<c10::IValue>& values, bool are_results) {
  std::vector<c10::IValue> leaves;
  for (const c10::IValue& value : values) exported::structure_of(value, leaves);
  for (const c10::IValue& leaf : leaves) {
    const bool fits = leaf.isTensor() || leaf.isNone() || leaf.isBool() || leaf.isInt() ||
                      leaf.isDouble() || (leaf.isString() && !are_results);
    SMP_CHECK_WITH(UsageError, fits, kStep, ": ", are_results ? "a result" : "an argument",
                   " is or holds a value of type ", leaf.tagKind(),
                   ", which exported programs do not take or return. Use tensors, numbers, and "
                   "tuples, lists and dictionaries of them");
  }
}

/// "torch::nn::LinearImpl": "torch.nn.LinearImpl". Marks that the format gives a meaning are left
/// out.
std::string type_of(const torch::nn::Module& module) {
  std::string text;
  const std::string name = module.name();
  for (size_t i = 0; i < name.size(); ++i) {
    const bool is_word = std::isalnum(static_cast<unsigned char>(name[i])) != 0 || name[i] == '_';
    if (name.compare(i, 2, "::") == 0) {
      text += '.';
      ++i;
    } else {
      text += is_word ? name[i] : '_';
    }
  }
  return text;
}

void add_modules(const torch::nn::Module& module, const std::string& path, ExportRequest& request) {
  request.modules.emplace_back(path, type_of(module));
  for (const auto& child : module.named_children()) {
    add_modules(*child.value(), path.empty() ? child.key() : path + "." + child.key(), request);
  }
}

void check_has_data(const std::string& name, const at::Tensor& tensor) {
  const char* why = graph::is_deferred(tensor) ? "has no data before the first step"
                    : graph::is_absent(tensor) ? "is on another rank"
                    : tensor.is_meta()         ? "is on the meta device"
                    : !tensor.has_storage()    ? "is no dense tensor"
                                               : nullptr;
  SMP_CHECK_WITH(
      UsageError, why == nullptr, kStep, ": \"", core::printable(name, 100), "\" ", why,
      ". Export a module that this process has whole, with its data: call "
      "smp::materialize(*module) after delayed construction, and copy the state_dict() of "
      "a DistributedModel into a module of its own");
}

void add_tensors(const torch::nn::Module& module, ExportRequest& request,
                 graph::TensorTable& table) {
  const auto add = [&](const auto& named, bool is_parameter) {
    for (const auto& item : named) {
      check_has_data(item.key(), item.value());
      table.add(is_parameter ? graph::ValueKind::kParameter : graph::ValueKind::kBuffer, item.key(),
                item.value());
      request.tensors.push_back({item.key(), is_parameter, item.value()});
    }
  };
  add(module.named_parameters(), true);
  add(module.named_buffers(), false);
}

bool is_name(const std::string& text) {
  const auto is_word = [](char c) {
    return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_';
  };
  return !text.empty() && std::isdigit(static_cast<unsigned char>(text[0])) == 0 &&
         std::all_of(text.begin(), text.end(), is_word);
}

std::vector<std::string> names_of(const std::vector<c10::IValue>& arguments,
                                  const ExportProgramOptions& options) {
  std::vector<std::string> names = options.argument_names();
  if (names.empty()) {
    for (size_t i = 0; i < arguments.size(); ++i) {
      names.push_back(arguments.size() == 1 ? "x" : "x" + std::to_string(i));
    }
  }
  const bool are_unique = std::set<std::string>(names.begin(), names.end()).size() == names.size();
  const bool fit = names.size() == arguments.size() && are_unique &&
                   std::all_of(names.begin(), names.end(), is_name);
  SMP_CHECK_WITH(UsageError, fit, kStep, ": argument_names has ", names.size(), " names for ",
                 arguments.size(),
                 " arguments, or one that Python does not take. Give each a name "
                 "of its own, of letters, digits and _");
  return names;
}

/// Adds the dynamic sizes, as numbers of the inputs' axes.
class DynamicSizes {
 public:
  DynamicSizes(const std::vector<at::Tensor>& inputs, const ExportProgramOptions& options)
      : inputs_(inputs) {
    const auto& shapes = options.dynamic_shapes();
    SMP_CHECK_WITH(UsageError, shapes.size() <= inputs.size(), kStep,
                   ": dynamic_shapes is given for ", shapes.size(), " tensors, and there are ",
                   inputs.size(), " among the arguments. Give one for each tensor, in their order");
    for (size_t i = 0; i < shapes.size(); ++i) {
      for (const auto& [axis, dim] : shapes[i]) add(i, axis, dim);
    }
    SMP_CHECK_WITH(UsageError, ranges_.size() <= kMostSizes, kStep, ": there are ", ranges_.size(),
                   " dynamic sizes, and there may be ", kMostSizes,
                   ". Leave some fixed, or give axes with one size the same name");
  }

  void move_to(ExportRequest& request) && {
    request.grid = SizeGrid(ranges_);
    request.sizes = std::move(ranges_);
    request.axes = std::move(axes_);
  }

 private:
  static constexpr size_t kMostSizes = 3;  // 27 captures

  void add(size_t input, int64_t axis, const ExportDim& dim) {
    const at::Tensor& tensor = inputs_[input];
    SMP_CHECK_WITH(UsageError, axis >= 0 && axis < tensor.dim(), kStep,
                   ": dynamic_shapes has axis ", axis, " of a tensor of shape ", tensor.sizes(),
                   ". Count axes from 0");
    const int64_t given = tensor.size(axis);
    const bool fits =
        given >= 2 && dim.min() <= given && given <= dim.max() && dim.min() < dim.max();
    SMP_CHECK_WITH(UsageError, fits, kStep, ": dynamic size \"", dim.name(), "\" is ", given,
                   " in the inputs, and may be ", dim.min(), " to ", dim.max(),
                   ". Give inputs of a size of at least 2 in a range of several");
    const auto [known, is_new] = numbers_.emplace(dim.name(), ranges_.size());
    if (is_new) ranges_.push_back({given, dim.min(), dim.max()});
    const SizeGrid::Range& range = ranges_[known->second];
    SMP_CHECK_WITH(UsageError, range.given == given, kStep, ": dynamic size \"", dim.name(),
                   "\" is ", range.given, " in one tensor and ", given,
                   " in another. Axes of one name have one size: give these two names");
    axes_.push_back({input, axis, known->second});
  }

  const std::vector<at::Tensor>& inputs_;
  std::map<std::string, size_t> numbers_;
  std::vector<SizeGrid::Range> ranges_;
  std::vector<ExportRequest::Axis> axes_;
};

/// The inputs of a capture: those given, or others of the same layout whose content means nothing.
std::vector<at::Tensor> inputs_at(size_t capture, const std::vector<at::Tensor>& given,
                                  const ExportRequest& request) {
  std::vector<at::Tensor> inputs = given;
  if (capture == 0) return inputs;
  const std::vector<int64_t> dynamic = request.grid.sizes(capture);
  for (size_t i = 0; i < given.size(); ++i) {
    std::vector<int64_t> sizes = given[i].sizes().vec();
    for (const auto& [input, axis, size] : request.axes) {
      if (input == i) sizes[axis] = dynamic[size];
    }
    if (sizes == given[i].sizes()) continue;
    const auto format = given[i].suggest_memory_format();
    SMP_CHECK_WITH(UsageError, given[i].is_contiguous(format), kStep,
                   ": a tensor with a dynamic size is a view with strides ", given[i].strides(),
                   ", which say nothing of those at other sizes. Pass tensor.contiguous()");
    inputs[i] = at::empty(sizes, given[i].options(), format);
  }
  return inputs;
}

/// Runs the program once, on tensors without data.
graph::TraceResult trace(const graph::TensorTable& table, const std::vector<at::Tensor>& inputs,
                         const ExportedForward& forward, c10::IValue& result) {
  graph::TraceOptions options;
  options.step_name = kStep;
  options.table = &table;
  const auto call = [&](const std::vector<at::Tensor>& tensors) {
    result = forward(tensors);
    check_leaves({result}, /*are_results=*/true);
    return tensors_of({result});
  };
  graph::TraceResult trace = graph::Tracer(options).run(inputs, call);
  graph::give_data_to_constants(*trace.recorded, trace.kept);
  return trace;
}

/// Captures the program at the sizes of the grid.
void capture(const graph::TensorTable& table, const std::vector<at::Tensor>& inputs,
             const ExportedForward& forward, ExportRequest& request) {
  for (size_t i = 0; i < request.grid.captures(); ++i) {
    const std::vector<at::Tensor> at_sizes = inputs_at(i, inputs, request);
    c10::IValue result;
    graph::TraceResult run = trace(table, at_sizes, forward, result);
    // A table that the module makes once and keeps is a constant from the next run on.
    const bool keeps = i == 0 && !run.left.empty();
    if (keeps) run = trace(table, at_sizes, forward, result);
    if (i == 0) request.result = result;
    request.graphs.push_back(std::move(run.recorded));
  }
}

}  // namespace

ExportedParts export_program(const std::string& path, const torch::nn::Module& module,
                             const ExportedForward& forward,
                             const std::vector<c10::IValue>& arguments,
                             const ExportProgramOptions& options) {
  SMP_CHECK_WITH(UsageError, graph::Tracer::current() == nullptr,
                 "smp::export_program was called inside a step function. Call it before or after "
                 "the step");
  check_leaves(arguments, /*are_results=*/false);
  const std::vector<at::Tensor> inputs = tensors_of(arguments);
  ExportRequest request;
  request.file = path;
  request.arguments = arguments;
  request.argument_names = names_of(arguments, options);
  graph::TensorTable table;
  add_modules(module, "", request);
  add_tensors(module, request, table);
  DynamicSizes(inputs, options).move_to(request);
  capture(table, inputs, forward, request);
  const exported::ExportReport report = exported::write_program(request, path);
  return {report.nodes, report.constants, report.numbers, report.renamed};
}

}  // namespace smp::detail
