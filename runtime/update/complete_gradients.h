// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

namespace smp::runtime {

class Model;
struct CurrentStep;

/// Must be called before gradients are read or dropped: throws `UsageError` inside a step function,
/// where they are not complete, and takes back the layers that `model->cpu()` has put together.
/// `call` is the user's call, for errors. Also without `init`.
void begin_use_of_gradients(const std::string& call);

/// Drops the gradients of a model's parameters. Throws `UsageError` inside a step function.
void zero_grad(const Model& model);

/// Throws `UsageError` between steps whose gradients add up: no checkpoint holds their sums. `call`
/// is the user's call, for errors.
void check_nothing_adds_up(const CurrentStep& step, const std::string& call);

}  // namespace smp::runtime
