// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <vector>

#include "comm/communicator.h"

namespace smp::comm {

// The same tests run on rank threads and under mpirun; each program links one implementation of
// these two functions.

/// The group sizes that this program tests.
std::vector<int> group_sizes();

/// Calls `body` on each rank of a new group of `size` ranks with a time-out of 30 s.
void on_every_rank(int size, const std::function<void(const CommunicatorPtr&)>& body);

}  // namespace smp::comm
