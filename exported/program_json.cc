// SPDX-License-Identifier: Apache-2.0
#include "exported/program_json.h"

#include <limits>

#include "core/check.h"

namespace smp::exported {

core::JsonReader program_json(const nlohmann::json& json, std::string file) {
  return {json, std::move(file), [](const auto& source, const auto& place, const auto& problem) {
            core::fail<CheckpointError>("exported program \"", source, "\" is malformed at ", place,
                                        ": ", problem, ". Write it again by torch.export.save");
          }};
}

std::pair<std::string, core::JsonReader> tagged(const core::JsonReader& place) {
  const nlohmann::json& value = place.value();
  place.expect(value.is_object() && value.size() == 1, "an object with one member, its kind");
  return place.members().front();
}

double real_of(const core::JsonReader& place) {
  if (!place.value().is_string()) return place.number();
  const std::string text = place.text();
  if (text == "Infinity") return std::numeric_limits<double>::infinity();
  if (text == "-Infinity") return -std::numeric_limits<double>::infinity();
  if (text == "NaN") return std::numeric_limits<double>::quiet_NaN();
  place.fail_expected("a number");
}

}  // namespace smp::exported
