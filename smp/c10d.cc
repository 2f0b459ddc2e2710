// SPDX-License-Identifier: Apache-2.0
#include "smp/c10d.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "comm/c10d/backend.h"
#include "comm/c10d/process_group.h"
#include "comm/exit_gate.h"

namespace smp::smddp {

c10::intrusive_ptr<c10d::Backend> make_backend(const c10::intrusive_ptr<c10d::Store>& store,
                                               int rank, int size,
                                               std::chrono::milliseconds timeout,
                                               const std::string& group) {
  return comm::make_smddp_backend(store, rank, size, timeout, group);
}

void before_interpreter_ends() { comm::ExitGate::get().close(); }

c10::intrusive_ptr<c10d::ProcessGroup> make_process_group(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
    std::chrono::milliseconds timeout) {
  return comm::make_smddp_process_group(store, rank, size, timeout);
}

c10::intrusive_ptr<c10d::ProcessGroup> make_process_group(std::chrono::milliseconds timeout) {
  return comm::make_smddp_process_group(timeout);
}

}  // namespace smp::smddp
