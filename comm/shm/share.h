// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/ops/empty.h>

#include <cstring>
#include <functional>
#include <memory>
#include <type_traits>
#include <vector>

#include "comm/collective.h"
#include "comm/shm/shared_memory.h"
#include "comm/transport.h"

namespace smp::comm {

/// Runs a collective of a group over messages and returns when it is complete.
using MessageCollectives = std::function<void(const Collective&)>;

/// The values that the ranks of a group of `size` give, by rank.
template <class T>
std::vector<T> gather_values(const MessageCollectives& messages, int size, const T& value) {
  static_assert(std::is_trivially_copyable_v<T>);
  const auto bytes = at::TensorOptions(at::kByte);
  Collective call;
  call.kind = Collective::Kind::kAllGather;
  call.input = at::empty({static_cast<int64_t>(sizeof(T))}, bytes);
  call.output = at::empty({static_cast<int64_t>(sizeof(T)) * size}, bytes);
  std::memcpy(call.input.mutable_data_ptr(), &value, sizeof(T));
  messages(call);
  std::vector<T> values(static_cast<size_t>(size));
  std::memcpy(static_cast<void*>(values.data()), call.output.const_data_ptr(),
              call.output.nbytes());
  return values;
}

/// How the ranks of a group lie on hosts.
struct HostLayout {
  std::vector<std::vector<int>> hosts;  ///< The group's ranks of each host, ascending; by first.
  int host = 0;                         ///< This rank's.
  int local_rank = 0;                   ///< This rank's place there.
  std::vector<ProcessId> processes;     ///< Processes by rank of the group.

  const std::vector<int>& local() const { return hosts[host]; }
  int local_size() const { return static_cast<int>(local().size()); }

  /// Whether the ranks of each host follow each other in the group.
  bool is_contiguous() const;

  /// Whether all ranks of this host are threads of this process.
  bool is_one_process() const;
};

/// Collective over the group.
HostLayout find_hosts(const Transport& transport, const GroupState& group,
                      const MessageCollectives& messages);

/// Memory of `bytes` on each host, which all ranks of the group that are there map: the first of
/// them makes it, and the others open it by way of /proc, or by a descriptor sent through a socket.
/// Null on all ranks when one has not got it; then the log says why. Collective over the group.
std::shared_ptr<SharedMemory> share_memory(const GroupState& group, const HostLayout& layout,
                                           size_t bytes, const MessageCollectives& messages);

}  // namespace smp::comm
