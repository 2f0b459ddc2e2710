// SPDX-License-Identifier: Apache-2.0
#include "exported/write_program.h"

#include <torch/version.h>

#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "core/check.h"
#include "core/text.h"
#include "exported/archive_writer.h"
#include "exported/export_plan.h"
#include "exported/format_version.h"
#include "exported/same_program.h"
#include "exported/write_function.h"
#include "exported/write_sample_inputs.h"
#include "exported/write_signature.h"
#include "exported/write_tensors.h"
#include "exported/write_values.h"

namespace smp::exported {
namespace {

using Json = nlohmann::json;

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
  archive.add_format();
  archive.commit();
  return report;
}

}  // namespace smp::exported
