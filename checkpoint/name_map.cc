// SPDX-License-Identifier: Apache-2.0
#include "smp/name_map.h"

#include <algorithm>
#include <set>
#include <utility>

#include "core/check.h"
#include "core/json.h"
#include "core/json_reader.h"
#include "core/text.h"

namespace smp {
namespace {

using core::JsonReader;

constexpr const char* kFormat = "smp-name-map";

/// Where in a name the values of a placeholder end: for each place, the longest that begins there
/// and is followed as `rest` allows, or 0. One pass, since files may have any names.
std::vector<size_t> ends_of_values(const std::string& name, bool is_number,
                                   const std::vector<bool>& rest) {
  std::vector<size_t> ends(name.size() + 1, 0);
  size_t end = 0;
  for (size_t i = name.size(); i-- > 0;) {
    const bool is_digit = '0' <= name[i] && name[i] <= '9';
    if (is_number && !is_digit) {
      end = 0;
    } else if (end == 0 && rest[i + 1]) {
      end = i + 1;
    }
    ends[i] = end;
  }
  return ends;
}

/// The places of a name where the text is, and a value of the placeholder after it.
std::vector<bool> places_before(const std::string& text, const std::string& name,
                                const std::vector<size_t>& ends) {
  std::vector<bool> places(ends.size(), false);
  for (size_t i = 0; i + text.size() <= name.size(); ++i) {
    places[i] = ends[i + text.size()] != 0 && name.compare(i, text.size(), text) == 0;
  }
  return places;
}

bool begins_and_ends(const std::string& name, const std::string& begin, const std::string& end) {
  return name.size() >= std::max(begin.size(), end.size()) &&
         name.compare(0, begin.size(), begin) == 0 &&
         name.compare(name.size() - end.size(), end.size(), end) == 0;
}

/// A name or a list of them; nothing: none.
std::vector<std::string> names_in(const JsonReader& rule, const std::string& key) {
  const auto side = rule.find(key);
  if (!side) return {};
  if (side->value().is_string()) return {side->text()};
  std::vector<std::string> names;
  for (size_t i = 0; i < side->size(); ++i) names.push_back(side->at(i).text());
  return names;
}

Transform transform_in(const JsonReader& rule) {
  const auto transform = rule.find("transform");
  if (!transform) return Transform::kNone;
  if (transform->text() != "transpose") transform->fail_expected("\"transpose\"");
  return Transform::kTranspose;
}

}  // namespace

NameMap NameMap::from_file(const std::string& path) {
  const auto document = core::parse_json(core::read_file(path, "the name map"), path);
  const JsonReader root(document, path);
  const auto format = root.at("format");
  if (format.text() != kFormat) format.fail_expected(c10::str("\"", kFormat, "\""));
  NameMap map;
  if (const auto prefix = root.find("optional_prefix")) map.optional_prefix(prefix->text());
  const auto rules = root.at("rules");
  for (size_t i = 0; i < rules.size(); ++i) {
    const auto rule = rules.at(i);
    try {
      map.add(names_in(rule, "theirs"), names_in(rule, "ours"), transform_in(rule));
    } catch (const UsageError& error) {
      rule.fail(core::text_without_prefix(error), "");
    }
  }
  return map;
}

NameMap& NameMap::rename(const std::string& theirs, const std::string& ours, Transform transform) {
  return add({theirs}, {ours}, transform);
}

NameMap& NameMap::join(const std::vector<std::string>& theirs, const std::string& ours,
                       Transform transform) {
  return add(theirs, {ours}, transform);
}

NameMap& NameMap::split(const std::string& theirs, const std::vector<std::string>& ours,
                        Transform transform) {
  return add({theirs}, ours, transform);
}

NameMap& NameMap::ignore(const std::string& theirs) { return add({theirs}, {}); }

NameMap& NameMap::omit(const std::string& ours) { return add({}, {ours}); }

NameMap& NameMap::optional_prefix(std::string prefix) {
  prefix_ = std::move(prefix);
  return *this;
}

NameMap::Match NameMap::of_theirs(const std::string& name) const {
  if (const auto found = find(name, &Rule::theirs)) return *found;
  if (const auto found = find(prefix_ + name, &Rule::theirs)) return *found;
  return {{name}, {name}};
}

NameMap::Match NameMap::of_ours(const std::string& name) const {
  return find(name, &Rule::ours).value_or(Match{{name}, {name}});
}

std::optional<NameMap::Match> NameMap::find(const std::string& name,
                                            std::vector<Pattern> Rule::*side) const {
  for (const Rule& rule : rules_) {
    const auto& patterns = rule.*side;
    for (size_t i = 0; i < patterns.size(); ++i) {
      const auto values = match(patterns[i], name);
      if (!values) continue;
      return Match{fill(rule.theirs, *values), fill(rule.ours, *values), rule.transform, i};
    }
  }
  return std::nullopt;
}

NameMap& NameMap::add(const std::vector<std::string>& theirs, const std::vector<std::string>& ours,
                      Transform transform) {
  const auto sides =
      core::printable(c10::str("[", c10::Join(", ", theirs), "] -> [", c10::Join(", ", ours), "]"));
  SMP_CHECK_WITH(
      UsageError, !(theirs.empty() && ours.empty()) && std::min(theirs.size(), ours.size()) <= 1,
      "a name map has the rule ", sides, ": expected one name on one side at least, got ",
      theirs.size(), " and ", ours.size(), ". Make several rules of it");
  Rule rule{{}, {}, transform};
  std::set<std::set<std::string>> placeholders;
  for (const auto& [names, patterns] : {std::pair{&theirs, &rule.theirs}, {&ours, &rule.ours}}) {
    for (const std::string& name : *names) {
      const Pattern& pattern = patterns->emplace_back(parse(name));
      placeholders.emplace(pattern.placeholders.begin(), pattern.placeholders.end());
    }
  }
  SMP_CHECK_WITH(UsageError, placeholders.size() == 1, "a name map has the rule ", sides,
                 ": expected the same placeholders in all its names, got others. Name what is the "
                 "same alike");
  rules_.push_back(std::move(rule));
  return *this;
}

NameMap::Pattern NameMap::parse(const std::string& text) {
  Pattern pattern{text};
  size_t begin = 0;
  for (size_t open = text.find('{'); open != std::string::npos; open = text.find('{', begin)) {
    const size_t close = text.find('}', open);
    const auto name = text.substr(open + 1, std::min(close, text.size()) - open - 1);
    const bool is_new = std::find(pattern.placeholders.begin(), pattern.placeholders.end(), name) ==
                        pattern.placeholders.end();
    SMP_CHECK_WITH(UsageError, close != std::string::npos && !name.empty() && is_new,
                   "a name map has the name \"", core::printable(text),
                   "\": expected placeholders as {layer} or {rest*}, each once, got \"{",
                   core::printable(name), "\". Correct the name");
    pattern.literals.push_back(text.substr(begin, open - begin));
    pattern.placeholders.push_back(name);
    begin = close + 1;
  }
  pattern.literals.push_back(text.substr(begin));
  return pattern;
}

std::optional<NameMap::Values> NameMap::match(const Pattern& pattern, const std::string& name) {
  if (!begins_and_ends(name, pattern.literals.front(), pattern.literals.back()))
    return std::nullopt;
  const size_t count = pattern.placeholders.size();
  if (count == 0) return name == pattern.text ? std::optional(Values()) : std::nullopt;
  // From the end: `rest` are the places from which the rest of the pattern fits the rest of the
  // name.
  std::vector<std::vector<size_t>> ends(count);
  std::vector<bool> rest(name.size() + 1, false);
  rest[name.size() - pattern.literals.back().size()] = true;
  for (size_t k = count; k-- > 0;) {
    ends[k] = ends_of_values(name, /*is_number=*/pattern.placeholders[k].back() != '*', rest);
    rest = places_before(pattern.literals[k], name, ends[k]);
  }
  if (!rest[0]) return std::nullopt;
  Values values;
  size_t at = 0;
  for (size_t k = 0; k < count; ++k) {
    const size_t value = at + pattern.literals[k].size();
    at = ends[k][value];
    values[pattern.placeholders[k]] = name.substr(value, at - value);
  }
  return values;
}

std::vector<std::string> NameMap::fill(const std::vector<Pattern>& patterns, const Values& values) {
  std::vector<std::string> names;
  for (const Pattern& pattern : patterns) {
    std::string& name = names.emplace_back();
    for (size_t k = 0; k < pattern.placeholders.size(); ++k) {
      name += pattern.literals[k] + values.at(pattern.placeholders[k]);
    }
    name += pattern.literals.back();
  }
  return names;
}

}  // namespace smp
