// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <optional>
#include <string>

#include "nn/rewrite/factors.h"
#include "nn/rewrite/rule.h"

namespace smp::nn::rewrite {

using RuleTable = std::map<std::string, Rule>;

/// Gives operators of ATen a rule, by their names without "aten::".
void add_rules(RuleTable& rules, const std::vector<const char*>& names, const Rule& rule);

/// The divided argument that the others follow: one that is divided like a stream, if it may; -1:
/// none.
int leading(const Call& call);

/// The rule of an operator whose first argument stays as it is divided: whatever shares the factor
/// is divided so, and other arguments are shared. If it is not, sums of parts go through what is
/// linear. Nothing if that is not legal.
std::optional<Treatment> follow(const Call& call);
/// The same by the layout of another argument; -1: of none.
std::optional<Treatment> follow_from(const Call& call, int leading);
/// The same for an operator of these factors.
std::optional<Treatment> follow_factors(const Call& call, const Factors& factors, int leading = 0);

/// The arguments of such a treatment. Its results are whole, and to be changed.
std::optional<Treatment> ask_along(const Call& call, const Factors& factors, int leading);
/// Asks for an argument in a layout; one that costs communication is wished otherwise.
void ask(const Call& call, int position, const Layout& layout, Treatment& treatment);
/// All whole; the wishes stay.
Treatment refused(const Call& call, const Treatment& treatment);

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
