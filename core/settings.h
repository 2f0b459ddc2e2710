// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <string>
#include <vector>

#include "core/schema.h"

namespace smp::core {

/// A value that a source gives to a parameter.
struct Setting {
  std::string name;   ///< name as given: the parameter's, its alias, or unknown
  std::string path;   ///< where in the source, for messages
  ConfigValue value;  ///< empty if no parameter takes it, as an array
  std::string text;   ///< the value as JSON, for messages
};

/// The settings of one source.
struct Layer {
  std::string source;
  std::vector<Setting> settings;

  /// The setting of a parameter, by name or alias; nullptr if nothing.
  const Setting* find(const Parameter& parameter) const;
};

/// The settings of all sources, and which of them are in effect: the contents of a `Config`.
class Settings {
 public:
  /// From the strongest source to the weakest.
  std::array<const Layer*, 3> layers() const { return {&environment, &file, &program}; }

  /// The settings of a parameter, from the strongest that says something.
  struct Given {
    const Layer* layer;
    const Setting* setting;
  };
  std::vector<Given> given(const Parameter& parameter) const;

  /// Sets the program's value.
  void set(const std::string& name, ConfigValue value);

  /// The value in effect, see `Config::get`.
  ConfigValue get(const std::string& name) const;
  ConfigValue default_of(const Parameter& parameter) const;
  bool is_set(const std::string& name) const;

  /// See `Config::problems`.
  std::vector<std::string> problems() const;

  Layer environment;
  Layer file;
  Layer program{"program", {}};
};

/// The parameter called `name`. Throws `ConfigError` when there is none.
const Parameter& parameter_called(const std::string& name);

}  // namespace smp::core
