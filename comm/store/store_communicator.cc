// SPDX-License-Identifier: Apache-2.0
#include "comm/store/store_communicator.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <utility>

#include "comm/final_barrier.h"
#include "comm/store/ask_store.h"
#include "comm/store/rendezvous.h"
#include "comm/store/socket_transport.h"
#include "comm/transport_communicator.h"
#include "core/check.h"
#include "core/env.h"
#include "core/text.h"

namespace smp::comm {
namespace {

using std::chrono::milliseconds;

// How much longer than its time-out c10d may take to say that there is no store.
constexpr milliseconds kLateness{1000};

// The worlds of this process: the others learn how it ended.
class LiveWorlds {
 public:
  static LiveWorlds& get() {
    static LiveWorlds* worlds = new LiveWorlds();  // outlives the handler
    return *worlds;
  }

  void add(int rank, const std::shared_ptr<SocketTransport>& transport) {
    std::lock_guard<std::mutex> lock(mutex_);
    worlds_.push_back({rank, transport});
  }

 private:
  struct World {
    int rank;
    std::weak_ptr<SocketTransport> transport;
  };

  LiveWorlds() {
    on_exit([](int status, void*) { LiveWorlds::get().end(status); }, nullptr);
  }

  void end(int status) {
    if (getpid() != process_) {
      return;  // a child's end is not ours
    }
    std::lock_guard<std::mutex> lock(mutex_);
    for (const World& world : worlds_) {
      const auto transport = world.transport.lock();
      if (transport && status == 0) {
        transport->close();
      } else if (transport) {
        transport->abort(world.rank, c10::str("the program ended with exit status ", status));
      }
    }
  }

  const pid_t process_ = getpid();
  std::mutex mutex_;
  std::vector<World> worlds_;
};

c10d::TCPStoreOptions store_options(int port, bool serves, milliseconds timeout) {
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(port);
  options.isServer = serves;
  options.waitWorkers = false;
  options.timeout = timeout;
  return options;
}

auto open_apart(const std::string& host, const c10d::TCPStoreOptions& options) {
  return call_apart([host, options] { return c10::make_intrusive<c10d::TCPStore>(host, options); });
}

// The process's own world.
struct TorchrunJob {
  c10::intrusive_ptr<c10d::Store> store;
  StoreWorld world;
  bool finalized = false;
};

TorchrunJob& job() {
  static TorchrunJob instance;
  return instance;
}

std::string variable(const char* name) {
  const auto value = core::env(name);
  SMP_CHECK_WITH(
      ConfigError, value.has_value(), "RANK and WORLD_SIZE are set, but ", name,
      " is not: expected the variables that torchrun sets (RANK, WORLD_SIZE, MASTER_ADDR "
      "and MASTER_PORT). Set it, or unset RANK and WORLD_SIZE.");
  return *value;
}

int number(const char* name, int least, int most) {
  const std::string text = variable(name);
  char* end = nullptr;
  const long value = std::strtol(text.c_str(), &end, 10);
  SMP_CHECK_WITH(ConfigError, *end == '\0' && value >= least && value <= most,
                 "the environment variable ", name, ": expected a number in ", least, " to ", most,
                 ", got ", core::printable(text, 100), ".");
  return static_cast<int>(value);
}

}  // namespace

CommunicatorPtr make_store_world(c10::intrusive_ptr<c10d::Store> store, int rank, int size,
                                 milliseconds timeout, const std::string& name) {
  return open_store_world(store, rank, size, MeetingTime(timeout), name).world;
}

StoreWorld open_store_world(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                            const MeetingTime& time, const std::string& name) {
  SMP_CHECK_WITH(UsageError, rank >= 0 && rank < size, "make_store_world: expected a rank in 0 to ",
                 size - 1, ", got ", rank, ".");
  Meeting meeting = meet(store, rank, size, time);
  StoreWorld world;
  for (const RankRecord& record : meeting.ranks) {
    world.hosts.push_back(record.host_name);
  }
  world.transport = std::make_shared<SocketTransport>(rank, std::move(meeting));
  LiveWorlds::get().add(rank, world.transport);
  const auto group = world_group(rank, size);
  group->name = name;
  world.world = std::make_shared<TransportCommunicator>(world.transport, group);
  return world;
}

void finish_store_world(const StoreWorld& world) {
  const std::exception_ptr late = final_barrier(*world.world);
  if (world.transport) {
    world.transport->close();
  }
  if (late) {
    std::rethrow_exception(late);
  }
}

c10::intrusive_ptr<c10d::Store> serve_store(milliseconds timeout, int& port) {
  try {
    // The name localhost is not in the /etc/hosts of every host.
    auto store = c10::make_intrusive<c10d::TCPStore>(
        "127.0.0.1", store_options(/*port=*/0, /*serves=*/true, timeout));
    port = store->getPort();
    return store;
  } catch (const c10::Error& error) {
    core::fail<CommError>(
        "no store could be opened, at which the ranks would meet: ", first_line(error),
        ". Look at the limits of this process (ulimit -n) and at its network");
  }
}

c10::intrusive_ptr<c10d::Store> connect_to_store(const std::string& host, int port,
                                                 milliseconds timeout) {
  auto opened = open_apart(host, store_options(port, /*serves=*/false, timeout));
  const std::string where = c10::str("the store of rank 0 at ", host, " port ", port);
  SMP_CHECK_WITH(TimeoutError, opened.wait_for(timeout + kLateness) == std::future_status::ready,
                 where, " has given no answer within ", timeout.count() / 1000.0,
                 " s. Look whether rank 0 is stopped");
  try {
    return opened.get();
  } catch (const c10::Error& error) {
    core::fail<CommError>(where, " could not be reached: ", first_line(error),
                          ". Check that no firewall is between the hosts; SMP_SOCKET_IFNAME on "
                          "rank 0 chooses its network interface");
  }
}

bool under_torchrun() { return core::env("RANK") && core::env("WORLD_SIZE"); }

MeetingPlace meeting_place(int port) {
  constexpr int kMostRanks = 1 << 20;
  MeetingPlace place;
  place.size = number("WORLD_SIZE", 1, kMostRanks);
  place.rank = number("RANK", 0, place.size - 1);
  place.host = variable("MASTER_ADDR");
  place.port = port > 0 ? port : number("MASTER_PORT", 1, 65535);
  return place;
}

c10::intrusive_ptr<c10d::Store> open_torchrun_store(milliseconds timeout, int port) {
  const MeetingPlace place = meeting_place(port);
  const char* const key = port > 0 ? "\"ddp_port\"" : "MASTER_PORT";
  const bool launcher_has_it =
      port == 0 && core::env("TORCHELASTIC_USE_AGENT_STORE").value_or("") == "True";
  const bool serves = place.rank == 0 && !launcher_has_it;
  const std::string where =
      c10::str(" the store at ", place.host, " port ", place.port, " (MASTER_ADDR, ", key, "): ");
  const std::string remedy =
      ". Check that rank 0 has started, is not stopped and has descriptors left for strangers that "
      "connect to its port (ulimit -n), and that its host can be reached.";
  auto opened = open_apart(place.host, store_options(place.port, serves, timeout));
  SMP_CHECK_WITH(TimeoutError, opened.wait_for(timeout + kLateness) == std::future_status::ready,
                 "rank ", place.rank, " has had no answer from", where, "none within ",
                 timeout.count() / 1000.0, " s", remedy);
  try {
    return opened.get();
  } catch (const c10::Error& error) {
    const std::string reason = where + first_line(error);
    SMP_CHECK_WITH(CommError, !serves, "rank 0 cannot open", reason, ". Choose another ", key,
                   " if it is in use.");
    core::fail<CommError>("rank ", place.rank, " cannot reach", reason, remedy);
  }
}

CommunicatorPtr make_torchrun_world(milliseconds timeout, int port) {
  TorchrunJob& job = smp::comm::job();
  SMP_CHECK_WITH(
      UsageError, !job.finalized,
      "make_torchrun_world after finalize_torchrun_world: the processes meet only once.");
  if (!job.world.world) {
    const MeetingTime time(timeout);
    const MeetingPlace place = meeting_place(port);
    job.store = c10::make_intrusive<c10d::PrefixStore>("smp", open_torchrun_store(timeout, port));
    job.world = open_store_world(job.store, place.rank, place.size, time, "world");
  }
  return job.world.world;
}

void finalize_torchrun_world() {
  TorchrunJob& job = smp::comm::job();
  if (!job.world.world || job.finalized) {
    return;
  }
  job.finalized = true;
  finish_store_world(job.world);
}

bool torchrun_world_aborted() { return job().world.transport && job().world.transport->aborted(); }

WorldHosts torchrun_hosts() {
  const auto& [transport, world, hosts] = job().world;
  SMP_CHECK_WITH(UsageError, world != nullptr,
                 "torchrun_hosts needs the world of torchrun's variables. Call "
                 "make_torchrun_world() first.");
  const auto here = hosts.begin() + world->rank();
  return {static_cast<int>(std::count(hosts.begin(), here, *here)),
          static_cast<int>(std::count(hosts.begin(), hosts.end(), *here)), hosts};
}

}  // namespace smp::comm
