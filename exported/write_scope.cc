// SPDX-License-Identifier: Apache-2.0
#include "exported/write_scope.h"

#include <algorithm>
#include <utility>

#include "core/check.h"

namespace smp::exported {
namespace {

using graph::ValueId;
using Json = nlohmann::json;

Json named_number(const std::string& name) { return tagged("as_sym_int", {{"as_name", name}}); }

SizeFormula times_one(const std::vector<int>& exponents) { return {{{exponents, 1}}}; }

}  // namespace

WriteScope::WriteScope(const ExportRequest& request, const ExportPlan& plan,
                       const NodeWriter& nodes, Names& names)
    : request_(request), plan_(plan), node_writer_(nodes), names_(names) {}

WriteScope::WriteScope(WriteScope& outer)
    : request_(outer.request_),
      plan_(outer.plan_),
      node_writer_(outer.node_writer_),
      names_(outer.names_),
      outer_(&outer) {}

void WriteScope::define(ValueId value, const std::string& name) {
  tensors_[plan_.first_of(value)] = name;
  tensor_values_[name] = node_writer_.meta(value);
}

void WriteScope::define_unread(const std::string& name, const Json& meta) {
  tensor_values_[name] = meta;
}

std::string WriteScope::tensor(ValueId value) {
  const ValueId first = plan_.first_of(value);
  const auto known = tensors_.find(first);
  if (known != tensors_.end()) return known->second;
  SMP_INTERNAL_ASSERT(outer_ != nullptr, "value ", value, " of \"", request_.file,
                      "\" is read before it is made");
  const std::string name = outer_->tensor(first);
  define(first, name);
  add_input(named_tensor(name));
  operands_.push_back(named_tensor(name));
  return name;
}

std::string WriteScope::number(const SizeFormula& size) {
  const auto known = numbers_.find(size);
  if (known != numbers_.end()) return known->second;
  if (outer_ == nullptr) return compute(size);
  const std::string name = outer_->number(size);
  define_number(size, name);
  add_input(named_number(name));
  operands_.push_back(named_number(name));
  return name;
}

void WriteScope::define_number(const SizeFormula& size, const std::string& name) {
  numbers_[size] = name;
  number_values_[name] = write_size(size, request_.grid.sizes(0));
}

/// Computes a size by nodes: a sum from its first terms and the last, a product from its first
/// factors and the last.
std::string WriteScope::compute(const SizeFormula& size) {
  const auto last = std::prev(size.terms.end());
  const auto& [exponents, factor] = *last;
  if (size.terms.size() > 1) {
    SizeFormula rest = size;
    rest.terms.erase(exponents);
    return binary("add", rest, {{*last}}, size);
  }
  const SizeFormula product = times_one(exponents);
  if (factor != 1)
    return binary("mul", product, {{{std::vector<int>(exponents.size(), 0), factor}}}, size);
  const auto last_power =
      std::find_if(exponents.rbegin(), exponents.rend(), [](int p) { return p > 0; });
  const auto symbol = static_cast<size_t>(exponents.rend() - last_power) - 1;
  std::vector<int> one(exponents.size(), 0), others = exponents;
  one[symbol] = 1;
  --others[symbol];
  if (one == exponents) return sized_axis(symbol);
  return binary("mul", times_one(others), times_one(one), size);
}

/// The size itself, which an input has.
std::string WriteScope::sized_axis(size_t dynamic_size) {
  const auto axis =
      std::find_if(request_.axes.begin(), request_.axes.end(),
                   [&](const ExportRequest::Axis& a) { return a.size == dynamic_size; });
  SMP_INTERNAL_ASSERT(axis != request_.axes.end(), "a dynamic size that no input has");
  const std::string input = tensor(request_.graph().inputs[axis->input]);
  const std::string name = names_.add("sym_size_int");
  std::vector<int> exponents(request_.sizes.size(), 0);
  exponents[dynamic_size] = 1;
  add(make_node("torch.ops.aten.sym_size.int", name,
                Json::array({positional("self", named_tensor(input)),
                             positional("dim", tagged("as_int", axis->axis))}),
                Json::array({named_number(name)}), Json::object()));
  define_number(times_one(exponents), name);
  return name;
}

std::string WriteScope::binary(const char* op, const SizeFormula& a, const SizeFormula& b,
                               const SizeFormula& result) {
  Json inputs = Json::array({positional("a", operand(a)), positional("b", operand(b))});
  const std::string name = names_.add("sym_" + std::string(op));
  add(make_node("_operator." + std::string(op), name, std::move(inputs),
                Json::array({named_number(name)}), Json::object()));
  define_number(result, name);
  return name;
}

Json WriteScope::operand(const SizeFormula& size) {
  if (const auto constant = size.constant()) return tagged("as_int", *constant);
  return named_number(number(size));
}

Json WriteScope::finish(std::vector<Json> outputs) const {
  return {{"inputs", inputs_},
          {"outputs", std::move(outputs)},
          {"nodes", nodes_},
          {"tensor_values", tensor_values_},
          {"sym_int_values", number_values_},
          {"sym_bool_values", Json::object()},
          {"sym_float_values", Json::object()},
          {"custom_obj_values", Json::object()},
          {"is_single_tensor_return", false}};
}

}  // namespace smp::exported
