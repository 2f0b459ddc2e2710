// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <cctype>
#include <sstream>
#include <vector>

#include "core/check.h"
#include "core/schema.h"
#include "tools/config_texts.h"

namespace smp::tools {
namespace {

using core::Parameter;
using core::ParameterType;

constexpr const char* kBegin =
    "  // Generated from core/schema_table.cc, to the end of the list: "
    "bazel run //tools:config_files\n";
constexpr const char* kEnd = "  // End of the generated list.\n";
constexpr size_t kColumns = 100;

/// "interleaved_1f1b" as "Interleaved1f1b".
std::string camel_case(const std::string& name) {
  std::string text;
  bool starts = true;
  for (const char letter : name) {
    if (letter != '_') text += static_cast<char>(starts ? std::toupper(letter) : letter);
    starts = letter == '_';
  }
  return text;
}

/// Words in lines that begin with `///`.
std::string comment(const std::string& text) {
  std::istringstream words(text);
  std::string lines;
  std::string line = "  ///";
  for (std::string word; words >> word;) {
    if (line.size() + 1 + word.size() > kColumns) {
      lines += line + "\n";
      line = "  ///";
    }
    line += " " + word;
  }
  return lines + line + "\n";
}

/// `head { body }` on one line if it fits.
std::string function(const std::string& head, const std::string& body) {
  const std::string line = "  " + head + " { " + body + " }\n";
  return line.size() <= kColumns + 1 ? line : "  " + head + " {\n    " + body + "\n  }\n";
}

/// The names are in the order of the types.
std::string type_of(const Parameter& parameter) {
  constexpr std::array kTypes = {"bool", "int64_t", "double", "std::string"};
  return kTypes[static_cast<size_t>(parameter.type)];
}

std::string quoted(const std::string& name) { return "\"" + name + "\""; }

std::string enumeration(const std::string& type, const std::vector<std::string>& values) {
  std::string line;
  std::string lines;
  for (const std::string& value : values) {
    line += (line.empty() ? "k" : ", k") + camel_case(value);
    lines += (lines.empty() ? "    k" : ",\n    k") + camel_case(value);
  }
  const std::string head = "  enum class " + type + " {";
  const std::string whole = head + " " + line + " };\n";
  return whole.size() <= kColumns + 1 ? whole : head + "\n" + lines + "\n  };\n";
}

/// The setter and the getter that call the parameter `name`.
std::string accessors(const Parameter& parameter, const std::string& name) {
  const std::string type = type_of(parameter);
  const std::string moved = type == "std::string" ? "std::move(value)" : "value";
  const std::string set = "return set(" + quoted(name) + ", ";
  std::string text = function("Config& " + name + "(" + type + " value)", set + moved + ");");
  if (parameter.or_integer) {
    text += function("Config& " + name + "(int64_t value)", set + "value);");
  }
  if (parameter.is_optional()) {
    return text + function("std::optional<" + type + "> " + name + "() const",
                           "return get_if_set<" + type + ">(" + quoted(name) + ");");
  }
  return text + function(type + " " + name + "() const",
                         "return std::get<" + type + ">(get(" + quoted(name) + "));");
}

std::string default_text(const Parameter& parameter) {
  if (parameter.is_optional()) return "Unset by default.";
  if (!parameter.default_text.empty()) return "Default: " + parameter.default_text + ".";
  return "Default: " + core::to_string(parameter.default_value) + ".";
}

/// "An integer >= 1." for a number.
std::string range_text(const Parameter& parameter) {
  if (!parameter.minimum || parameter.type == ParameterType::kString) return "";
  std::string text = core::expected_values(parameter) + ".";
  text[0] = static_cast<char>(std::toupper(text[0]));
  return text;
}

std::string entry(const Parameter& parameter) {
  const auto& values = parameter.values;
  std::string text;
  if (values.size() > 1) {
    const std::string type = camel_case(parameter.name);
    text += "  /// The values of `" + parameter.name + "`.\n" + enumeration(type, values);
    text += comment(parameter.doc + " " + default_text(parameter));
    text += function("Config& " + parameter.name + "(" + type + " value)",
                     "return choose(" + quoted(parameter.name) + ", static_cast<size_t>(value));");
  } else {
    text += comment(parameter.doc + " " + range_text(parameter) + " " + default_text(parameter));
  }
  text += accessors(parameter, parameter.name);
  if (!parameter.alias.empty()) {
    text += "  /// The same parameter by its other name.\n" + accessors(parameter, parameter.alias);
  }
  return text + "\n";
}

}  // namespace

std::string config_header(const std::string& header) {
  const size_t begin = header.find(kBegin);
  const size_t end = header.find(kEnd);
  SMP_INTERNAL_ASSERT(begin < end && end != std::string::npos,
                      "smp/config.h lacks the marks of its generated list");
  std::string list = "\n";
  for (const Parameter& parameter : core::schema()) {
    if (!parameter.tensorflow_only) list += entry(parameter);
  }
  return header.substr(0, begin) + kBegin + list + header.substr(end);
}

}  // namespace smp::tools
