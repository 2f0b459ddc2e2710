// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "runtime/runtime.h"

namespace smp::runtime {

/// The first parameter of which replicas hold other bits, as a sentence without a full stop; empty
/// if there is none. Looks at parameters that this rank owns and has whole. Collective over the
/// replicas.
std::string differing_weight(const Runtime& runtime);

}  // namespace smp::runtime
