// SPDX-License-Identifier: Apache-2.0
#include "partitioner/modules.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <map>
#include <set>

namespace smp::partitioner {
namespace {

/// A module name that ends in a number, as the children of a container have: "blocks." and 3.
struct Numbered {
  std::string stem;
  int number = -1;  ///< -1: it does not end in one

  explicit Numbered(const std::string& name) {
    size_t digits = name.size();
    while (digits > 0 && std::isdigit(static_cast<unsigned char>(name[digits - 1]))) --digits;
    const size_t length = name.size() - digits;
    const bool component = digits == 0 || name[digits - 1] == '.';
    if (length == 0 || length > 6 || !component) return;
    stem = name.substr(0, digits);
    number = std::stoi(name.substr(digits));
  }
};

/// Joins "b.0", "b.1", "b.2" to "b.0-2".
std::string join_ranges(const std::vector<std::string>& names) {
  std::string text;
  for (size_t first = 0; first < names.size();) {
    const Numbered start(names[first]);
    size_t last = first;
    while (start.number >= 0 && last + 1 < names.size()) {
      const Numbered next(names[last + 1]);
      if (next.stem != start.stem ||
          next.number != start.number + static_cast<int>(last + 1 - first)) {
        break;
      }
      ++last;
    }
    if (!text.empty()) text += ", ";
    text += names[first];
    if (last > first) text += fmt::format("-{}", start.number + static_cast<int>(last - first));
    first = last + 1;
  }
  return text;
}

/// The modules of one stage, each once, in the order of their first operators.
class StageNames {
 public:
  void add(const std::string& name) {
    if (std::find(names_.begin(), names_.end(), name) == names_.end()) names_.push_back(name);
  }

  /// Notes the own operators of a module that is divided among stages.
  void add_part(const std::string& module) {
    parts_.insert(module);
    add(module);
  }

  std::vector<std::string> finish() const {
    std::vector<std::string> result;
    for (const std::string& name : names_) {
      if (parts_.count(name) == 0) {
        result.push_back(name);
      } else if (!has_child(name)) {
        result.push_back(name + " (part)");
      }
    }
    return result;
  }

 private:
  bool has_child(const std::string& module) const {
    return std::any_of(names_.begin(), names_.end(), [&](const std::string& name) {
      return name.compare(0, module.size() + 1, module + ".") == 0;
    });
  }

  std::vector<std::string> names_;
  std::set<std::string> parts_;
};

}  // namespace

std::vector<std::string> enclosing_modules(const std::string& path) {
  std::vector<std::string> result;
  for (size_t dot = path.find('.'); dot != std::string::npos; dot = path.find('.', dot + 1)) {
    result.push_back(path.substr(0, dot));
  }
  if (!path.empty()) result.push_back(path);
  return result;
}

std::vector<std::string> stage_modules(const graph::Graph& graph, const Plan& plan) {
  std::map<std::string, std::set<int>> stages_of;  // stages of a module and all inside it
  for (size_t i = 0; i < graph.operators.size(); ++i) {
    const std::string& scope = graph.operators[i].scope;
    if (scope.empty()) continue;
    for (const std::string& prefix : enclosing_modules(scope)) {
      stages_of[prefix].insert(plan.stage_of_operator[i]);
    }
  }
  std::vector<StageNames> names(plan.stages());
  for (size_t i = 0; i < graph.operators.size(); ++i) {
    const std::string& scope = graph.operators[i].scope;
    StageNames& of_stage = names[plan.stage_of_operator[i]];
    if (scope.empty()) {
      of_stage.add("(step function)");
      continue;
    }
    const std::vector<std::string> candidates = enclosing_modules(scope);
    const auto whole =
        std::find_if(candidates.begin(), candidates.end(),
                     [&](const std::string& prefix) { return stages_of[prefix].size() == 1; });
    if (whole != candidates.end()) {
      of_stage.add(*whole);
    } else {
      of_stage.add_part(scope);
    }
  }
  std::vector<std::string> result;
  for (const StageNames& of_stage : names) result.push_back(join_ranges(of_stage.finish()));
  return result;
}

}  // namespace smp::partitioner
