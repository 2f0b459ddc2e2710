// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "runtime/runtime.h"

namespace smp::runtime {

/// Does the first step's work before it captures: compares the models of all ranks, gives every
/// rank the parameters and buffers of world rank 0 (but for delayed parameters, which are made once
/// they have owners, and for parts of divided ones, which come from the first rank that has the
/// same), settles the seed and the device, and shows the models there (placement.h). Collective
/// over the world. Throws `UsageError` without a model, and when models or kinds of devices differ
/// between ranks.
void prepare_models(Runtime& runtime);

}  // namespace smp::runtime
