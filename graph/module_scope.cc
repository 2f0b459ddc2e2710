// SPDX-License-Identifier: Apache-2.0
#include "graph/module_scope.h"

#include <utility>

namespace smp::graph {
namespace {

thread_local const RunningModule* innermost = nullptr;

}  // namespace

const RunningModule* running_module() { return innermost; }

ModuleScope::ModuleScope(const RunningModule& module) : outer_(std::exchange(innermost, &module)) {}

ModuleScope::~ModuleScope() { innermost = outer_; }

}  // namespace smp::graph
