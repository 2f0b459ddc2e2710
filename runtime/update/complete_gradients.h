// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

namespace smp::runtime {

/// Must be called before gradients are read or dropped: throws `UsageError` inside a step function,
/// where they are not complete, and takes back the layers that `model->cpu()` has put together.
/// `call` is the user's call, for errors. Also without `init`.
void begin_use_of_gradients(const std::string& call);

}  // namespace smp::runtime
