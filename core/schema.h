// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "core/refusal.h"
#include "smp/config.h"

namespace smp::core {

/// A value as JSON text; "unset" for the empty state.
std::string to_string(const ConfigValue& value);

enum class ParameterType { kBool, kInt, kNumber, kString };

/// One row of the schema: all there is to know about a parameter of the configuration.
struct Parameter {
  std::string name;
  /// The heading of the documentation under which it stands.
  std::string group;
  ParameterType type = ParameterType::kBool;
  /// The default; unset when there is none, or when it depends on other parameters.
  ConfigValue default_value;
  /// The default where it depends on other parameters; null for none.
  std::function<ConfigValue(const Settings&)> default_rule;
  /// One paragraph, in markdown.
  std::string doc;
  /// Another name for the same parameter; empty for none.
  std::string alias;
  /// How the documentation describes a default that is not one value.
  std::string default_text;
  std::optional<double> minimum;
  std::optional<double> maximum;
  /// True when `minimum` itself is not allowed.
  bool exclusive_minimum = false;
  /// True when `error` says nothing about `maximum`: SMP documents none.
  bool own_maximum = false;
  /// The strings allowed; empty for any.
  std::vector<std::string> values;
  /// A string parameter that also takes an integer >= `minimum`; its value is the integer as text.
  bool or_integer = false;
  /// A bool parameter that must be true when this one is given; empty for none.
  std::string needs;
  /// The documented text for a value of wrong type or range, with {key} and {value} to be
  /// replaced; empty for the general text.
  std::string error;
  /// Belongs to the TensorFlow version of SMP: only the default is accepted.
  bool tensorflow_only = false;

  /// Whether it has no value unless one is set.
  bool is_optional() const { return default_value == ConfigValue() && !default_rule; }
};

/// All parameters, in the order of the documentation. The single source of names, types,
/// defaults, ranges and texts: the reader, the checks, the accessors of `smp::Config` and
/// docs/configuration.md follow from it.
const std::vector<Parameter>& schema();

/// The parameter called `name`, by name or alias; nullptr when there is none.
const Parameter* find_parameter(const std::string& name);

/// The name or alias in the schema with the smallest edit distance to `name`.
std::string nearest_parameter(const std::string& name);

/// The first of `candidates` (not empty) with the smallest edit distance to `name`.
std::string nearest_name(const std::string& name, const std::vector<std::string>& candidates);

/// True for keys that occur in public SMP 1.x scripts without any documentation.
bool is_undocumented_key(const std::string& name);

/// The values a parameter takes, in words: "an integer >= 1", "'simple' or 'interleaved'".
std::string expected_values(const Parameter& parameter);

/// `value` in the representation of the parameter's type: an integral double becomes an integer
/// for an integer parameter, an integer a double for a number. Others are returned unchanged.
ConfigValue normalised(const Parameter& parameter, const ConfigValue& value);

/// The error in the type or the range of `value`, or nothing. `key` is the name it was given under,
/// `text` the value as it was written.
Refusal value_problem(const Parameter& parameter, const std::string& key, const ConfigValue& value,
                      const std::string& text);

/// Why a value of right type and range is refused, or nothing.
Refusal availability_problem(const Parameter& parameter, const ConfigValue& value);

}  // namespace smp::core
