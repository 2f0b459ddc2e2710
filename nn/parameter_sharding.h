// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "comm/sharding.h"
#include "smp/nn/parameter_split.h"

namespace smp::nn {

/// How a parameter lies that the ranks along an axis divide so.
comm::Sharding sharding_of(const ParameterSplit& split, const core::Axis& over);
/// How the first cut, of equal blocks, divides it.
ParameterSplit split_of(const comm::Sharding& sharding);

}  // namespace smp::nn
