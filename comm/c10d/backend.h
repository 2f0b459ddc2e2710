// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <string>

#include "comm/communicator.h"

namespace c10d {
class Backend;
class Store;
}  // namespace c10d

namespace smp::comm {

/// A c10d backend over a communicator that nothing else uses; `name` is what c10d calls it.
///
/// Has all collectives of c10d on contiguous CPU tensors (all-reduce, broadcast, all-gather,
/// reduce-scatter, reduce, gather, scatter, all-to-all, barrier; coalesced forms too) with SUM, AVG
/// of floating point, MIN, MAX, PRODUCT, BAND, BOR and BXOR, and send and recv; anything else
/// throws with its name. Reductions are in rank order. Works of collectives complete in the
/// background and have futures; those of send and recv have none. The communicator's time-out
/// applies to every wait (setTimeout changes it), whatever time-out the call's options name.
///
/// Include <torch/csrc/distributed/c10d/Backend.hpp> to use the result.
c10::intrusive_ptr<c10d::Backend> make_backend(CommunicatorPtr group, const std::string& name);

/// The backend "smddp": of the `size` processes that make it with the same store, as
/// `make_store_world` says. This is what c10d asks of a backend's creator, so new groups are worlds
/// of their own, and other backends may be in use at the same time. `timeout` is that of meeting
/// and of every later wait. Collective over the processes of the group.
c10::intrusive_ptr<c10d::Backend> make_smddp_backend(c10::intrusive_ptr<c10d::Store> store,
                                                     int rank, int size,
                                                     std::chrono::milliseconds timeout);

}  // namespace smp::comm
