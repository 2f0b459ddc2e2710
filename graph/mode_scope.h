#pragma once

#include <c10/core/InferenceMode.h>

#include <optional>

#include "graph/graph.h"

namespace smp::graph {

/// Sets recorded modes for this thread, and restores the thread's own at the end.
class ModeScope {
 public:
  explicit ModeScope(const ExecutionMode& mode);
  ~ModeScope();
  ModeScope(const ModeScope&) = delete;
  ModeScope& operator=(const ModeScope&) = delete;

 private:
  ExecutionMode before_;
  std::optional<c10::InferenceMode> inference_;
};

}  // namespace smp::graph
