// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "comm/communicator.h"

namespace smp::comm {

/// Sends a byte string to each of `destinations` and returns when all have taken it.
void send_bytes(Communicator& group, const std::string& bytes,
                const std::vector<int>& destinations);

/// Takes the next byte string that `source` sends with send_bytes.
std::string recv_bytes(Communicator& group, int source);

}  // namespace smp::comm
