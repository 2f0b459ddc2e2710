// SPDX-License-Identifier: Apache-2.0
#include "nn/rewrite/saved_for_backward.h"

#include <set>

namespace smp::nn::rewrite {
namespace {

using Names = std::set<std::string>;

/// Operators that are linear in their arguments, or without a gradient.
bool keeps_nothing(const std::string& name) {
  static const Names names = {"aten::_to_copy",    "aten::_unsafe_view", "aten::add",
                              "aten::alias",       "aten::cat",          "aten::concat",
                              "aten::copy",        "aten::cumsum",       "aten::detach",
                              "aten::embedding",   "aten::empty_like",   "aten::expand",
                              "aten::fill",        "aten::flatten",      "aten::full_like",
                              "aten::masked_fill", "aten::mean",         "aten::movedim",
                              "aten::neg",         "aten::ones_like",    "aten::repeat",
                              "aten::reshape_as",  "aten::rsub",         "aten::squeeze",
                              "aten::stack",       "aten::sub",          "aten::sum",
                              "aten::swapaxes",    "aten::swapdims",     "aten::tril",
                              "aten::triu",        "aten::type_as",      "aten::unbind",
                              "aten::unflatten",   "aten::view_as",      "aten::where",
                              "aten::zero",        "aten::zeros_like",   "aten::split_with_sizes"};
  return names.count(name) > 0 || is_rearrangement(name);
}

/// Operators whose derivative follows from their results.
bool keeps_results(const std::string& name) {
  static const Names names = {"aten::_safe_softmax", "aten::elu",       "aten::exp",
                              "aten::log_softmax",   "aten::relu",      "aten::rsqrt",
                              "aten::sigmoid",       "aten::softmax",   "aten::sqrt",
                              "aten::tanh",          "aten::reciprocal"};
  return names.count(name) > 0;
}

/// Each of two operands serves the gradient of the other.
SavedForBackward operands(const Call& call, int a, int b) {
  SavedForBackward kept;
  if (call.has_gradient(b)) kept.arguments.push_back(a);
  if (call.has_gradient(a)) kept.arguments.push_back(b);
  return kept;
}

SavedForBackward all_arguments(const Call& call) {
  SavedForBackward kept;
  for (size_t i = 0; i < call.tensors().size(); ++i) kept.arguments.push_back(static_cast<int>(i));
  return kept;
}

}  // namespace

SavedForBackward saved_by(const Call& call) {
  const std::string& name = call.base_name();
  bool any_gradient = false;
  for (size_t i = 0; i < call.tensors().size(); ++i) {
    any_gradient |= call.has_gradient(static_cast<int>(i));
  }
  SavedForBackward kept;
  if (!any_gradient || call.results().empty() || keeps_nothing(name)) return kept;
  if (keeps_results(name)) {
    kept.results = {0};
    return kept;
  }
  if (name == "aten::dropout") {
    kept.mask = call.is_set("train") && call.constant("p").toDouble() > 0;
    return kept;
  }
  if (name == "aten::scaled_dot_product_attention") {
    kept = all_arguments(call);
    kept.results = {0};
    return kept;
  }
  const bool adds = name == "aten::addmm" || name == "aten::baddbmm";
  if (adds) return operands(call, 1, 2);
  if (is_product(name) || (name == "aten::mul" && call.tensors().size() == 2)) {
    return operands(call, 0, 1);
  }
  const bool by_number = name == "aten::mul" || name == "aten::div";
  if (by_number && call.tensors().size() == 1) return kept;
  if (name == "aten::layer_norm" || name == "aten::rms_norm" || name == "aten::group_norm") {
    kept.arguments = {0};
    return kept;
  }
  return all_arguments(call);
}

}  // namespace smp::nn::rewrite
