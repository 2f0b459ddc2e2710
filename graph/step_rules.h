// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "graph/location.h"
#include "graph/trace.h"
#include "graph/traced_call.h"

namespace smp::graph {

class Capture;

// The rules for step functions: without them the graph of a run would not be what the function does
// in each microbatch. Each function throws a `CaptureError` where a rule is broken.

/// A call that is about to be captured.
void check_call(const TracedCall& call, Capture& capture, const Location& location);
void check_writes(const Operator& op, const Capture& capture, const Location& location);
/// The call has made its argument itself into `result`.
void check_shape(const TracedCall& call, const at::Tensor& argument, const at::Tensor& result,
                 const Location& location);
/// The operator would bring data of `tensors` to the host, for which the function waits.
[[noreturn]] void refuse_host_read(const std::string& name, const std::vector<at::Tensor>& tensors,
                                   const Location& location);
/// TorchScript's interpreter has called the operator, unless the name is empty.
void check_torch_script(const std::string& name, const Location& location);

/// A parameter or buffer that the function uses.
void check_registered(const TensorTable::Entry& entry, const Location& location);
/// A tensor made outside, used as an argument of `op` unless that is null. `is_new`: it becomes a
/// constant of a new graph.
void check_constant(const at::Tensor& tensor, const c10::OperatorHandle* op, bool is_new,
                    const TraceOptions& options, const Location& location);
/// The tensor requires a gradient, or not, unlike when an operator returned it.
void check_changed_by_hand(const at::Tensor& tensor, const Location& location);

}  // namespace smp::graph
