// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string>

namespace smp::core {

/// Why something cannot be done, as a clause without a full stop that another text can quote:
/// "operator 3 (aten::relu_) computes on the CPU". Nothing where it can be done.
using Refusal = std::optional<std::string>;

}  // namespace smp::core
