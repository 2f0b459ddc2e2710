// SPDX-License-Identifier: Apache-2.0
#include "exported/write_program.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/jit_type.h>
#include <ATen/ops/empty.h>
#include <c10/core/Storage.h>
#include <caffe2/serialize/inline_container.h>
#include <torch/csrc/jit/serialization/pickler.h>
#include <torch/version.h>

#include <algorithm>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "core/check.h"
#include "core/text.h"
#include "exported/archive_writer.h"
#include "exported/export_plan.h"
#include "exported/program_json.h"
#include "exported/structure.h"
#include "exported/write_function.h"
#include "exported/write_values.h"
#include "graph/content.h"
#include "graph/visit.h"

namespace smp::exported {
namespace {

using graph::Graph;
using graph::Operator;
using Json = nlohmann::json;

// ---------------------------------------------------------------------------------------------
// The captures

/// Without the sizes, and the requirement of a gradient, which follows from its operator.
bool is_alike(const graph::Value& a, const graph::Value& b) {
  return a.kind == b.kind && a.name == b.name && a.alias_set == b.alias_set &&
         a.meta.dtype == b.meta.dtype && a.meta.device == b.meta.device &&
         a.meta.sizes.size() == b.meta.sizes.size();
}

bool is_alike(const Operator& a, const Operator& b) {
  return a.handle == b.handle && a.mode == b.mode && a.results == b.results &&
         a.result_is_argument == b.result_is_argument && a.list_lengths == b.list_lengths &&
         a.first_result == b.first_result && a.writes == b.writes && graph::same_arguments(a, b);
}

bool is_alike(const Graph& a, const Graph& b, size_t index) {
  const Operator& op = a.operators[index];
  return is_alike(op, b.operators[index]) &&
         std::all_of(op.results.begin(), op.results.end(), [&](graph::ValueId id) {
           return id == graph::kUndefined || is_alike(a.values[id], b.values[id]);
         });
}

std::string line_of(const Graph& graph, size_t index) {
  return index < graph.operators.size() ? graph.line(index) : "nothing";
}

/// The first operator that differs; that after the last one if none does.
size_t first_difference(const Graph& a, const Graph& b) {
  size_t index = 0;
  const size_t count = std::min(a.operators.size(), b.operators.size());
  while (index < count && is_alike(a, b, index)) ++index;
  return index;
}

void check_constants(const ExportRequest& request, const Graph& first, const Graph& other) {
  for (size_t id = 0; id < first.values.size(); ++id) {
    const at::Tensor& content = first.values[id].content;
    const bool same = !content.defined() || graph::same_content(content, other.values[id].content);
    SMP_CHECK_WITH(CaptureError, same, "cannot export \"", request.file, "\": a tensor ",
                   first.values[id].meta.to_string(),
                   " that the program makes from numbers of its own (torch::tensor) has other "
                   "content for other dynamic sizes. Make it by an operator on the sizes, such as "
                   "arange, or leave the size fixed");
  }
}

/// Throws unless the captures call the same operators on the same values, so that only numbers
/// differ with dynamic sizes. Names the first operator that differs.
void check_same_program(const ExportRequest& request) {
  const Graph& first = request.graph();
  for (size_t capture = 1; capture < request.graphs.size(); ++capture) {
    const Graph& other = *request.graphs[capture];
    const size_t at = first_difference(first, other);
    const bool same = at == first.operators.size() && at == other.operators.size() &&
                      first.outputs == other.outputs && first.values.size() == other.values.size();
    SMP_CHECK_WITH(CaptureError, same, "cannot export \"", request.file,
                   "\": it calls other operators for other dynamic sizes: for ",
                   request.grid.shown(0), " ", line_of(first, at), ", and for ",
                   request.grid.shown(capture), " ", line_of(other, at),
                   ". Write a program without branches and loops over these sizes, or leave them "
                   "fixed");
    check_constants(request, first, other);
  }
}

// ---------------------------------------------------------------------------------------------
// The model: models/model.json

Json input_spec(const WrittenInput& input) {
  const Json name = {{"name", input.name}};
  switch (input.kind) {
    case Input::Kind::kParameter:
      return tagged("parameter", {{"arg", name}, {"parameter_name", input.target}});
    case Input::Kind::kBuffer:
      return tagged("buffer", {{"arg", name}, {"buffer_name", input.target}, {"persistent", true}});
    case Input::Kind::kConstant:
      return tagged("tensor_constant", {{"arg", name}, {"tensor_constant_name", input.target}});
    case Input::Kind::kUser:
      break;
  }
  if (!input.meta.is_null()) return tagged("user_input", {{"arg", tagged("as_tensor", name)}});
  return tagged("constant_input", {{"name", input.name}, {"value", write_constant(input.fixed)}});
}

/// The inputs and outputs of a program: the schema's "signature". All outputs are results: buffers
/// are written in place.
Json write_signature(const std::vector<WrittenInput>& inputs, const std::vector<Json>& outputs) {
  auto input_specs = Json::array(), output_specs = Json::array();
  for (const WrittenInput& input : inputs) input_specs.push_back(input_spec(input));
  for (const Json& output : outputs) {
    output_specs.push_back(tagged("user_output", {{"arg", output}}));
  }
  return {{"input_specs", std::move(input_specs)}, {"output_specs", std::move(output_specs)}};
}

/// The model's modules, with the structures of the arguments and results of the outermost.
Json write_calls(const ExportRequest& request) {
  std::vector<c10::IValue> leaves;
  Structure positions{Structure::Kind::kTuple, {}, {}};
  for (const c10::IValue& argument : request.arguments) {
    positions.children.push_back(structure_of(argument, leaves));
  }
  const Structure by_name{Structure::Kind::kDictionary, {}, {}};
  const Structure arguments{Structure::Kind::kTuple, {positions, by_name}, {}};
  auto calls = Json::array();
  for (const auto& module : request.modules) {
    calls.push_back({{"fqn", python_path(module.first)}, {"signature", nullptr}});
    if (!module.first.empty()) continue;
    calls.back()["signature"] = {
        {"inputs", Json::array()},
        {"outputs", Json::array()},
        {"in_spec", write_structure(arguments)},
        {"out_spec", write_structure(structure_of(request.result, leaves))},
        {"forward_arg_names", request.argument_names}};
  }
  return calls;
}

/// The ranges of dynamic sizes, by symbol.
Json write_ranges(const ExportRequest& request) {
  Json ranges = Json::object();
  for (size_t i = 0; i < request.sizes.size(); ++i) {
    const auto& [given, least, most] = request.sizes[i];
    Json range = {{"min_val", least}, {"max_val", nullptr}};
    if (most != std::numeric_limits<int64_t>::max()) range["max_val"] = most;
    ranges[symbol_name(i)] = std::move(range);
  }
  return ranges;
}

Json write_model(const ExportRequest& request, const std::vector<WrittenInput>& inputs,
                 WrittenFunction function) {
  const Json module = {{"graph", std::move(function.graph)},
                       {"signature", write_signature(inputs, function.outputs)},
                       {"module_call_graph", write_calls(request)},
                       {"metadata", Json::object()},
                       {"treespec_namedtuple_fields", Json::object()}};
  return {{"graph_module", module},
          {"opset_version", {{"aten", kOpset}}},
          {"range_constraints", write_ranges(request)},
          {"schema_version", {{"major", kSchemaMajor}, {"minor", kSchemaMinor}}},
          {"verifiers", Json::array({"TRAINING"})},
          {"torch_version", TORCH_VERSION},
          {"guards_code", Json::array()}};
}

// ---------------------------------------------------------------------------------------------
// Tensors

/// Under names that Python can read; notes those that are others.
std::vector<ExportRequest::Tensor> weights_of(const ExportRequest& request, ExportReport& report) {
  std::vector<ExportRequest::Tensor> weights;
  std::set<std::string> names;
  for (const auto& [name, is_parameter, tensor] : request.tensors) {
    const std::string written = python_path(name);
    SMP_CHECK_WITH(
        UsageError, names.insert(written).second, "cannot export \"", core::printable(request.file),
        "\": two parameters or buffers would be \"", core::printable(written, 100),
        "\" in Python, where a name that is a word of its language gets a \"_\". Register "
        "one under another name");
    if (written != name) report.renamed[name] = written;
    weights.push_back({written, is_parameter, tensor});
  }
  return weights;
}

std::vector<ExportRequest::Tensor> constants_of(const ExportRequest& request,
                                                const std::vector<WrittenInput>& inputs,
                                                ExportReport& report) {
  std::vector<ExportRequest::Tensor> constants;
  for (const WrittenInput& input : inputs) {
    if (input.kind != Input::Kind::kConstant) continue;
    const graph::Value& value = request.graph().values[input.value];
    report.constants.push_back(input.target + " " + value.meta.to_string());
    constants.push_back({input.target, false, value.content});
  }
  return constants;
}

/// The bytes of a tensor's storage, on the CPU.
at::Tensor storage_bytes(const at::Tensor& tensor) {
  const c10::Storage& storage = tensor.storage();
  const auto size = static_cast<int64_t>(storage.nbytes());
  const auto options = at::TensorOptions(at::kByte).device(storage.device());
  return at::empty({0}, options).set_(storage, 0, {size}, {1}).cpu();
}

/// Writes tensors as raw bytes: those that share a storage share one record. `kind` is "weights" or
/// "constants".
void write_tensors(ArchiveWriter& archive, const std::string& kind,
                   const std::vector<ExportRequest::Tensor>& tensors) {
  const std::string folder = "data/" + kind + "/";
  std::map<const c10::StorageImpl*, std::string> records;
  auto config = Json::object();
  for (const auto& [name, is_parameter, tensor] : tensors) {
    auto [record, is_new] = records.try_emplace(tensor.storage().unsafeGetStorageImpl());
    if (is_new) {
      record->second =
          (kind == "weights" ? "weight_" : "tensor_") + std::to_string(records.size() - 1);
      const at::Tensor bytes = storage_bytes(tensor);
      archive.add(folder + record->second, bytes.const_data_ptr(), bytes.nbytes());
    }
    config[name] = {{"path_name", record->second},
                    {"is_param", is_parameter},
                    {"use_pickle", false},
                    {"tensor_meta", write_meta(tensor)}};
  }
  archive.add(folder + "model_" + kind + "_config.json",
              Json{{"config", std::move(config)}}.dump());
}

// ---------------------------------------------------------------------------------------------
// The arguments of the first capture

/// A copy with tensors of their own memory, and lists and dictionaries of no type, which Python
/// reads as its own.
c10::IValue plain_copy(const c10::IValue& value) {
  std::vector<c10::IValue> leaves;
  const Structure structure = structure_of(value, leaves);
  for (c10::IValue& leaf : leaves) {
    if (leaf.isTensor()) leaf = leaf.toTensor().detach().clone();
  }
  return unflatten(structure, leaves, /*typed=*/false);
}

/// The value in the form of torch.save. `torch::pickle_save` names the types of lists and
/// dictionaries by a function that `weights_only=True` refuses.
std::string pickled(const c10::IValue& value) {
  std::string bytes, archive;
  torch::jit::Pickler pickler([&](const char* data, size_t size) { bytes.append(data, size); },
                              nullptr, nullptr, nullptr, nullptr, /*tag_aggregates=*/false);
  pickler.protocol();
  pickler.pushIValue(value);
  pickler.stop();
  caffe2::serialize::PyTorchStreamWriter writer([&](const void* data, size_t size) {
    archive.append(static_cast<const char*>(data), size);
    return size;
  });
  writer.writeRecord("data.pkl", bytes.data(), bytes.size());
  size_t number = 0;
  for (const at::Tensor& tensor : pickler.tensorData()) {
    const at::Tensor content = storage_bytes(tensor);
    writer.writeRecord("data/" + std::to_string(number++), content.const_data_ptr(),
                       content.nbytes());
  }
  writer.writeEndOfFile();
  return archive;
}

/// Writes the arguments that a program was captured with, as torch.export.load and AOTInductor want
/// them in an archive: a pickle of tensors, numbers and containers, which Python reads with
/// `weights_only=True`.
void write_sample_inputs(ArchiveWriter& archive, const std::vector<c10::IValue>& arguments) {
  std::vector<c10::IValue> positions;
  for (const c10::IValue& argument : arguments) positions.push_back(plain_copy(argument));
  const c10::impl::GenericDict by_name(c10::StringType::get(), c10::AnyType::get());
  archive.add("data/sample_inputs/model.pt",
              pickled(c10::ivalue::Tuple::create(
                  {c10::ivalue::Tuple::create(std::move(positions)), by_name})));
}

}  // namespace

ExportReport write_program(const ExportRequest& request, const std::string& path) {
  check_same_program(request);
  const ExportPlan plan(request.graph(), request.file);
  Names names;
  const auto inputs = inputs_of(request, plan, names);
  ExportReport report;
  WrittenFunction function = write_function(request, plan, inputs, names, report);
  const auto weights = weights_of(request, report);
  ArchiveWriter archive(path);
  write_tensors(archive, "weights", weights);
  write_tensors(archive, "constants", constants_of(request, inputs, report));
  archive.add("models/model.json", write_model(request, inputs, std::move(function)).dump());
  write_sample_inputs(archive, request.arguments);
  archive.add("archive_format", "pt2");
  archive.add("archive_version", "0");
  archive.add("byteorder", "little");
  archive.commit();
  return report;
}

}  // namespace smp::exported
