// SPDX-License-Identifier: Apache-2.0
#include "graph/constant_json.h"

#include <ATen/core/jit_type.h>

#include <array>
#include <cmath>
#include <limits>
#include <string>
#include <utility>

namespace smp::graph {
namespace {

using core::JsonReader;
using Json = nlohmann::ordered_json;

/// JSON has no infinity and no NaN; masks are filled with the former.
Json number_to_json(double number) {
  if (std::isfinite(number)) return number;
  return {{"double", std::isnan(number) ? "nan" : number > 0 ? "inf" : "-inf"}};
}

double special_number(const JsonReader& in) {
  const std::string name = in.text();
  if (name == "inf") return std::numeric_limits<double>::infinity();
  if (name == "-inf") return -std::numeric_limits<double>::infinity();
  if (name == "nan") return std::numeric_limits<double>::quiet_NaN();
  in.fail_expected("\"inf\", \"-inf\" or \"nan\"");
}

double number(const JsonReader& in) {
  return in.value().is_object() ? special_number(in.at("double")) : in.number();
}

c10::TypePtr element_type(const JsonReader& in) {
  static const std::array<c10::TypePtr, 6> kTypes = {
      c10::IntType::get(),    c10::FloatType::get(),   c10::BoolType::get(),
      c10::StringType::get(), c10::ComplexType::get(), c10::NumberType::get()};
  const std::string name = in.text();
  for (const c10::TypePtr& type : kTypes) {
    if (name == type->str()) return type;
  }
  in.fail_expected("a type of elements such as \"int\"");
}

}  // namespace

Json constant_to_json(const c10::IValue& value) {
  if (value.isBool()) return value.toBool();
  if (value.isInt()) return value.toInt();
  if (value.isDouble()) return number_to_json(value.toDouble());
  if (value.isString()) return value.toStringRef();
  if (value.isDevice()) return {{"device", value.toDevice().str()}};
  if (value.isComplexDouble()) {
    const auto number = value.toComplexDouble();
    return {{"complex", {number_to_json(number.real()), number_to_json(number.imag())}}};
  }
  if (!value.isList()) return nullptr;
  Json elements = Json::array();
  const c10::List<c10::IValue> list = value.toList();
  for (const c10::IValue& element : list.vec()) {
    elements.push_back(constant_to_json(element));
    if (elements.back().is_null()) return nullptr;
  }
  return {{"list", list.elementType()->str()}, {"elements", std::move(elements)}};
}

c10::IValue constant_of(const JsonReader& in) {
  if (in.value().is_null()) return {};
  if (in.value().is_boolean()) return in.boolean();
  if (in.value().is_string()) return in.text();
  if (in.value().is_number_integer()) return in.integer();
  if (in.value().is_number()) return in.number();
  if (const auto text = in.find("double")) return special_number(*text);
  if (const auto name = in.find("device")) return device_of(*name);
  if (const auto parts = in.find("complex")) {
    return c10::complex<double>(number(parts->at(0)), number(parts->at(1)));
  }
  c10::impl::GenericList list(element_type(in.at("list")));
  for (const JsonReader& element : in.at("elements").elements()) {
    list.push_back(constant_of(element));
  }
  return list;
}

at::Device device_of(const JsonReader& in) {
  try {
    return at::Device(in.text());
  } catch (const c10::Error&) {
    in.fail_expected("a device such as \"cpu\"");
  }
}

}  // namespace smp::graph
