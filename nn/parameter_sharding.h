// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "comm/sharding.h"
#include "smp/nn/parameter_split.h"

namespace smp::nn {

/// How a parameter lies that the ranks along an axis divide so.
comm::Sharding sharding_of(const ParameterSplit& split, const core::Axis& over);
/// How the ranks along an axis divide it, in equal blocks.
ParameterSplit split_of(const comm::Sharding& sharding, const core::Axis& over);

}  // namespace smp::nn
