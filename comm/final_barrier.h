// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <exception>

#include "comm/communicator.h"

namespace smp::comm {

/// The barrier at the end of a job. Patient for twice the group's time-out, so that ranks that wait
/// for one that has ended too early say so first. Returns the `CommError` of this rank, of which
/// all have been told, or null: where all have come, or the job was aborted before.
std::exception_ptr final_barrier(Communicator& world);

}  // namespace smp::comm
