// SPDX-License-Identifier: Apache-2.0
#include "core/schema.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <numeric>

#include "core/check.h"
#include "core/text.h"

namespace smp::core {
namespace {

std::string number_text(double number) {
  if (number == std::floor(number) && std::abs(number) <= 1e15) {
    return std::to_string(static_cast<int64_t>(number));
  }
  return nlohmann::json(number).dump();
}

// "['simple', 'interleaved']": the list as SMP's documented messages show it.
std::string list_text(const Parameter& parameter) {
  if (parameter.type == ParameterType::kBool) return "[true, false]";
  std::string text;
  for (const std::string& value : parameter.values) {
    text += (text.empty() ? "['" : ", '") + value + "'";
  }
  return text + "]";
}

// The types are in the order of the alternatives, of which the first is no value.
bool has_right_type(const Parameter& parameter, const ConfigValue& value) {
  return value.index() == static_cast<size_t>(parameter.type) + 1;
}

bool is_integer_in_range(const Parameter& parameter, const std::string& text) {
  constexpr size_t kMaxDigits = 18;
  if (text.empty() || text.size() > kMaxDigits) return false;
  if (text.find_first_not_of("0123456789") != std::string::npos) return false;
  return !parameter.minimum || std::stod(text) >= *parameter.minimum;
}

double as_number(const ConfigValue& value) {
  const auto* integer = std::get_if<int64_t>(&value);
  return integer != nullptr ? static_cast<double>(*integer) : std::get<double>(value);
}

bool below(const Parameter& parameter, const ConfigValue& value) {
  if (!parameter.minimum) return false;
  const double number = as_number(value);
  return number < *parameter.minimum ||
         (parameter.exclusive_minimum && number == *parameter.minimum);
}

bool in_range(const Parameter& parameter, const ConfigValue& value) {
  if (parameter.type == ParameterType::kString) {
    const auto& values = parameter.values;
    const auto& text = std::get<std::string>(value);
    return values.empty() || std::find(values.begin(), values.end(), text) != values.end() ||
           (parameter.or_integer && is_integer_in_range(parameter, text));
  }
  if (parameter.type == ParameterType::kBool) return true;
  const double number = as_number(value);
  if (!std::isfinite(number) || below(parameter, value)) return false;
  return !parameter.maximum || number <= *parameter.maximum;
}

int edit_distance(const std::string& a, const std::string& b) {
  std::vector<int> row(b.size() + 1);
  std::iota(row.begin(), row.end(), 0);
  for (size_t i = 0; i < a.size(); ++i) {
    int diagonal = row[0]++;
    for (size_t j = 0; j < b.size(); ++j) {
      const int substituted = diagonal + (a[i] == b[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({substituted, row[j] + 1, diagonal + 1});
    }
  }
  return row.back();
}

}  // namespace

std::string to_string(const ConfigValue& value) {
  struct Printer {
    std::string operator()(std::monostate) const { return "unset"; }
    std::string operator()(bool flag) const { return flag ? "true" : "false"; }
    std::string operator()(int64_t number) const { return std::to_string(number); }
    std::string operator()(double number) const {
      // JSON has no infinities, but a program can pass one.
      return std::isfinite(number) ? nlohmann::json(number).dump() : std::to_string(number);
    }
    std::string operator()(const std::string& text) const {
      using nlohmann::json;
      return json(text).dump(-1, ' ', false, json::error_handler_t::replace);
    }
  };
  return std::visit(Printer{}, value);
}

const Parameter* find_parameter(const std::string& name) {
  for (const Parameter& parameter : schema()) {
    if (parameter.name == name || (!parameter.alias.empty() && parameter.alias == name)) {
      return &parameter;
    }
  }
  return nullptr;
}

std::string nearest_name(const std::string& name, const std::vector<std::string>& candidates) {
  const std::string beginning = name.substr(0, 100);  // a long one is like none of them
  return *std::min_element(candidates.begin(), candidates.end(),
                           [&](const std::string& a, const std::string& b) {
                             return edit_distance(beginning, a) < edit_distance(beginning, b);
                           });
}

std::string nearest_parameter(const std::string& name) {
  std::vector<std::string> names;
  for (const Parameter& parameter : schema()) {
    names.push_back(parameter.name);
    if (!parameter.alias.empty()) names.push_back(parameter.alias);
  }
  return nearest_name(name, names);
}

bool is_undocumented_key(const std::string& name) {
  static const std::vector<std::string> keys = {"static_mode",
                                                "fast_mode",
                                                "checkpoint_attentions",
                                                "_match_weights",
                                                "_fp32_grad_accumulation",
                                                "overlapping_allreduce",
                                                "use_times",
                                                "fork"};
  return std::find(keys.begin(), keys.end(), name) != keys.end();
}

std::string expected_values(const Parameter& parameter) {
  if (parameter.type == ParameterType::kBool) return "true or false";
  if (parameter.type == ParameterType::kString) {
    if (parameter.values.empty()) return "a string";
    return "one of " + list_text(parameter) +
           (parameter.or_integer ? " or an integer >= " + number_text(*parameter.minimum) : "");
  }
  std::string text = parameter.type == ParameterType::kInt ? "an integer" : "a number";
  if (!parameter.minimum) return text;
  const std::string minimum = number_text(*parameter.minimum);
  if (parameter.exclusive_minimum) {
    text += " > " + minimum;
    return parameter.maximum ? text + " and <= " + number_text(*parameter.maximum) : text;
  }
  return parameter.maximum ? text + " from " + minimum + " to " + number_text(*parameter.maximum)
                           : text + " >= " + minimum;
}

ConfigValue normalised(const Parameter& parameter, const ConfigValue& value) {
  if (parameter.type == ParameterType::kNumber && std::holds_alternative<int64_t>(value)) {
    return static_cast<double>(std::get<int64_t>(value));
  }
  if (parameter.or_integer && std::holds_alternative<int64_t>(value)) {
    return std::to_string(std::get<int64_t>(value));
  }
  if (parameter.type == ParameterType::kInt && std::holds_alternative<double>(value)) {
    // 5e8 is an integer to JSON; the bound keeps the conversion defined.
    const double number = std::get<double>(value);
    if (number == std::floor(number) && std::abs(number) < 9e18)
      return static_cast<int64_t>(number);
  }
  return value;
}

Refusal value_problem(const Parameter& parameter, const std::string& key, const ConfigValue& given,
                      const std::string& text) {
  const ConfigValue value = normalised(parameter, given);
  const bool right_type = has_right_type(parameter, value);
  if (right_type && in_range(parameter, value)) return std::nullopt;
  const std::string got = printable(text, 100);
  const bool from_a_list = parameter.type == ParameterType::kBool || !parameter.values.empty();
  const bool only_too_large = parameter.own_maximum && right_type && !below(parameter, value);
  if (!parameter.error.empty() && !only_too_large) {
    std::string error = parameter.error;
    c10::ReplaceAll(error, "{key}", key);
    const bool shows_value = c10::ReplaceAll(error, "{value}", got) > 0;
    return error + (shows_value ? " (expected " + expected_values(parameter) : " (got " + got) +
           ")";
  }
  if (from_a_list) {
    return key + " must be a value in: " + list_text(parameter) + ". (got " + got + ")";
  }
  return "expected " + expected_values(parameter) + ", got " + got + ".";
}

Refusal availability_problem(const Parameter& parameter, const ConfigValue& given) {
  const std::string got = to_string(normalised(parameter, given));
  const std::string usual = to_string(parameter.default_value);
  const std::string remedy = std::holds_alternative<std::monostate>(parameter.default_value)
                                 ? "Remove it."
                                 : "Use " + usual + " (the default).";
  if (parameter.tensorflow_only && got != usual) {
    return got + " is TensorFlow-only, and this library is for libtorch. " + remedy;
  }
  return std::nullopt;
}

}  // namespace smp::core
