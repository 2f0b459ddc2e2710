// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace smp::graph {

/// The partition (rank of the pipeline) that the innermost `PartitionScope` alive on this thread
/// asks for; -1 outside of all.
int current_partition();

/// Operators called on this thread while it lives are to run on `partition`; an inner scope wins.
class PartitionScope {
 public:
  explicit PartitionScope(int partition);
  ~PartitionScope();
  PartitionScope(const PartitionScope&) = delete;
  PartitionScope& operator=(const PartitionScope&) = delete;

 private:
  int outer_;
};

}  // namespace smp::graph
