#pragma once

#include <string>
#include <utility>

#include "nn/rewrite/rule.h"

namespace smp {

/// Says how an operator of your own runs on the parts of tensors that the ranks of a
/// tensor-parallel group have: "ns::name", for all its overloads, or "ns::name.overload". To be
/// called on every rank before the first step; it comes before the rules of this library. Without a
/// rule an operator gets whole tensors. `nn::rewrite::Rule` says what a rule promises, and
/// `nn::rewrite::elementwise` is one. In place of SMP's `smp.tp_register`, which replaces modules.
///
/// Example:
/// \code
///   smp::tp_register("my::swish", smp::nn::rewrite::elementwise);
/// \endcode
inline void tp_register(const std::string& operator_name, nn::rewrite::Rule rule) {
  nn::rewrite::register_rule(operator_name, std::move(rule));
}

}  // namespace smp
