// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sched.h>

#include <chrono>
#include <cstdint>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "comm/store/socket.h"

namespace smp::comm {

/// The record that a rank gives the others about itself.
struct RankRecord {
  std::string host;       ///< The same for ranks that can share memory, and for no others.
  std::string host_name;  ///< For people, and for the topology: as unequal as `host`.
  std::string address;    ///< Where other hosts reach it.
  uint16_t port = 0;
  cpu_set_t cores{};  ///< Those that it may run on.
};

/// A rank's connections to all others.
struct Meeting {
  std::vector<RankRecord> ranks;
  std::vector<Socket> connections;          ///< Connections by rank; this rank's own is empty.
  c10::intrusive_ptr<c10d::Store> store{};  ///< Store with keys of this meeting only.
};

/// How long ranks wait for each other to come: until `end`, which texts call `timeout`.
struct MeetingTime {
  explicit MeetingTime(std::chrono::milliseconds t)
      : timeout(t), end(std::chrono::steady_clock::now() + t) {}

  std::chrono::milliseconds timeout;
  TimePoint end;
};

/// Meets the other ranks at the store and connects to each. Collective. Every rank throws a
/// `TimeoutError` that names the ranks that have not come in time, and a `CommError` when a rank
/// that has come cannot be reached, another process has come as the same rank, or this one belongs
/// to another job than rank 0 (SMP_JOB_ID or torchrun's TORCHELASTIC_RUN_ID, and the number of
/// ranks).
Meeting meet(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
             const MeetingTime& time);

}  // namespace smp::comm
