// SPDX-License-Identifier: Apache-2.0
#include "exported/json_place.h"

#include <limits>

#include "core/check.h"
#include "core/text.h"

namespace smp::exported {

bool JsonPlace::has(const std::string& key) const {
  if (!json_->is_object()) return false;
  const auto found = json_->find(key);
  return found != json_->end() && !found->is_null();
}

JsonPlace JsonPlace::at(const std::string& key) const {
  if (!json_->is_object()) expect("an object");
  const auto found = json_->find(key);
  if (found == json_->end()) expect("an object with \"" + key + "\"");
  return {*found, file_, path_.empty() ? key : path_ + "." + core::printable(key)};
}

std::vector<JsonPlace> JsonPlace::elements() const {
  if (!json_->is_array()) expect("a list");
  std::vector<JsonPlace> places;
  places.reserve(json_->size());
  for (size_t i = 0; i < json_->size(); ++i) {
    places.push_back({(*json_)[i], file_, path_ + "[" + std::to_string(i) + "]"});
  }
  return places;
}

std::vector<std::pair<std::string, JsonPlace>> JsonPlace::items() const {
  if (!json_->is_object()) expect("an object");
  std::vector<std::pair<std::string, JsonPlace>> places;
  for (const auto& item : json_->items()) places.emplace_back(item.key(), at(item.key()));
  return places;
}

std::pair<std::string, JsonPlace> JsonPlace::tagged() const {
  if (!json_->is_object() || json_->size() != 1) expect("an object with one member, its kind");
  const std::string tag = json_->begin().key();
  return {tag, at(tag)};
}

std::string JsonPlace::text() const {
  if (!json_->is_string()) expect("a string");
  return json_->get<std::string>();
}

int64_t JsonPlace::integer() const {
  const bool fits = json_->is_number_integer() &&
                    (!json_->is_number_unsigned() ||
                     json_->get<uint64_t>() <= uint64_t{std::numeric_limits<int64_t>::max()});
  if (!fits) expect("an integer of 64 bits");
  return json_->get<int64_t>();
}

bool JsonPlace::boolean() const {
  if (!json_->is_boolean()) expect("true or false");
  return json_->get<bool>();
}

double JsonPlace::real() const {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  if (json_->is_number()) return json_->get<double>();
  if (*json_ == "Infinity") return kInfinity;
  if (*json_ == "-Infinity") return -kInfinity;
  if (*json_ == "NaN") return std::numeric_limits<double>::quiet_NaN();
  expect("a number");
}

void JsonPlace::expect(const std::string& expected) const {
  core::fail<CheckpointError>("exported program \"", file_, "\" is malformed at ",
                              path_.empty() ? "its beginning" : path_, ": expected ", expected,
                              ". Write it again by torch.export.save");
}

}  // namespace smp::exported
