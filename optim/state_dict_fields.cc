// SPDX-License-Identifier: Apache-2.0
#include "optim/state_dict_fields.h"

#include <ATen/core/ivalue.h>

#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "core/check.h"
#include "core/text.h"

namespace smp::optim {
namespace {

using nlohmann::json;

constexpr const char* kFloatKey = "float";

json json_of_float(double value) {
  if (std::isfinite(value)) {
    return value;
  }
  return {{kFloatKey, std::isnan(value) ? "nan" : value > 0 ? "inf" : "-inf"}};
}

double special_float(const json& value) {
  const json named = value.is_object() ? value.value(kFloatKey, json()) : json();
  const std::string name = named.is_string() ? named.get<std::string>() : "";
  SMP_CHECK_WITH(CheckpointError, name == "nan" || name == "inf" || name == "-inf",
                 "optimizer state: expected a number, text, array or {\"float\": \"inf\"}, got ",
                 core::printable(value.dump(), 100), ". Use another checkpoint.");
  const double infinity = std::numeric_limits<double>::infinity();
  return name == "nan" ? std::nan("") : name == "inf" ? infinity : -infinity;
}

json json_of(const std::string& key, const c10::IValue& value) {
  if (value.isNone()) {
    return nullptr;
  }
  if (value.isBool()) {
    return value.toBool();
  }
  if (value.isInt()) {
    return value.toInt();
  }
  if (value.isDouble()) {
    return json_of_float(value.toDouble());
  }
  if (value.isString()) {
    return value.toStringRef();
  }
  SMP_CHECK_WITH(UsageError, value.isTuple(), "cannot save optimizer field \"", key,
                 "\": expected a tensor, bool, integer, float, string, none or tuple of these, "
                 "got ",
                 value.tagKind(), ". Serialise it as one of these.");
  json result = json::array();
  for (const c10::IValue& element : value.toTupleRef().elements()) {
    result.push_back(json_of(key, element));
  }
  return result;
}

c10::IValue ivalue_of(const json& value) {
  switch (value.type()) {
    case json::value_t::null:
      return {};
    case json::value_t::boolean:
      return value.get<bool>();
    case json::value_t::number_integer:
    case json::value_t::number_unsigned:
      return value.get<int64_t>();
    case json::value_t::number_float:
      return value.get<double>();
    case json::value_t::string:
      return value.get<std::string>();
    case json::value_t::array: {
      std::vector<c10::IValue> elements;
      for (const json& element : value) {
        elements.push_back(ivalue_of(element));
      }
      return c10::ivalue::Tuple::create(std::move(elements));
    }
    default:
      return special_float(value);
  }
}

// Gives the module of an archive, which can then be read while it is written: a saved one holds
// copies of all tensors and checksums. Naming a private member in an explicit instantiation is
// legal C++.
const torch::jit::Module& module_of(const torch::serialize::OutputArchive& archive);

template <torch::jit::Module torch::serialize::OutputArchive::*module>
struct ModuleOf {
  friend const torch::jit::Module& module_of(const torch::serialize::OutputArchive& archive) {
    return archive.*module;
  }
};

template struct ModuleOf<&torch::serialize::OutputArchive::module_>;

/// An archive cannot be read before it was saved; this saves it to memory.
torch::serialize::InputArchive reopen(torch::serialize::OutputArchive& archive) {
  std::string bytes;
  archive.save_to([&](const void* data, size_t size) {
    bytes.append(static_cast<const char*>(data), size);
    return size;
  });
  torch::serialize::InputArchive result;
  result.load_from(bytes.data(), bytes.size());
  return result;
}

}  // namespace

Fields read_archive(const torch::serialize::OutputArchive& archive) {
  Fields fields;
  for (const auto& [key, value] : module_of(archive).named_attributes(/*recurse=*/false)) {
    if (!value.isTensor()) {
      fields.scalars[key] = json_of(key, value);
    } else if (value.toTensor().defined()) {
      fields.tensors[key] = value.toTensor().detach();
    }
  }
  return fields;
}

torch::serialize::InputArchive make_archive(const Fields& fields) {
  torch::serialize::OutputArchive archive;
  for (const auto& [key, tensor] : fields.tensors) {
    archive.write(key, c10::IValue(tensor));
  }
  for (const auto& [key, value] : fields.scalars.items()) {
    archive.write(key, ivalue_of(value));
  }
  return reopen(archive);
}

}  // namespace smp::optim
