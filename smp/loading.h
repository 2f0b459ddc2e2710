#pragma once

#include <ATen/core/Tensor.h>

#include <functional>

#include "smp/runtime.h"

namespace smp {

/// Gives a model's tensor the values that `read` returns, in its own type, if this rank holds it,
/// or its shard; whoever will own a tensor that does not exist yet reads it then. Internal.
void assign(const Runtime& runtime, const at::Tensor& tensor, std::function<at::Tensor()> read);

/// Copies values into models by `load`, after all ranks have agreed to: an error in it leaves the
/// models half loaded, and ends the world. Internal.
void load_values(Runtime& runtime, const std::function<void()>& load);

}  // namespace smp
