// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <vector>

#include "comm/communicator.h"

namespace smp::comm {

class ThreadWorld;

/// Makes a world of `size` ranks inside this process; element r is for the thread that plays rank
/// r. A sent tensor is copied at once. Nothing runs in the background: a message is moved by
/// whichever of its two threads comes second.
std::vector<CommunicatorPtr> make_thread_world(int size);

/// The same over a world made by the caller, which no other ranks use.
std::vector<CommunicatorPtr> make_thread_world(int size, const std::shared_ptr<ThreadWorld>& world);

}  // namespace smp::comm
