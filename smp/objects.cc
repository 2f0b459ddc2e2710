// SPDX-License-Identifier: Apache-2.0
#include "smp/objects.h"

#include <algorithm>

#include "comm/objects.h"
#include "core/check.h"
#include "core/status.h"
#include "runtime/runtime.h"

namespace smp::detail {
namespace {

using runtime::Runtime;

Runtime& runtime_for(const char* call) {
  Runtime& runtime = Runtime::get();
  SMP_CHECK_WITH(UsageError, !runtime.current_step.is_running, call,
                 " was called inside a step function; send objects between steps");
  return runtime;
}

/// Objects of all groups travel in the world: a rank may be called by its number in one group where
/// they are sent and by that in another where they are received.
int world_rank(const runtime::Job& job, const char* call, int rank, CommGroup group) {
  const std::vector<int> members = job.topology().members(group, job.rank());
  SMP_CHECK_WITH(UsageError, rank >= 0 && rank < static_cast<int>(members.size()), call,
                 ": expected a ", to_string(group), " rank in 0 to ", members.size() - 1, ", got ",
                 rank, ".");
  return members[rank];
}

}  // namespace

void send_object(const std::string& bytes, int dest_rank, CommGroup group) {
  const core::CallScope here("smp::send");
  const Runtime& runtime = runtime_for("smp::send");
  comm::send_bytes(*runtime.world(), bytes, {world_rank(runtime, "smp::send", dest_rank, group)});
}

std::string recv_object(int src_rank, CommGroup group) {
  const core::CallScope here("smp::recv_from");
  const Runtime& runtime = runtime_for("smp::recv_from");
  return comm::recv_bytes(*runtime.world(), world_rank(runtime, "smp::recv_from", src_rank, group));
}

void broadcast_object(const std::string& bytes, CommGroup group) {
  const core::CallScope here("smp::broadcast");
  const Runtime& runtime = runtime_for("smp::broadcast");
  std::vector<int> others = runtime.topology().members(group, runtime.rank());
  others.erase(std::find(others.begin(), others.end(), runtime.rank()));
  comm::send_bytes(*runtime.world(), bytes, others);
}

std::vector<std::string> allgather_objects(const std::string& bytes, CommGroup group) {
  const core::CallScope here("smp::allgather");
  return comm::all_gather_bytes(*runtime_for("smp::allgather").group(group), bytes);
}

int this_rank_in(CommGroup group) { return Runtime::get().rank_in(group); }

}  // namespace smp::detail
