// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>

#include "comm/communicator.h"
#include "smp/config.h"

/// Ranks whose actions and transfers take as long as they like: for tests of what must not depend
/// on timing.
namespace smp::testing {

/// How messages between stages travel.
enum class ChannelKind {
  kSharedMemory,  ///< slots that both ends map, as on one host
  kMessages,      ///< point to point, as between hosts
};

/// What is done to ranks.
struct Chaos {
  /// Of the delays; each rank draws its own.
  uint64_t seed = 0;
  ChannelKind channels = ChannelKind::kSharedMemory;
};

/// The same communicator with a random delay before every operation and every wait, its own and
/// those of its channels and of groups split from it: mostly none, often up to 2 ms, seldom 20 ms.
/// Channels in shared memory have slots for what is sent ahead only: a message that is received is
/// copied out of its slot.
comm::CommunicatorPtr with_delays(comm::CommunicatorPtr communicator, const Chaos& chaos);

/// `run_as_threads` with such communicators, a delay before each action of a step, and channels
/// that take the least number of messages ahead with which the schedule gets to its end.
void run_in_chaos(int ranks, const Config& config, const Chaos& chaos,
                  const std::function<void()>& program);

}  // namespace smp::testing
