// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

namespace smp::runtime {

/// Before what reads or drops gradients: throws `UsageError` inside a step function, where they are
/// not complete, and takes back what `model->cpu()` has put together. `call` is what the user
/// called. Also without `init`.
void begin_use_of_gradients(const std::string& call);

}  // namespace smp::runtime
