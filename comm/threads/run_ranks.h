#pragma once

#include <functional>

#include "comm/communicator.h"

namespace smp::comm {

/// Plays `size` ranks as threads: calls `fn` on each with its communicator and returns when all
/// have ended. When one throws, the world is aborted so that the others end too, and the exception
/// that came first, the cause and not a consequence, is thrown again here. Errors of rank r's
/// thread begin with "[smp rank r]".
void run_ranks(int size, const std::function<void(CommunicatorPtr)>& fn);

}  // namespace smp::comm
