// SPDX-License-Identifier: Apache-2.0
#include "exported/write_values.h"

#include <ATen/core/ivalue.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <set>
#include <utility>

#include "core/check.h"
#include "exported/enumerations.h"

namespace smp::exported {

using Json = nlohmann::json;

Json tagged(const char* tag, Json value) {
  Json json = Json::object();
  json[tag] = std::move(value);
  return json;
}

Json named_tensor(const std::string& name) { return tagged("as_tensor", {{"name", name}}); }

Json write_real(double value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value > 0 ? "Infinity" : "-Infinity";
  return value;
}

Json write_constant(const c10::IValue& value) {
  if (value.isNone()) return tagged("as_none", true);
  if (value.isBool()) return tagged("as_bool", value.toBool());
  if (value.isInt()) return tagged("as_int", value.toInt());
  if (value.isDouble()) return tagged("as_float", write_real(value.toDouble()));
  if (value.isString()) return tagged("as_string", value.toStringRef());
  return nullptr;
}

Json write_dtype(at::ScalarType dtype) {
  const auto number = number_of(dtype);
  SMP_CHECK_WITH(CaptureError, number.has_value(), "exported programs have no tensors of type ",
                 dtype, ". Convert them to a type that torch.export knows");
  return *number;
}

Json write_device(at::Device device) {
  Json json = {{"type", c10::DeviceTypeName(device.type(), /*lower_case=*/true)},
               {"index", nullptr}};
  if (device.has_index()) json["index"] = device.index();
  return json;
}

Json write_size(const SizeFormula& size, const std::vector<int64_t>& given) {
  if (const auto constant = size.constant()) return tagged("as_int", *constant);
  return tagged("as_expr",
                {{"expr_str", size.to_srepr()}, {"hint", tagged("as_int", size.evaluate(given))}});
}

Json write_meta(const WrittenMeta& meta) {
  return {{"dtype", write_dtype(meta.dtype)},
          {"sizes", meta.sizes},
          {"requires_grad", meta.requires_grad},
          {"device", write_device(meta.device)},
          {"strides", meta.strides},
          {"storage_offset", tagged("as_int", meta.offset)},
          {"layout", kDenseLayout}};
}

Json write_meta(const at::Tensor& tensor) {
  WrittenMeta meta{tensor.scalar_type(), tensor.device(), tensor.requires_grad(), {}, {}};
  for (int64_t size : tensor.sizes()) meta.sizes.push_back(tagged("as_int", size));
  for (int64_t stride : tensor.strides()) meta.strides.push_back(tagged("as_int", stride));
  meta.offset = tensor.storage_offset();
  return write_meta(meta);
}

std::string python_path(const std::string& path) {
  static const std::set<std::string> keywords = {
      "False", "None",     "True",  "and",    "as",   "assert", "async",  "await",    "break",
      "class", "continue", "def",   "del",    "elif", "else",   "except", "finally",  "for",
      "from",  "global",   "if",    "import", "in",   "is",     "lambda", "nonlocal", "not",
      "or",    "pass",     "raise", "return", "try",  "while",  "with",   "yield"};
  std::string result;
  size_t begin = 0;
  while (begin <= path.size()) {
    const size_t end = std::min(path.find('.', begin), path.size());
    const std::string name = path.substr(begin, end - begin);
    result += (begin > 0 ? "." : "") + name + (keywords.count(name) > 0 ? "_" : "");
    begin = end + 1;
  }
  return result;
}

std::string Names::add(const std::string& text) {
  std::string name;
  for (char c : text) {
    const bool is_word = std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_';
    name += is_word ? c : '_';
  }
  while (true) {
    const int count = counts_[name]++;
    if (count == 0) return name;
    const std::string numbered = name + "_" + std::to_string(count);
    if (counts_.emplace(numbered, 1).second) return numbered;
  }
}

}  // namespace smp::exported
