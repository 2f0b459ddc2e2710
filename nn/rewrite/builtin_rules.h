// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <string>

#include "nn/rewrite/rule.h"

namespace smp::nn::rewrite {

using RuleTable = std::map<std::string, Rule>;

/// Operators that keep elements and give them other places: views, permutations, slices, joins.
RuleTable shape_rules();
/// Operators that work on elements, along dimensions or on the whole of a tensor.
RuleTable math_rules();
/// Products of matrices and embeddings.
RuleTable product_rules();
RuleTable attention_rules();
/// Dropout and losses, which stand for other operators when they are divided.
RuleTable special_rules();

}  // namespace smp::nn::rewrite
