// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

namespace smp::runtime {

/// For what reads or drops gradients: throws `UsageError` inside a step function, where they are
/// not complete. `call` is what the user called. Also without `init`.
void check_gradients_complete(const std::string& call);

}  // namespace smp::runtime
