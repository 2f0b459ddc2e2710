// SPDX-License-Identifier: Apache-2.0
#include "smp/c/output_gradient.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <utility>

#include "core/check.h"
#include "pipeline/observer.h"
#include "runtime/runtime.h"

namespace smp::c {
namespace {

using at::Tensor;
using runtime::Runtime;

/// The function of this thread's scope, and the microbatch that its schedule is at; -1 outside of
/// schedules, while a step is captured or its costs are measured.
struct Current {
  const OutputGradient* function = nullptr;
  int microbatch = -1;
};
thread_local Current current;

/// Notes the microbatch that this thread's schedule is at.
class MicrobatchObserver final : public pipeline::Observer {
 public:
  void on_begin(size_t /*index*/, const pipeline::Action& action) override {
    if (action.is_compute()) current.microbatch = action.microbatch;
  }
};
MicrobatchObserver observer;

Tensor gradient_like(const Tensor& output) {
  return at::empty(output.sizes(), output.options().memory_format(at::MemoryFormat::Contiguous));
}

void ask(const std::vector<Tensor>& outputs, std::vector<Tensor>& gradients) {
  std::vector<Tensor> given, asked;
  for (const Tensor& output : outputs) {
    given.push_back(output.detach().cpu().contiguous());
    asked.push_back(gradient_like(given.back()).zero_());
  }
  (*current.function)(current.microbatch, given, asked);
  for (size_t i = 0; i < gradients.size(); ++i) gradients[i].copy_(asked[i]);
}

std::vector<Tensor> kernel(at::TensorList list) {
  const at::NoGradGuard no_grad;
  const std::vector<Tensor> outputs = list.vec();
  std::vector<Tensor> gradients;
  for (const Tensor& output : outputs) gradients.push_back(gradient_like(output));
  if (outputs.empty() || outputs.front().is_meta()) return gradients;
  if (current.function != nullptr && current.microbatch >= 0) {
    ask(outputs, gradients);
  } else {
    for (const Tensor& gradient : gradients) gradient.zero_();
  }
  return gradients;
}

TORCH_LIBRARY_FRAGMENT(smp, m) { m.def("output_gradients(Tensor[] outputs) -> Tensor[]"); }

// A gradient is a number, whatever gave it: no history goes through it.
TORCH_LIBRARY_IMPL(smp, CompositeImplicitAutograd, m) { m.impl("output_gradients", &kernel); }

}  // namespace

OutputGradientScope::OutputGradientScope(OutputGradient function) : function_(std::move(function)) {
  Runtime& runtime = Runtime::get();
  SMP_CHECK_WITH(UsageError, runtime.config().replay_check() == 0,
                 "a step whose gradients the caller gives cannot run again, as the configuration's "
                 "\"replay_check\" wants it. Leave that at 0");
  SMP_CHECK_WITH(
      UsageError, runtime.batches() == 1,
      "with \"tensor_parallel_degree\" above 1 a rank runs the batches of others, too, of "
      "which a caller that gives gradients knows nothing. Set \"prescaled_batch\": true, "
      "and give all ranks of a tensor-parallel group the same batch");
  current = {&function_, -1};
  runtime.execution.observers.push_back(&observer);
}

OutputGradientScope::~OutputGradientScope() {
  current = {};
  if (!Runtime::exists()) return;
  auto& observers = Runtime::get().execution.observers;
  observers.erase(std::remove(observers.begin(), observers.end(), &observer), observers.end());
}

std::vector<Tensor> output_gradients(const std::vector<Tensor>& outputs) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("smp::output_gradients", "")
                             .typed<std::vector<Tensor>(at::TensorList)>();
  const at::NoGradGuard no_grad;
  return op.call(outputs);
}

}  // namespace smp::c
