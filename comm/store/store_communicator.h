// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "comm/store/rendezvous.h"
#include "comm/world_hosts.h"

namespace c10d {
class Store;
}  // namespace c10d

namespace smp::comm {

/// Forms a world of the `size` processes that call this with the same store and ranks of their own,
/// without MPI: they meet at the store and talk over TCP, and through shared memory where they are
/// on one host. The store's keys must be used by nothing else (`c10d::PrefixStore` gives such
/// ones), and it must live as long as the world makes groups. The same processes may meet there
/// again, each of them as often. Every rank throws a `TimeoutError` that names the ranks that have
/// not come within `timeout`. Errors call the world `name`.
///
/// The world ends for the others when the last communicator of this rank is gone, or the process
/// ends with status 0; further messages that they expect from this rank fail. A process that ends
/// otherwise aborts the world.
CommunicatorPtr make_store_world(c10::intrusive_ptr<c10d::Store> store, int rank, int size,
                                 std::chrono::milliseconds timeout,
                                 const std::string& name = "world");

class SocketTransport;

/// A world that ends before its process does.
struct StoreWorld {
  std::shared_ptr<SocketTransport> transport;  ///< null: a world of one that needs none
  CommunicatorPtr world;
  std::vector<std::string> hosts;  ///< the host name of each rank; hosts of one name get numbers
};

/// Does the work of make_store_world.
StoreWorld open_store_world(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                            const MeetingTime& time, const std::string& name);

/// Ends the world. Collective: waits until all ranks have called it; throws the `CommError` of
/// which final_barrier tells. Returns at once when a rank has aborted. No communicator of it may be
/// used after it.
void finish_store_world(const StoreWorld& world);

/// A store that this process opens for others, on a free `port` of all its addresses; and that
/// store for them. Throw `CommError` when it cannot be opened or reached within `timeout`.
c10::intrusive_ptr<c10d::Store> serve_store(std::chrono::milliseconds timeout, int& port);
c10::intrusive_ptr<c10d::Store> connect_to_store(const std::string& host, int port,
                                                 std::chrono::milliseconds timeout);

/// Where the environment says that processes meet: the variables that torchrun sets.
struct MeetingPlace {
  int rank;          ///< RANK
  int size;          ///< WORLD_SIZE
  std::string host;  ///< MASTER_ADDR
  int port;          ///< MASTER_PORT, or another that the program has chosen
};

/// True when RANK and WORLD_SIZE are set, as by torchrun.
bool under_torchrun();

/// Reads the variables; with a `port` other than 0 that of MASTER_PORT does not count. Throws
/// `ConfigError` when one is missing or is no valid number.
MeetingPlace meeting_place(int port = 0);

/// The store of those processes: the launcher's (TORCHELASTIC_USE_AGENT_STORE), otherwise, and at
/// another `port` than the launcher's, one that rank 0 opens, which must outlive the others' use of
/// it. Throws `ConfigError` for the variables, `CommError` when it cannot be opened or reached
/// within `timeout`.
c10::intrusive_ptr<c10d::Store> open_torchrun_store(std::chrono::milliseconds timeout,
                                                    int port = 0);

/// The world of the processes that torchrun has started, or that have its variables.
/// Collective at the first call; later calls return the same world. Throws as make_store_world.
CommunicatorPtr make_torchrun_world(std::chrono::milliseconds timeout = std::chrono::seconds(300),
                                    int port = 0);

/// Ends that world. Collective: waits until all ranks have called it; throws the `CommError` of
/// which final_barrier tells. Returns at once when the job was aborted. No communicator may be used
/// after it.
void finalize_torchrun_world();

/// True when some rank has called abort() on a communicator of that world, or has died.
bool torchrun_world_aborted();

/// Its hosts; those of one name get numbers. After make_torchrun_world().
WorldHosts torchrun_hosts();

}  // namespace smp::comm
