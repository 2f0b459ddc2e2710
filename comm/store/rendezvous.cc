// SPDX-License-Identifier: Apache-2.0
#include "comm/store/rendezvous.h"

#include <sys/stat.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <random>
#include <sstream>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "core/check.h"
#include "core/env.h"
#include "core/host.h"

namespace smp::comm {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

// How often a rank that waits for others looks whether one has given up.
constexpr milliseconds kLookPeriod{500};

// The first message on a connection.
struct Greeting {
  uint64_t world;  // a number that only its ranks know
  int32_t rank;
};

const char* const kTimedOut = "given_up";
std::string rank_key(int rank) { return "rank/" + std::to_string(rank); }

std::vector<uint8_t> to_bytes(const std::string& text) { return {text.begin(), text.end()}; }

std::string from_bytes(const std::vector<uint8_t>& bytes) { return {bytes.begin(), bytes.end()}; }

// What tells one PID or network namespace from another; 0 where the kernel does not say.
uint64_t namespace_number(const char* path) {
  struct stat status {};
  return stat(path, &status) == 0 ? status.st_ino : 0;
}

// Ranks share memory by way of /proc or of a socket, so both namespaces must be the same.
std::string host_identity() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  return c10::str(boot, " ", namespace_number("/proc/self/ns/pid"), " ",
                  namespace_number("/proc/self/ns/net"));
}

// The host that the store is on, where it is one of the network.
std::string host_of(c10d::Store& store) {
  if (auto* prefix = dynamic_cast<c10d::PrefixStore*>(&store)) {
    return host_of(*prefix->getUnderlyingNonPrefixStore());
  }
  const auto* tcp = dynamic_cast<const c10d::TCPStore*>(&store);
  return tcp ? tcp->getHost() : "";
}

std::string to_text(const RankRecord& record) {
  const auto* cores = reinterpret_cast<const char*>(&record.cores);
  return c10::str(record.host, "\n", record.host_name, "\n", record.address, "\n", record.port,
                  "\n") +
         std::string(cores, sizeof record.cores);
}

RankRecord to_record(const std::string& text) {
  RankRecord record;
  std::istringstream in(text);
  std::string port;
  std::getline(in, record.host);
  std::getline(in, record.host_name);
  std::getline(in, record.address);
  std::getline(in, port);
  record.port = static_cast<uint16_t>(std::stoi(port));
  in.read(reinterpret_cast<char*>(&record.cores), sizeof record.cores);
  return record;
}

std::string list_of(const std::vector<int>& ranks) {
  return c10::str(ranks.size() == 1 ? "rank " : "ranks ", c10::Join(", ", ranks));
}

std::vector<int> missing_ranks(c10d::Store& store, int size) {
  std::vector<int> missing;
  for (int rank = 0; rank < size; ++rank) {
    if (!store.check({rank_key(rank)})) {
      missing.push_back(rank);
    }
  }
  return missing;
}

bool all_come(c10d::Store& store, const std::vector<std::string>& keys, milliseconds wait) {
  try {
    store.wait(keys, wait);
    return true;
  } catch (const c10::DistStoreError&) {
    return false;  // out of time
  }
}

// All ranks throw the same text. The first leaves it in the store and waits a moment before it
// throws, since the store may be in its process.
[[noreturn]] void give_up(c10d::Store& store, int size, milliseconds timeout) {
  const std::vector<int> missing = missing_ranks(store, size);
  const std::string message = c10::str(
      list_of(missing), " of ", size, missing.size() == 1 ? " has" : " have", " not come within ",
      timeout.count() / 1000.0,
      " s. Start as many processes as WORLD_SIZE says, each with a RANK of its own and the "
      "same MASTER_ADDR and MASTER_PORT.");
  store.set(kTimedOut, to_bytes(message));
  std::this_thread::sleep_for(2 * kLookPeriod);
  core::fail<TimeoutError>(message);
}

void wait_for_all(c10d::Store& store, int size, milliseconds timeout) {
  std::vector<std::string> keys;
  for (int rank = 0; rank < size; ++rank) {
    keys.push_back(rank_key(rank));
  }
  const auto deadline = Clock::now() + timeout;
  while (!all_come(store, keys, kLookPeriod)) {
    if (store.check({kTimedOut})) {
      core::fail<TimeoutError>(from_bytes(store.get(kTimedOut)));
    }
    if (Clock::now() >= deadline) {
      give_up(store, size, timeout);
    }
  }
}

// Two hosts of one name are told apart: the topology goes by names.
void make_names_unequal(std::vector<RankRecord>& ranks) {
  std::map<std::string, std::vector<std::string>> hosts_of_name;
  for (RankRecord& record : ranks) {
    std::vector<std::string>& hosts = hosts_of_name[record.host_name];
    auto found = std::find(hosts.begin(), hosts.end(), record.host);
    if (found == hosts.end()) {
      found = hosts.insert(hosts.end(), record.host);
    }
    if (found != hosts.begin()) {
      record.host_name += c10::str(" (", found - hosts.begin() + 1, ")");
    }
  }
}

// The number that the ranks of this world greet each other with; rank 0 draws it.
uint64_t world_number(c10d::Store& store, int rank) {
  if (rank == 0) {
    std::random_device random;
    const uint64_t number = (uint64_t{random()} << 32) | random();
    store.set("number", to_bytes(std::to_string(number)));
  }
  return std::stoull(from_bytes(store.get("number")));
}

// Connects to the ranks below this one.
void connect_to_lower_ranks(const Greeting& own, Meeting& meeting, TimePoint deadline) {
  const RankRecord& here = meeting.ranks[own.rank];
  for (int peer = 0; peer < own.rank; ++peer) {
    const RankRecord& there = meeting.ranks[peer];
    try {
      Descriptor socket =
          connect_to(there.host == here.host ? "127.0.0.1" : there.address, there.port, deadline);
      // If the peer is gone by now, its connection tells when it is read.
      write_all(socket, &own, sizeof own, deadline);
      meeting.connections[peer] = std::move(socket);
    } catch (const CommError& error) {
      throw CommError(c10::str(core::error_prefix(), "rank ", own.rank, " cannot reach rank ", peer,
                               " on host ", there.host_name, ": ", error.what_without_backtrace()));
    }
  }
}

// Takes the connections of the ranks above this one. Connections of others, which do not know the
// world's number, are dropped.
void accept_higher_ranks(const Greeting& own, const Descriptor& listener, Meeting& meeting,
                         TimePoint deadline) {
  std::vector<int> missing(meeting.ranks.size() - own.rank - 1);
  for (size_t i = 0; i < missing.size(); ++i) {
    missing[i] = own.rank + 1 + static_cast<int>(i);
  }
  while (!missing.empty()) {
    std::optional<Descriptor> socket = accept_from(listener, deadline);
    SMP_CHECK_WITH(TimeoutError, socket.has_value(), "rank ", own.rank,
                   " was not connected to by ", list_of(missing),
                   ". Look at the output of these ranks.");
    Greeting theirs{};
    const auto patience = std::min(deadline, Clock::now() + std::chrono::seconds(5));
    if (!read_all(*socket, &theirs, sizeof theirs, patience) || theirs.world != own.world) {
      continue;
    }
    const auto found = std::find(missing.begin(), missing.end(), theirs.rank);
    if (found != missing.end()) {
      meeting.connections[theirs.rank] = std::move(*socket);
      missing.erase(found);
    }
  }
}

}  // namespace

Meeting meet(c10d::Store& store, int rank, int size, milliseconds timeout) {
  const auto deadline = Clock::now() + timeout;
  const Descriptor listener = listen_on_free_port();
  const RankRecord own{
      host_identity(), core::host_name(),
      address_of_this_host(core::env("SMP_SOCKET_IFNAME").value_or(""), host_of(store)),
      port_of(listener), core::cores_of_this_process()};
  store.set(rank_key(rank), to_bytes(to_text(own)));
  wait_for_all(store, size, timeout);

  Meeting meeting;
  for (int peer = 0; peer < size; ++peer) {
    meeting.ranks.push_back(to_record(from_bytes(store.get(rank_key(peer)))));
  }
  make_names_unequal(meeting.ranks);
  meeting.connections.resize(size);
  Greeting greeting{};
  greeting.world = world_number(store, rank);
  greeting.rank = rank;
  connect_to_lower_ranks(greeting, meeting, deadline);
  accept_higher_ranks(greeting, listener, meeting, deadline);
  return meeting;
}

}  // namespace smp::comm
