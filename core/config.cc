// SPDX-License-Identifier: Apache-2.0
#include "smp/config.h"

#include <xxhash.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <ostream>

#include "core/check.h"
#include "core/config_file.h"
#include "core/env.h"
#include "core/settings.h"
#include "core/text.h"

namespace smp {
namespace {

using core::Parameter;
using core::Settings;

// The parameters to show: all that have a value; features of TensorFlow, and those that `ddp`
// switches off, only where they differ from the default.
std::vector<const Parameter*> shown(const Settings& settings) {
  std::vector<const Parameter*> rows;
  for (const Parameter& parameter : core::schema()) {
    const ConfigValue value = settings.get(parameter.name);
    const bool differs = value != settings.default_of(parameter);
    const bool needed =
        parameter.needs.empty() || settings.get(parameter.needs) == ConfigValue(true);
    const bool matters = !parameter.tensorflow_only && needed;
    if (value != ConfigValue() && (differs || matters)) rows.push_back(&parameter);
  }
  return rows;
}

// " (overrides 4 from smp.json)" for each weaker source that also set the parameter.
std::string overrides(const Settings& settings, const Parameter& parameter) {
  const auto given = settings.given(parameter);
  std::string text;
  for (size_t i = 1; i < given.size(); ++i) {
    text += (i == 1 ? " (overrides " : ", ") + given[i].setting->text + " from " +
            given[i].layer->source;
  }
  return text.empty() ? "" : text + ")";
}

}  // namespace

Config::Config() : settings_(std::make_shared<Settings>()) {}

Config::Config(std::shared_ptr<const Settings> settings) : settings_(std::move(settings)) {}

Config Config::from_file(const std::string& path) {
  return core::Distribution::from_file(path).config;
}

Config Config::from_json(const std::string& text, const std::string& source_name) {
  return core::Distribution::from_json(text, source_name).config;
}

Config Config::merged_with_environment() const {
  const auto text = core::env(core::kParametersVariable);
  if (!text) return *this;
  auto merged = std::make_shared<Settings>(*settings_);
  merged->environment = from_json(*text, core::kParametersVariable).settings_->file;
  return Config(std::move(merged));
}

Config& Config::set(const std::string& name, ConfigValue value) {
  auto changed = std::make_shared<Settings>(*settings_);
  changed->set(name, std::move(value));
  settings_ = std::move(changed);
  return *this;
}

Config& Config::choose(const char* name, size_t index) {
  return set(name, core::parameter_called(name).values.at(index));
}

ConfigValue Config::get(const std::string& name) const { return settings_->get(name); }

bool Config::is_set(const std::string& name) const { return settings_->is_set(name); }

std::string Config::source(const std::string& name) const {
  const auto given = settings_->given(core::parameter_called(name));
  return given.empty() ? "default" : given.front().layer->source;
}

std::vector<std::string> Config::problems() const { return settings_->problems(); }

void Config::validate() const {
  const auto all = problems();
  if (all.empty()) return;
  SMP_CHECK_WITH(ConfigError, all.size() > 1, all.front());
  core::fail<ConfigError>("the configuration has ", all.size(), " errors:", core::indented(all));
}

std::vector<std::string> Config::overridden() const {
  std::vector<std::string> lines;
  for (const Parameter& parameter : core::schema()) {
    const auto given = settings_->given(parameter);
    for (size_t i = 1; i < given.size(); ++i) {
      const std::string used = core::printable(given[0].setting->text, 100);
      const std::string dropped = core::printable(given[i].setting->text, 100);
      if (used == dropped) continue;
      lines.push_back(c10::str(given[0].layer->source, " sets \"", parameter.name, "\" to ", used,
                               "; ", dropped, " from ", given[i].layer->source, " is not used."));
    }
  }
  return lines;
}

std::string Config::to_json() const {
  nlohmann::json object = nlohmann::json::object();
  for (const Parameter* parameter : shown(*settings_)) {
    object[parameter->name] = nlohmann::json::parse(core::to_string(get(parameter->name)));
  }
  return object.dump();
}

std::string Config::to_string() const {
  const auto rows = shown(*settings_);
  size_t name_width = 0;
  size_t value_width = 0;
  for (const Parameter* parameter : rows) {
    name_width = std::max(name_width, parameter->name.size());
    value_width = std::max(value_width, core::to_string(get(parameter->name)).size());
  }
  std::string text;
  for (const Parameter* parameter : rows) {
    std::string name = parameter->name;
    std::string value = core::to_string(get(parameter->name));
    name.resize(name_width, ' ');
    value.resize(value_width, ' ');
    text += name + "  " + value + "  " + source(parameter->name) +
            overrides(*settings_, *parameter) + "\n";
  }
  return text;
}

uint64_t Config::fingerprint() const {
  const std::string text = to_json();
  return XXH64(text.data(), text.size(), /*seed=*/0);
}

std::ostream& operator<<(std::ostream& out, const Config& config) {
  return out << config.to_string();
}

}  // namespace smp
