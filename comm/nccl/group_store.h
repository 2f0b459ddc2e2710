// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "comm/communicator.h"

namespace smp::comm {

/// The store through which the ranks of a group find each other when their devices connect. Rank 0
/// serves it; the others reach it by the address of rank 0's host (of the interface that
/// SMP_SOCKET_IFNAME names, if that is set), or over the loopback if all are on one host.
/// Collective. Throws `CommError` where the named interface has no address, and when rank 0
/// cannot be reached within the group's time-out.
c10::intrusive_ptr<c10d::Store> make_group_store(Communicator& host);

}  // namespace smp::comm
