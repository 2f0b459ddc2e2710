// SPDX-License-Identifier: Apache-2.0
#include "comm/store/rendezvous.h"

#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <map>
#include <numeric>
#include <optional>
#include <random>
#include <sstream>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "comm/store/ask_store.h"
#include "core/check.h"
#include "core/env.h"
#include "core/host.h"
#include "core/text.h"

namespace smp::comm {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

// How often a rank that waits for others looks whether one has given up.
constexpr milliseconds kLookPeriod{500};

// How long one pauses at most before it asks the store again.
constexpr milliseconds kLongestPause{100};

// The first message on a connection.
struct Greeting {
  uint64_t world;  // a number that only its ranks know
  int32_t rank;
};

// How long those that wait at the store may take to say for whom.
constexpr milliseconds kGrace{3000};

// How long a connection may keep its greeting back; where so many do that there is no place for
// another, each takes a file descriptor, the ones that came first only for a moment.
constexpr milliseconds kPatience{5000}, kShortPatience{200};
constexpr size_t kMostNewcomers = 64;

using StorePtr = c10::intrusive_ptr<c10d::Store>;

// Keys of the store, whatever the meeting.
const char* const kJob = "job";
const char* const kRefused = "refused";
std::string process_key(int rank) { return "process/" + std::to_string(rank); }

// Keys of one meeting.
const char* const kTimedOut = "given_up";
std::string rank_key(int rank) { return "rank/" + std::to_string(rank); }

std::vector<uint8_t> to_bytes(const std::string& text) { return {text.begin(), text.end()}; }

std::string from_bytes(const std::vector<uint8_t>& bytes) { return {bytes.begin(), bytes.end()}; }

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

template <class Number>
bool read_number(const std::string& text, Number& number) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  return error == std::errc{} && end == text.data() + text.size();
}

RankRecord to_record(int rank, const std::string& text) {
  RankRecord record;
  std::istringstream in(text);
  std::string port;
  std::getline(in, record.host);
  std::getline(in, record.host_name);
  std::getline(in, record.address);
  std::getline(in, port);
  in.read(reinterpret_cast<char*>(&record.cores), sizeof record.cores);
  SMP_CHECK_WITH(CommError, in && read_number(port, record.port) && record.port != 0, "what rank ",
                 rank,
                 " has left in the store is no address of a rank. Something "
                 "else uses the store: choose another MASTER_PORT, or give it keys of its own.");
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

// Whether all keys are there within `wait`; takes out those that are. Asks again and again, for one
// at a time, since c10d logs two lines for each wait of its own that ends without.
bool all_come(c10d::Store& store, std::vector<std::string>& missing, milliseconds wait) {
  const TimePoint end = Clock::now() + wait;
  milliseconds pause{1};
  while (!missing.empty()) {
    if (store.check({missing.back()})) {
      missing.pop_back();
      continue;
    }
    if (Clock::now() >= end) {
      return false;
    }
    std::this_thread::sleep_for(pause);
    pause = std::min(2 * pause, kLongestPause);
  }
  return true;
}

// The job that a process and its meetings belong to.
std::string job_of_this_process(int size) {
  const std::string id =
      core::env("SMP_JOB_ID").value_or(core::env("TORCHELASTIC_RUN_ID").value_or(""));
  return c10::str(size, " ranks of job ", core::printable(id));
}

uint64_t draw_number() {
  std::random_device random;
  return (uint64_t{random()} << 32) | random();
}

// A name that no other process gives itself.
std::string name_of_this_process() {
  static const uint64_t number = draw_number();
  return c10::str("process ", getpid(), " on host ", core::host_name(), ", number ", number);
}

// All ranks throw the same text. The first leaves it in the store and waits a moment before it
// throws, since the store may be in its process.
[[noreturn]] void give_up(c10d::Store& store, const std::vector<int>& missing, int size,
                          const MeetingTime& time) {
  const std::string message = c10::str(
      list_of(missing), " of ", size, missing.size() == 1 ? " has" : " have", " not come within ",
      time.timeout.count() / 1000.0,
      " s. Start as many processes as WORLD_SIZE says, each with a RANK of its own and the "
      "same MASTER_ADDR and MASTER_PORT.");
  store.set(kTimedOut, to_bytes(message));
  std::this_thread::sleep_for(2 * kLookPeriod);
  core::fail<TimeoutError>(message);
}

void check_refused(c10d::Store& job) {
  if (job.check({kRefused})) {
    core::fail<CommError>(from_bytes(job.get(kRefused)));
  }
}

// Rank 0 says which job it is, and no rank of another joins.
void check_job(c10d::Store& job, int rank, int size, const MeetingTime& time) {
  const std::string own = job_of_this_process(size);
  if (rank == 0) {
    job.set(kJob, to_bytes(own));
    return;
  }
  std::vector<std::string> missing{kJob};
  while (!all_come(job, missing, kLookPeriod)) {
    if (Clock::now() >= time.end) {
      give_up(job, {0}, size, time);
    }
  }
  const std::string theirs = from_bytes(job.get(kJob));
  SMP_CHECK_WITH(CommError, own == theirs, "rank ", rank, " is one of ", own,
                 ", but rank 0, which it meets at the store, is one of ", theirs,
                 ". Give each job a MASTER_PORT of its own, and all its ranks the same WORLD_SIZE "
                 "and SMP_JOB_ID.");
}

// One process is a rank. The others are told, since they cannot know which of two is theirs.
void claim_rank(c10d::Store& job, int rank) {
  const std::string own = name_of_this_process();
  const std::string first =
      from_bytes(job.compareSet(process_key(rank), std::vector<uint8_t>(), to_bytes(own)));
  if (first == own) {
    return;
  }
  const std::string two = c10::str(first, ", and ", own);
  const std::string message = c10::str("two processes have come as rank ", rank, ": ", two,
                                       ". Give each job a MASTER_PORT of its own, and each process "
                                       "a RANK of its own.");
  job.set(kRefused, to_bytes(message));
  std::this_thread::sleep_for(2 * kLookPeriod);  // see above
  core::fail<CommError>(message);
}

void wait_for_all(c10d::Store& job, c10d::Store& store, int size, const MeetingTime& time) {
  std::vector<std::string> missing;
  for (int rank = 0; rank < size; ++rank) {
    missing.push_back(rank_key(rank));
  }
  while (!all_come(store, missing, kLookPeriod)) {
    check_refused(job);
    if (store.check({kTimedOut})) {
      core::fail<TimeoutError>(from_bytes(store.get(kTimedOut)));
    }
    if (Clock::now() >= time.end) {
      give_up(store, missing_ranks(store, size), size, time);
    }
  }
  check_refused(job);
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
    store.set("number", to_bytes(std::to_string(draw_number())));
  }
  uint64_t number = 0;
  SMP_CHECK_WITH(CommError, read_number(from_bytes(store.get("number")), number),
                 "the number of the world that rank 0 has left in the store is none. Something "
                 "else uses the store: choose another MASTER_PORT, or give it keys of its own.");
  return number;
}

// The news that a rank gets at the store.
struct Encounter {
  std::vector<RankRecord> ranks;
  uint64_t number;
  StorePtr store;
};

// A world of one. torch gives such groups of several processes one name, and with it one store.
Encounter meet_nobody(const StorePtr& store, const RankRecord& own) {
  const uint64_t number = draw_number();
  return {{own}, number, c10::make_intrusive<c10d::PrefixStore>(c10::str("alone/", number), store)};
}

// Each process counts its meetings at a store, so that their entries there are not read again.
Encounter find_ranks(const StorePtr& store, const RankRecord& own, int rank, int size,
                     const MeetingTime& time) {
  const auto attempt = core::env("TORCHELASTIC_RESTART_COUNT").value_or("0");
  const StorePtr job = c10::make_intrusive<c10d::PrefixStore>("attempt/" + attempt, store);
  check_job(*job, rank, size, time);
  claim_rank(*job, rank);
  const int64_t meeting = job->add(c10::str("meetings/", rank), 1);
  Encounter found;
  found.store = c10::make_intrusive<c10d::PrefixStore>(c10::str("meeting/", meeting), job);
  found.store->set(rank_key(rank), to_bytes(to_text(own)));
  wait_for_all(*job, *found.store, size, time);
  for (int peer = 0; peer < size; ++peer) {
    found.ranks.push_back(to_record(peer, from_bytes(found.store->get(rank_key(peer)))));
  }
  found.number = world_number(*found.store, rank);
  return found;
}

// Connects to the ranks below this one.
void connect_to_lower_ranks(const Greeting& own, Meeting& meeting, TimePoint deadline) {
  for (int peer = 0; peer < own.rank; ++peer) {
    const RankRecord& there = meeting.ranks[peer];
    try {
      Socket socket = connect_to(there.address, there.port, deadline);
      // If the peer is gone by now, its connection tells when it is read.
      write_all(socket, &own, sizeof own, deadline);
      meeting.connections[peer] = std::move(socket);
    } catch (const CommError& error) {
      throw CommError(c10::str(core::error_prefix(), "rank ", own.rank, " cannot reach rank ", peer,
                               " on host ", there.host_name, ": ", error.what_without_backtrace()));
    }
  }
}

// A connection whose greeting is not complete.
struct Newcomer {
  Socket socket;
  TimePoint came;
  Greeting greeting{};
  size_t read = 0;

  bool greeted() const { return read == sizeof greeting; }

  // False when nothing more will come.
  bool read_on(milliseconds patience) {
    const ssize_t count = recv(socket.fd(), reinterpret_cast<char*>(&greeting) + read,
                               sizeof greeting - read, MSG_DONTWAIT);
    read += std::max<ssize_t>(count, 0);
    const bool later = count < 0 && (errno == EAGAIN || errno == EINTR);
    return count > 0 || (later && Clock::now() < came + patience);
  }
};

// Takes connections that have come in, as long as there are places.
void accept_all(const Socket& listener, std::vector<Newcomer>& newcomers) {
  while (newcomers.size() < kMostNewcomers) {
    std::optional<Socket> socket = accept_from(listener);
    if (!socket) {
      return;
    }
    newcomers.push_back({std::move(*socket), Clock::now()});
  }
}

// Takes the connections of the ranks above this one. Connections of others, which do not know the
// world's number, are dropped, and keep no rank waiting.
void accept_higher_ranks(const Greeting& own, const Socket& listener, Meeting& meeting,
                         TimePoint deadline) {
  std::vector<int> missing(meeting.ranks.size() - own.rank - 1);
  std::iota(missing.begin(), missing.end(), own.rank + 1);
  std::vector<Newcomer> newcomers;
  while (!missing.empty()) {
    SMP_CHECK_WITH(TimeoutError, Clock::now() < deadline, "rank ", own.rank,
                   " was not connected to by ", list_of(missing),
                   ". Look at the output of these ranks.");
    const bool is_full = newcomers.size() == kMostNewcomers;
    std::vector<int> sockets;
    for (const Newcomer& newcomer : newcomers) {
      sockets.push_back(newcomer.socket.fd());
    }
    if (!is_full) {
      sockets.push_back(listener.fd());
    }
    const milliseconds patience = is_full ? kShortPatience : kPatience;
    await_readable(sockets, std::min(deadline, Clock::now() + (is_full ? patience : kLookPeriod)));
    accept_all(listener, newcomers);
    std::vector<Newcomer> waiting;
    for (Newcomer& newcomer : newcomers) {
      const bool stays = newcomer.read_on(patience);
      const auto found = std::find(missing.begin(), missing.end(), newcomer.greeting.rank);
      if (newcomer.greeted() && newcomer.greeting.world == own.world && found != missing.end()) {
        meeting.connections[*found] = std::move(newcomer.socket);
        missing.erase(found);
      } else if (stays && !newcomer.greeted()) {
        waiting.push_back(std::move(newcomer));
      }
    }
    newcomers = std::move(waiting);
  }
}

}  // namespace

Meeting meet(const StorePtr& store, int rank, int size, const MeetingTime& time) {
  const std::string address =
      address_of_this_host(core::env("SMP_SOCKET_IFNAME").value_or(""), host_of(*store));
  const Socket listener = listen_on_free_port(address);
  const RankRecord own{core::host_identity(), core::host_name(), address, port_of(listener),
                       core::cores_of_this_process()};
  // The texts of those that wait there come first.
  Encounter found = size == 1 ? meet_nobody(store, own)
                              : ask_store(store, time.end + kGrace, "the meeting of the ranks",
                                          [own, rank, size, time](const StorePtr& asked) {
                                            return find_ranks(asked, own, rank, size, time);
                                          });
  Meeting meeting;
  meeting.ranks = std::move(found.ranks);
  meeting.store = std::move(found.store);
  make_names_unequal(meeting.ranks);
  meeting.connections.resize(size);
  Greeting greeting{};
  greeting.world = found.number;
  greeting.rank = rank;
  connect_to_lower_ranks(greeting, meeting, time.end);
  accept_higher_ranks(greeting, listener, meeting, time.end);
  return meeting;
}

}  // namespace smp::comm
