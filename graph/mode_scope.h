// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <optional>

#include "graph/default_dtype.h"
#include "graph/graph.h"

namespace smp::graph {

/// Sets recorded modes, whatever the thread's own are, and restores those at the end.
class ModeScope {
 public:
  explicit ModeScope(const ExecutionMode& mode);
  ~ModeScope();
  ModeScope(const ModeScope&) = delete;
  ModeScope& operator=(const ModeScope&) = delete;

 private:
  ExecutionMode before_;
  std::optional<c10::InferenceMode> inference_;
  std::optional<c10::impl::ForceDispatchKeyGuard> keys_;
  std::optional<DefaultDtypeScope> default_dtype_;
};

}  // namespace smp::graph
