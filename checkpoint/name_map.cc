// SPDX-License-Identifier: Apache-2.0
#include "smp/name_map.h"

#include <utility>

#include "core/check.h"

namespace smp {

NameMap& NameMap::rename(std::string from, std::string to, Transform transform) {
  rules_.push_back({Rule::Kind::kName, std::move(from), std::move(to), transform});
  return *this;
}

NameMap& NameMap::prefix(std::string from, std::string to, Transform transform) {
  rules_.push_back({Rule::Kind::kPrefix, std::move(from), std::move(to), transform});
  return *this;
}

NameMap& NameMap::pattern(const std::string& from, std::string to, Transform transform) {
  return add_pattern({Rule::Kind::kPattern, from, std::move(to), transform});
}

NameMap& NameMap::ignore(const std::string& expression) {
  return add_pattern({Rule::Kind::kIgnore, expression, ""});
}

NameMap& NameMap::add_pattern(Rule rule) {
  try {
    rule.expression = std::regex(rule.from);
  } catch (const std::regex_error& error) {
    core::fail<UsageError>(
        "a name map has a rule for \"", rule.from,
        "\": expected a regular expression, got one with an error: ", error.what());
  }
  rules_.push_back(std::move(rule));
  return *this;
}

std::optional<NameMap::Target> NameMap::apply(const std::string& name) const {
  for (const Rule& rule : rules_) {
    switch (rule.kind) {
      case Rule::Kind::kName:
        if (name == rule.from) return Target{rule.to, rule.transform};
        break;
      case Rule::Kind::kPrefix:
        if (name.rfind(rule.from, 0) == 0) {
          return Target{rule.to + name.substr(rule.from.size()), rule.transform};
        }
        break;
      case Rule::Kind::kPattern: {
        std::smatch match;
        if (std::regex_match(name, match, rule.expression)) {
          return Target{match.format(rule.to), rule.transform};
        }
        break;
      }
      case Rule::Kind::kIgnore:
        if (std::regex_match(name, rule.expression)) return std::nullopt;
        break;
    }
  }
  return Target{name, Transform::kNone};
}

}  // namespace smp
