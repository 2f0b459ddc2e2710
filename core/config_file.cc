// SPDX-License-Identifier: Apache-2.0
#include "core/config_file.h"

#include <algorithm>
#include <filesystem>
#include <limits>
#include <memory>
#include <system_error>
#include <vector>

#include "core/check.h"
#include "core/json.h"
#include "core/settings.h"
#include "core/text.h"

namespace smp::core {
namespace {

using nlohmann::json;

constexpr const char* kSupported = "['dataparallel', 'modelparallel']";
constexpr size_t kMostParameters = 1000;

std::string text_of(const json& value) {
  return value.dump(-1, ' ', /*ensure_ascii=*/false, json::error_handler_t::replace);
}

// A value as an error shows it.
std::string shown(const json& value) { return printable(text_of(value), 100); }

ConfigValue to_value(const json& value) {
  if (value.is_boolean()) return value.get<bool>();
  if (value.is_string()) return value.get<std::string>();
  const auto unsigned_number = value.is_number_unsigned() ? value.get<uint64_t>() : 0;
  if (unsigned_number > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
    return value.get<double>();
  }
  if (value.is_number_integer()) return value.get<int64_t>();
  if (value.is_number_float()) return value.get<double>();
  return {};
}

// An object of the file with its place, for messages.
struct Node {
  const json& object;
  std::string source;
  std::string path;

  std::string where(const std::string& key) const {
    return source + ": \"" + path + (path.empty() ? "" : ".") + printable(key, 100) + "\": ";
  }
};

void check_keys(const Node& node, const std::vector<std::string>& known) {
  for (const auto& [key, value] : node.object.items()) {
    const bool is_known = std::find(known.begin(), known.end(), key) != known.end();
    SMP_CHECK_WITH(ConfigError, is_known, node.where(key), "unknown key. Did you mean \"",
                   nearest_name(key, known), "\"?");
  }
}

void check_enabled(const Node& node, const char* what) {
  const json enabled = node.object.value("enabled", json(nullptr));
  SMP_CHECK_WITH(ConfigError, enabled == json(true), node.where("enabled"), "expected true, got ",
                 enabled.is_null() ? "nothing" : shown(enabled), ". ", what);
}

// The rules that the estimator applies before it looks at the strategy.
Node strategy_node(const json& root, const std::string& source) {
  const Node top{root, source, ""};
  check_keys(top, {"smdistributed", "mpi"});
  static const json none = json::object();
  const auto found = root.find("smdistributed");
  const json& strategies = found != root.end() ? *found : none;
  SMP_CHECK_WITH(ConfigError, strategies.is_object(), top.where("smdistributed"),
                 "smdistributed strategy requires a dictionary (got ", shown(strategies), ")");
  SMP_CHECK_WITH(ConfigError, strategies.size() <= 1, top.where("smdistributed"),
                 "Cannot use more than 1 smdistributed strategy. \nChoose one of the following "
                 "supported strategies:",
                 kSupported);
  const std::string name = strategies.empty() ? "" : strategies.begin().key();
  SMP_CHECK_WITH(
      ConfigError, name == "modelparallel" || name == "dataparallel", top.where("smdistributed"),
      "Invalid smdistributed strategy provided: ", name.empty() ? "none" : printable(name, 100),
      " \nSupported strategies: ", kSupported);
  const Node node{strategies.begin().value(), source, "smdistributed." + name};
  SMP_CHECK_WITH(ConfigError, node.object.is_object(), top.where(node.path),
                 "expected an object, got ", shown(node.object), ".");
  return node;
}

void read_custom_mpi_options(const Node& node, Distribution& result) {
  if (!node.object.contains("custom_mpi_options")) return;
  const json& options = node.object["custom_mpi_options"];
  SMP_CHECK_WITH(ConfigError, options.is_string(), node.where("custom_mpi_options"),
                 "expected a string with options of mpirun, got ", shown(options), ".");
  result.custom_mpi_options = options.get<std::string>();
}

void read_mpi(const json& root, const std::string& source, Distribution& result) {
  if (!root.contains("mpi")) return;
  const Node node{root["mpi"], source, "mpi"};
  SMP_CHECK_WITH(ConfigError, node.object.is_object(), Node{root, source, ""}.where("mpi"),
                 "expected an object, got ", shown(node.object), ".");
  check_keys(node, {"enabled", "processes_per_host", "custom_mpi_options"});
  check_enabled(node, "Ranks are started by MPI: set it to true.");
  if (node.object.contains("processes_per_host")) {
    const json& count = node.object["processes_per_host"];
    SMP_CHECK_WITH(
        ConfigError,
        count.is_number_integer() && count > 0 && count <= std::numeric_limits<int>::max(),
        node.where("processes_per_host"), "expected an integer >= 1, got ", shown(count),
        ". Set it to the number of ranks.");
    result.processes_per_host = count.get<int64_t>();
  }
  read_custom_mpi_options(node, result);
}

// `parameters` given as the path of another file.
json parameters_file(const std::string& file, const std::string& folder) {
  const std::string path = (std::filesystem::path(folder) / file).string();
  std::error_code ignored;  // error of a name that no file can have
  SMP_CHECK_WITH(ConfigError, std::filesystem::is_regular_file(path, ignored),
                 "Expected a string path to an existing modelparallel config, or a dictionary. "
                 "Received: ",
                 printable(file), ".");
  try {
    return parse_json(read_file(path, "the configuration file"), path);
  } catch (const ConfigError& error) {
    throw ConfigError(std::string(error.what_without_backtrace()) + "\nCannot parse " +
                      printable(file) + " as a json file.");
  }
}

}  // namespace

void Distribution::read(const std::string& text, const std::string& source_name,
                        const std::string& folder) {
  const json root = parse_json(text, source_name);
  SMP_CHECK_WITH(ConfigError, root.is_object(), source_name,
                 ": expected a JSON object with the parameters, got ", shown(root), ".");
  json parameters = root;
  Node node{parameters, source_name, ""};
  if (root.contains("smdistributed") || root.contains("mpi")) {
    const Node chosen = strategy_node(root, source_name);
    if (root["smdistributed"].contains("dataparallel")) strategy = Strategy::kDataParallel;
    check_keys(chosen, {"enabled",
                        strategy == Strategy::kDataParallel ? "custom_mpi_options" : "parameters"});
    check_enabled(chosen, "Set it to true, or start the program without this file.");
    read_mpi(root, source_name, *this);
    if (strategy == Strategy::kDataParallel) {
      read_custom_mpi_options(chosen, *this);
      return;
    }
    parameters = chosen.object.value("parameters", json::object());
    node.path = "smdistributed.modelparallel.parameters";
  }
  if (parameters.is_string()) {
    const std::string file = parameters.get<std::string>();
    parameters = parameters_file(file, folder);
    node.source = printable(file);
    node.path.clear();
  }
  SMP_CHECK_WITH(ConfigError, parameters.is_object(), node.source, ": \"", node.path,
                 "\": Expected a string path to an existing modelparallel config, or a dictionary. "
                 "Received: ",
                 shown(parameters), ".");
  // Each is compared with every name that is known.
  SMP_CHECK_WITH(ConfigError, parameters.size() <= kMostParameters, node.source,
                 node.path.empty() ? "" : ": \"" + node.path + "\"", ": expected at most ",
                 kMostParameters, " parameters, got ", parameters.size(),
                 ". Give an object with the parameters alone.");
  parameters_json = parameters.dump();
  auto settings = std::make_shared<Settings>();
  settings->file.source = node.source;
  for (const auto& [key, value] : parameters.items()) {
    settings->file.settings.push_back(
        {key, node.path + (node.path.empty() ? "" : ".") + key, to_value(value), text_of(value)});
  }
  config = Config(std::move(settings));
}

Distribution Distribution::from_file(const std::string& path) {
  Distribution result;
  result.read(read_file(path, "the configuration file"), path,
              std::filesystem::path(path).parent_path().string());
  return result;
}

Distribution Distribution::from_json(const std::string& text, const std::string& source_name) {
  Distribution result;
  result.read(text, source_name, "");
  return result;
}

}  // namespace smp::core
