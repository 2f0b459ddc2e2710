// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "exported/size_formula.h"

/// Values as the JSON of exported programs has them.
namespace smp::exported {

/// A member of a tagged union: {"as_int": 3}.
nlohmann::json tagged(const char* tag, nlohmann::json value);

/// A tensor as an argument or result of a node.
nlohmann::json named_tensor(const std::string& name);

/// A number, none, a string or a boolean, as an argument: {"as_int": 3}. Null for another value.
nlohmann::json write_constant(const c10::IValue& value);

/// A real number, which may be infinite.
nlohmann::json write_real(double value);

nlohmann::json write_dtype(at::ScalarType dtype);
nlohmann::json write_device(at::Device device);

/// Sizes of tensors; `given` are the dynamic sizes of the inputs.
nlohmann::json write_size(const SizeFormula& size, const std::vector<int64_t>& given);

/// The description of a tensor in a program.
struct WrittenMeta {
  at::ScalarType dtype;
  at::Device device;
  bool requires_grad;
  std::vector<nlohmann::json> sizes;    ///< sizes in the form of `write_size`
  std::vector<nlohmann::json> strides;  ///< the same
  int64_t offset = 0;
};
nlohmann::json write_meta(const WrittenMeta& meta);

/// The same of a tensor with fixed sizes.
nlohmann::json write_meta(const at::Tensor& tensor);

/// A dotted path as Python can read it: a name that is a word of its language gets a "_",
/// "in.weight" becomes "in_.weight".
std::string python_path(const std::string& path);

/// Names in a program, each given once: a text that Python takes for a name, with a number behind
/// it where that was given before.
class Names {
 public:
  std::string add(const std::string& text);

 private:
  std::map<std::string, int> counts_;
};

}  // namespace smp::exported
