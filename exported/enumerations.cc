// SPDX-License-Identifier: Apache-2.0
#include "exported/enumerations.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <string>

namespace smp::exported {
namespace {

template <class T>
T read(const core::JsonReader& place, const std::map<int64_t, T>& values, const char* expected) {
  const auto found = values.find(place.integer());
  if (found == values.end()) place.fail_expected(expected);
  return found->second;
}

template <class T>
std::optional<int64_t> number_in(const std::map<int64_t, T>& values, T value) {
  const auto found = std::find_if(values.begin(), values.end(),
                                  [&](const auto& entry) { return entry.second == value; });
  return found == values.end() ? std::nullopt : std::optional(found->first);
}

const std::map<int64_t, at::ScalarType>& dtypes() {
  static const std::map<int64_t, at::ScalarType> values = {{1, at::kByte},
                                                           {2, at::kChar},
                                                           {3, at::kShort},
                                                           {4, at::kInt},
                                                           {5, at::kLong},
                                                           {6, at::kHalf},
                                                           {7, at::kFloat},
                                                           {8, at::kDouble},
                                                           {9, at::kComplexHalf},
                                                           {10, at::kComplexFloat},
                                                           {11, at::kComplexDouble},
                                                           {12, at::kBool},
                                                           {13, at::kBFloat16},
                                                           {28, at::kUInt16},
                                                           {29, at::kFloat8_e4m3fn},
                                                           {30, at::kFloat8_e5m2},
                                                           {31, at::kFloat8_e4m3fnuz},
                                                           {32, at::kFloat8_e5m2fnuz},
                                                           {33, at::kFloat8_e8m0fnu},
                                                           {34, at::kUInt32},
                                                           {35, at::kUInt64}};
  return values;
}

const std::map<int64_t, at::MemoryFormat>& memory_formats() {
  static const std::map<int64_t, at::MemoryFormat> values = {{1, at::MemoryFormat::Contiguous},
                                                             {2, at::MemoryFormat::ChannelsLast},
                                                             {3, at::MemoryFormat::ChannelsLast3d},
                                                             {4, at::MemoryFormat::Preserve}};
  return values;
}

}  // namespace

at::ScalarType read_dtype(const core::JsonReader& place) {
  return read(place, dtypes(), "the number of a known data type");
}

at::Layout read_layout(const core::JsonReader& place) {
  static const std::map<int64_t, at::Layout> values = {{kDenseLayout, at::kStrided}};
  return read(place, values, "the layout of dense tensors, 7");
}

at::MemoryFormat read_memory_format(const core::JsonReader& place) {
  return read(place, memory_formats(), "the number of a known memory format");
}

at::Device read_device(const core::JsonReader& place) {
  std::string name = place.at("type").text();
  if (place.has("index")) name += ":" + std::to_string(place.at("index").integer());
  try {
    return at::Device(name);
  } catch (const c10::Error&) {
    place.fail_expected("a device that this libtorch knows");
  }
}

std::optional<int64_t> number_of(at::ScalarType dtype) { return number_in(dtypes(), dtype); }

std::optional<int64_t> number_of(at::MemoryFormat format) {
  return number_in(memory_formats(), format);
}

}  // namespace smp::exported
