// SPDX-License-Identifier: Apache-2.0
#include "graph/location.h"

#include <algorithm>

#include "core/check.h"
#include "graph/module_scope.h"

namespace smp::graph {
namespace {

/// The name in the model of the module that code on this thread says is running.
std::string path_in_model(const RunningModule& module, const TensorTable& table) {
  const auto* entry = module.parameter.defined() ? table.find(module.parameter) : nullptr;
  if (entry == nullptr) return module.path;
  std::vector<std::string> names = entry->aliases;
  names.insert(names.begin(), entry->name);
  for (const std::string& name : names) {
    const size_t prefix = name.size() - std::min(name.size(), module.parameter_name.size());
    if (name.compare(prefix, std::string::npos, module.parameter_name) != 0) continue;
    if (prefix == 0) return module.path;
    if (name[prefix - 1] != '.') continue;
    return module.path.empty() ? name.substr(0, prefix - 1) : name.substr(0, prefix) + module.path;
  }
  return module.path;
}

}  // namespace

void Location::note_operator(size_t index) {
  if (running_module() == nullptr) return;
  if (modules_known_.size() <= index) modules_known_.resize(index + 1);
  modules_known_[index] = true;
}

std::string Location::module() const {
  if (const RunningModule* module = running_module()) return path_in_model(*module, table_);
  const size_t dot = last_parameter_.rfind('.');
  return dot == std::string::npos ? "" : last_parameter_.substr(0, dot);
}

std::string Location::to_string() const {
  std::string text = "step function \"" + step_name_ + "\"";
  const std::string module = this->module();
  if (!module.empty()) text += ", in or after module \"" + module + "\"";
  return text;
}

void Location::refuse(const std::string& what, const std::string& remedy) const {
  core::fail<CaptureError>(to_string(), ": ", what, ". ", remedy, ".");
}

}  // namespace smp::graph
