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

/// A c10d backend over a communicator that nothing else uses; `name` is its name in c10d.
///
/// Has all collectives of c10d on dense tensors of the CPU, and of other devices by way of host
/// memory (all-reduce, broadcast, all-gather, reduce-scatter, reduce, gather, scatter, all-to-all,
/// barrier; coalesced forms too) with SUM, AVG of floating point, MIN, MAX, PRODUCT, BAND, BOR and
/// BXOR, and send and recv, also from any rank; anything else throws with its name. Tensors with
/// permuted dimensions are copied. Reductions are in rank order. A work completes when it is waited
/// for or asked, and in the background once its future is asked for; those of send and recv have
/// none. The communicator's time-out applies to every wait (setTimeout changes it) but to those
/// that are given one of their own.
///
/// Include <torch/csrc/distributed/c10d/Backend.hpp> to use the result.
c10::intrusive_ptr<c10d::Backend> make_backend(CommunicatorPtr group, const std::string& name);

/// The backend "smddp": of the `size` processes that make it with the same store, as
/// `make_store_world` says. c10d demands this of a backend's creator, so new groups are worlds of
/// their own, and other backends may be in use at the same time. `timeout` is that of meeting and
/// of every later wait; errors call the group `group`. Collective over its processes.
c10::intrusive_ptr<c10d::Backend> make_smddp_backend(c10::intrusive_ptr<c10d::Store> store,
                                                     int rank, int size,
                                                     std::chrono::milliseconds timeout,
                                                     const std::string& group = "world");

}  // namespace smp::comm
