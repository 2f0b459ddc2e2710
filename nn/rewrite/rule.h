// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "nn/rewrite/call.h"

namespace smp::nn::rewrite {

/// Says how an operator runs on the parts that a rank has, given how its arguments lie at present;
/// nothing if it needs them whole. It is asked when an argument is divided or a partial sum, must
/// depend on the call alone, and promises, for the layouts that it returns:
///  - on each rank's part of the arguments (a whole or shared one is there as it is) the operator
///    computes that rank's part of the results (for `partial`: terms whose sum is the result);
///  - its gradients, likewise, are those of the layouts (`Layout::Kind` says which).
using Rule = std::function<std::optional<Treatment>(const Call&)>;

/// Lets `rule` decide for an operator: "ns::name", for all overloads, or "ns::name.overload". It
/// comes before the rules of this library. Call it on every rank before the first step.
void register_rule(const std::string& operator_name, Rule rule);

/// The rule for an operator; null if there is none.
Rule rule_of(const graph::Operator& op);

/// True if it is a registered one, whose promise is all that is known of the operator.
bool is_promised(const graph::Operator& op);

/// The names under which an operator is found in tables, the first that is there:
/// "ns::name.overload" and "ns::name", without the underscore of one that works in place. None for
/// overloads that are given the tensor of their result.
std::vector<std::string> names_of(const graph::Operator& op);

/// Each element of the results follows from one element of each argument, after broadcasting: the
/// rule of `mul`, `gelu` or `where`. For `register_rule`.
std::optional<Treatment> elementwise(const Call& call);

/// The first argument is worked on along its last `count` dimensions, the others hold numbers for
/// these (weights, biases): the rule of `layer_norm`. For `register_rule`.
std::optional<Treatment> along_last(const Call& call, int count);

/// The dimensions that the constant `argument` names (all, if it is None) are worked along, and
/// stay (or stay with size 1) unless `keepdim` or the result's sizes say otherwise: the rule of
/// `softmax` and `sum`. For `register_rule`.
std::optional<Treatment> along_dims(const Call& call, const char* argument);

}  // namespace smp::nn::rewrite
