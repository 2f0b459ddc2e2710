// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <string>

#include "nn/rewrite/propagate.h"

namespace smp::nn::rewrite {

/// Which parameters to divide.
struct Choice {
  Constraints constraints;
  double whole_us = 0;  ///< predicted with only fixed divisions
  /// The reason for each parameter that could have been divided and is not.
  std::map<graph::ValueId, std::string> refusals;
};

/// True for a parameter that a product or an embedding reads, itself or a view of it.
bool is_weight(const Propagation& propagation, graph::ValueId value);

/// Goes through the weights in the order in which the program uses them. For each it tries to
/// divide it along its dimensions, in one block or in as many as the operators behind it suggest;
/// with each try, weights of other branches that meet this one (`Outcome::wishes`) are divided too
/// where that helps. The try with the shortest predicted time is kept if it is shorter than
/// without, or if it has to be (`insist`); ties go to the first try. Attention whose heads cannot
/// be divided is left alone.
Choice choose(Propagation& propagation, const Constraints& fixed, bool insist);

}  // namespace smp::nn::rewrite
