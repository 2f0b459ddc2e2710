// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <vector>

#include "comm/communicator.h"

namespace smp::comm {

/// Plays `size` ranks as threads: calls `fn` on each with its communicator and returns when all
/// have ended. When one throws, the world is aborted so that the others end too, and the exception
/// that came first, the cause and not a consequence, is thrown again here. Errors of rank r's
/// thread begin with "[smp rank r]".
///
/// `hosts` makes the ranks pretend to be on different hosts, which share no memory: it has a number
/// for each rank; empty means one host for all.
void run_ranks(int size, const std::function<void(CommunicatorPtr)>& fn,
               const std::vector<int>& hosts = {});

}  // namespace smp::comm
