// SPDX-License-Identifier: Apache-2.0
#include "core/settings.h"

#include <algorithm>

#include "core/check.h"
#include "core/text.h"

namespace smp::core {

const Parameter& parameter_called(const std::string& name) {
  const Parameter* parameter = find_parameter(name);
  SMP_CHECK_WITH(ConfigError, parameter != nullptr, "config key \"", printable(name, 100),
                 "\": unknown parameter. Did you mean \"", nearest_parameter(name), "\"?");
  return *parameter;
}

const Setting* Layer::find(const Parameter& parameter) const {
  for (const Setting& setting : settings) {
    if (find_parameter(setting.name) == &parameter) return &setting;
  }
  return nullptr;
}

std::vector<Settings::Given> Settings::given(const Parameter& parameter) const {
  std::vector<Given> all;
  for (const Layer* layer : layers()) {
    if (const Setting* setting = layer->find(parameter)) all.push_back({layer, setting});
  }
  return all;
}

void Settings::set(const std::string& name, ConfigValue value) {
  auto& settings = program.settings;
  auto setting = std::find_if(settings.begin(), settings.end(),
                              [&](const Setting& old) { return old.name == name; });
  if (setting == settings.end()) setting = settings.insert(setting, {name, name, {}, {}});
  setting->text = to_string(value);
  setting->value = std::move(value);
}

ConfigValue Settings::default_of(const Parameter& parameter) const {
  return parameter.default_rule ? parameter.default_rule(*this) : parameter.default_value;
}

ConfigValue Settings::get(const std::string& name) const {
  const Parameter& parameter = parameter_called(name);
  const auto sources = given(parameter);
  if (sources.empty()) return default_of(parameter);
  const auto [layer, setting] = sources.front();
  const auto problem = value_problem(parameter, setting->name, setting->value, setting->text);
  SMP_CHECK_WITH(ConfigError, !problem, layer->source, ": \"", setting->path, "\": ", *problem);
  return normalised(parameter, setting->value);
}

bool Settings::is_set(const std::string& name) const {
  return !given(parameter_called(name)).empty();
}

}  // namespace smp::core
