// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <stdexcept>

#include "smp/config.h"

/// Ranks whose actions and transfers take as long as they like, and ranks that fail: for tests of
/// results that must not depend on timing, and of the fate of a job.
namespace smp::testing {

/// The number in a variable of the environment.
int64_t number_in(const char* variable, int64_t otherwise);

/// How messages between stages travel.
enum class ChannelKind {
  kSharedMemory,  ///< slots that both ends map, as on one host
  kMessages,      ///< point to point, as between hosts
};

/// The exception of a rank that dies: no further work of it is done.
struct SimulatedDeath : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// A fault on one rank, before the operation (of those that may be delayed) with a number.
struct RankFault {
  enum class Kind {
    kDeath,  ///< it throws a `SimulatedDeath`, there and in all later ones
    kStall,  ///< it does nothing until the job is aborted, as a process that is stopped
  };
  Kind kind = Kind::kDeath;
  int rank = 0;
  int64_t operation = 0;
};

/// The disturbances of ranks.
struct Chaos {
  /// Seed of the delays; each rank draws its own.
  uint64_t seed = 0;
  ChannelKind channels = ChannelKind::kSharedMemory;
  bool delays = true;
  std::optional<RankFault> fault;
};

/// `run_as_threads` with a random delay before every operation of a communicator, every wait, those
/// of its channels and of groups split from it, and every action of a step: mostly none, often up
/// to 2 ms, seldom 20 ms. Channels take the least number of messages ahead with which the schedule
/// gets to its end; those in shared memory have slots for messages sent ahead only: a message that
/// is received is copied out of its slot. `happened` says whether the fault came to pass, also when
/// this throws.
void run_in_chaos(int ranks, const Config& config, const Chaos& chaos,
                  const std::function<void()>& program, bool* happened = nullptr);

}  // namespace smp::testing
