#include "graph/mode_scope.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>

namespace smp::graph {
namespace {

void set_autocast(const ExecutionMode& mode) {
  at::autocast::set_autocast_enabled(at::kCPU, mode.autocast_cpu);
  at::autocast::set_autocast_enabled(at::kCUDA, mode.autocast_cuda);
  at::autocast::set_autocast_dtype(at::kCPU, mode.autocast_cpu_dtype);
  at::autocast::set_autocast_dtype(at::kCUDA, mode.autocast_cuda_dtype);
}

}  // namespace

ModeScope::ModeScope(const ExecutionMode& mode) : before_(ExecutionMode::current()) {
  if (mode.inference) inference_.emplace(true);
  at::GradMode::set_enabled(mode.grad);
  set_autocast(mode);
}

ModeScope::~ModeScope() {
  set_autocast(before_);
  inference_.reset();
  at::GradMode::set_enabled(before_.grad);
}

}  // namespace smp::graph
