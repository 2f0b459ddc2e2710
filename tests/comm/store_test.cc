// SPDX-License-Identifier: Apache-2.0
// Worlds without MPI: how ranks meet, and their news of those that do not come or end.

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <future>
#include <iostream>
#include <optional>
#include <sstream>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "comm/store/socket.h"
#include "comm/store/store_communicator.h"
#include "core/check.h"
#include "tests/comm/harness.h"
#include "tests/comm/test_tensors.h"

namespace smp::comm {
namespace {

using std::chrono::milliseconds;
using ::testing::AllOf;
using ::testing::HasSubstr;

using StorePtr = c10::intrusive_ptr<c10d::Store>;

// Calls `body` with 0 to size - 1 on threads of their own.
void as_threads(int size, const std::function<void(int)>& body) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) threads.emplace_back(body, rank);
  for (std::thread& thread : threads) thread.join();
}

// A store of c10d, as a launcher has one.
c10::intrusive_ptr<c10d::TCPStore> launchers_store() {
  c10d::TCPStoreOptions options;
  options.port = 0;
  options.isServer = true;
  options.waitWorkers = false;
  return c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
}

CommunicatorPtr join(const StorePtr& store, int rank, int size) {
  return make_store_world(store, rank, size, std::chrono::seconds(30));
}

using Pairs = std::vector<std::pair<std::string, std::string>>;

// Sets variables until the end of the block.
class Variables {
 public:
  explicit Variables(Pairs variables) : variables_(std::move(variables)) {
    for (const auto& [name, value] : variables_) setenv(name.c_str(), value.c_str(), 1);
  }
  ~Variables() {
    for (const auto& [name, value] : variables_) unsetenv(name.c_str());
  }

 private:
  Pairs variables_;
};

TEST(StoreWorld, RefusesARankThatIsNone) {
  const StorePtr store = c10::make_intrusive<c10d::HashStore>();
  EXPECT_THAT(error_of<UsageError>([&] { join(store, 2, 2); }),
              HasSubstr("make_store_world: expected a rank in 0 to 1, got 2"));
}

void leave(c10d::Store& store, const std::string& key, const std::string& value) {
  store.set(key, std::vector<uint8_t>(value.begin(), value.end()));
}

// Where the ranks of a job leave word, and where they do at their first meeting.
StorePtr job_at(const StorePtr& store) {
  return c10::make_intrusive<c10d::PrefixStore>("attempt/0", store);
}
StorePtr first_meeting_at(const StorePtr& store) {
  return c10::make_intrusive<c10d::PrefixStore>("meeting/1", job_at(store));
}

// The rank that waits for a short time begins when the other has come.
TEST(StoreWorld, EveryRankIsToldWhoHasNotCome) {
  const StorePtr store = c10::make_intrusive<c10d::HashStore>();
  leave(*job_at(store), "job", "4 ranks of job ");
  as_threads(2, [&](int rank) {
    if (rank == 0) first_meeting_at(store)->wait({"rank/1"}, std::chrono::seconds(30));
    const milliseconds limit(rank == 0 ? 700 : 30'000);
    EXPECT_THAT(
        error_of<TimeoutError>([&] { make_store_world(store, rank, 4, limit); }),
        HasSubstr("ranks 2, 3 of 4 have not come within 0.7 s. Start as many processes as"));
  });
}

// The record that a rank on another host would leave in the store; no process listens on its port.
void leave_record(c10d::Store& store, int rank) {
  const cpu_set_t cores{};
  std::string record = "another host\nmars\n127.0.0.1\n1\n";
  record.append(reinterpret_cast<const char*>(&cores), sizeof cores);
  leave(store, "rank/" + std::to_string(rank), record);
}

TEST(StoreWorld, NamesARankThatCannotBeReached) {
  const StorePtr store = c10::make_intrusive<c10d::HashStore>();
  leave(*job_at(store), "job", "2 ranks of job ");
  leave_record(*first_meeting_at(store), 0);
  leave(*first_meeting_at(store), "number", "7");
  EXPECT_THAT(error_of<CommError>([&] { join(store, 1, 2); }),
              AllOf(HasSubstr("rank 1 cannot reach rank 0 on host mars: "),
                    HasSubstr("no connection to 127.0.0.1 port 1: Connection refused. Check that "
                              "its process lives")));
}

TEST(StoreWorld, NamesARankThatDoesNotConnect) {
  const StorePtr store = c10::make_intrusive<c10d::HashStore>();
  leave_record(*first_meeting_at(store), 1);
  EXPECT_THAT(error_of<TimeoutError>([&] { make_store_world(store, 0, 2, milliseconds(200)); }),
              HasSubstr("rank 0 was not connected to by rank 1. Look at the output of these"));
}

TEST(StoreWorld, RefusesWhatIsNoAddressOfARank) {
  const StorePtr store = c10::make_intrusive<c10d::HashStore>();
  leave(*first_meeting_at(store), "rank/1", "evil");
  EXPECT_THAT(error_of<CommError>([&] { join(store, 0, 2); }),
              HasSubstr("what rank 1 has left in the store is no address of a rank. Something else "
                        "uses the store: choose another MASTER_PORT"));
  const StorePtr other = c10::make_intrusive<c10d::HashStore>();
  leave(*job_at(other), "job", "2 ranks of job ");
  leave_record(*first_meeting_at(other), 0);
  leave(*first_meeting_at(other), "number", "evil");
  EXPECT_THAT(error_of<CommError>([&] { join(other, 1, 2); }),
              HasSubstr("the number of the world that rank 0 has left in the store is none."));
}

TEST(StoreWorld, RanksOfAnotherJobDoNotJoin) {
  const StorePtr store = c10::make_intrusive<c10d::HashStore>();
  leave(*job_at(store), "job", "2 ranks of job A");
  const Variables own(Pairs{{"SMP_JOB_ID", "B"}});
  EXPECT_THAT(
      error_of<CommError>([&] { join(store, 1, 2); }),
      HasSubstr("rank 1 is one of 2 ranks of job B, but rank 0, which it meets at the "
                "store, is one of 2 ranks of job A. Give each job a MASTER_PORT of its own"));
  setenv("SMP_JOB_ID", "A", 1);
  EXPECT_THAT(error_of<CommError>([&] { join(store, 1, 3); }),
              HasSubstr("rank 1 is one of 3 ranks of job A, but rank 0"));
}

// Two jobs without numbers meet like this: all are told, since none knows which process is its own.
TEST(StoreWorld, TwoProcessesAreNotOneRank) {
  const StorePtr store = c10::make_intrusive<c10d::HashStore>();
  leave(*job_at(store), "process/1", "process 7 on host mars, number 9");
  as_threads(2, [&](int rank) {
    EXPECT_THAT(error_of<CommError>([&] { join(store, rank, 3); }),
                AllOf(HasSubstr("two processes have come as rank 1: process 7 on host mars, number "
                                "9, and process "),
                      HasSubstr(". Give each job a MASTER_PORT of its own, and each process a "
                                "RANK of its own.")));
  });
}

// The worlds are those of torch.distributed.new_subgroups: parts of the world at one time.
TEST(StoreWorld, ARankAloneMeetsNobody) {
  const StorePtr store = c10::make_intrusive<c10d::HashStore>();
  leave(*job_at(store), "process/0", "process 7 on host mars, number 9");
  const auto alone = join(store, 0, 1);
  const at::Tensor sum = at::full({3}, 7);
  alone->all_reduce(sum);
  EXPECT_TRUE(at::equal(sum, at::full({3}, 7)));
}

// One whose process is stopped: it neither answers nor fails.
class StoppedStore final : public c10d::HashStore {
 public:
  void set(const std::string&, const std::vector<uint8_t>&) override { answers.wait(); }

  std::promise<void> go_on;
  std::shared_future<void> answers = go_on.get_future();
};

TEST(StoreWorld, AStoreThatIsStoppedIsNotWaitedForLonger) {
  const auto store = c10::make_intrusive<StoppedStore>();
  EXPECT_THAT(error_of<TimeoutError>([&] { make_store_world(store, 0, 2, milliseconds(100)); }),
              HasSubstr("the meeting of the ranks: the store has not answered within the time-out. "
                        "The process that opened it, mostly rank 0, is stopped"));
  store->go_on.set_value();
}

// A connection to where the rank of this record listens, at another address if one is given; no
// word is sent. -1 where no rank listens.
int connect_silently(const std::string& record, const std::string& other_address = "") {
  std::istringstream lines(record);
  std::string host, name, own_address, port;
  for (std::string* line : {&host, &name, &own_address, &port}) std::getline(lines, *line);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(std::stoi(port)));
  const std::string& to = other_address.empty() ? own_address : other_address;
  EXPECT_EQ(inet_pton(AF_INET, to.c_str(), &address.sin_addr), 1) << to;
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  if (connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0) return fd;
  close(fd);
  return -1;
}

TEST(StoreWorld, SaysThatItHasTooFewDescriptors) {
  const Variables loopback(Pairs{{"SMP_SOCKET_IFNAME", "lo"}});
  const StorePtr store = c10::make_intrusive<c10d::HashStore>();
  std::thread first([&] {
    EXPECT_THAT(error_of<CommError>([&] { join(store, 0, 2); }),
                HasSubstr("a connection cannot be taken: Too many open files. Raise the limit of "
                          "open files (ulimit -n)"));
  });
  const int stranger = connect_silently(first_meeting_at(store)->get_to_str("rank/0"));
  EXPECT_GE(stranger, 0);
  rlimit before{};
  getrlimit(RLIMIT_NOFILE, &before);
  const rlimit few{3, before.rlim_max};
  setrlimit(RLIMIT_NOFILE, &few);
  leave_record(*first_meeting_at(store), 1);
  first.join();
  setrlimit(RLIMIT_NOFILE, &before);
  close(stranger);
}

// They would keep it for longer than the ranks wait, one after the other.
TEST(StoreWorld, StrangersKeepNobodyWaiting) {
  const Variables loopback(Pairs{{"SMP_SOCKET_IFNAME", "lo"}});
  const StorePtr store = c10::make_intrusive<c10d::HashStore>();
  std::thread first([&] { EXPECT_EQ(join(store, 0, 2)->size(), 2); });
  const std::string record = first_meeting_at(store)->get_to_str("rank/0");
  std::vector<int> strangers;
  for (int i = 0; i < 10; ++i) strangers.push_back(connect_silently(record));
  EXPECT_THAT(strangers, ::testing::Each(::testing::Ge(0)));
  EXPECT_EQ(connect_silently(record, "127.0.0.2"), -1) << "it listens on one address only";
  EXPECT_EQ(join(store, 1, 2)->size(), 2);
  first.join();
  for (const int stranger : strangers) close(stranger);
}

// More than there are descriptors for.
TEST(StoreWorld, ManyStrangersKeepNobodyOut) {
  const Variables loopback(Pairs{{"SMP_SOCKET_IFNAME", "lo"}});
  const StorePtr store = c10::make_intrusive<c10d::HashStore>();
  std::thread first([&] { EXPECT_EQ(join(store, 0, 2)->size(), 2); });
  const std::string record = first_meeting_at(store)->get_to_str("rank/0");
  std::vector<int> strangers;
  for (int i = 0; i < 200; ++i) strangers.push_back(connect_silently(record));
  EXPECT_THAT(strangers, ::testing::Each(::testing::Ge(0)));
  rlimit before{};
  getrlimit(RLIMIT_NOFILE, &before);
  const rlimit few{static_cast<rlim_t>(strangers.back()) + 100, before.rlim_max};
  setrlimit(RLIMIT_NOFILE, &few);
  EXPECT_EQ(join(store, 1, 2)->size(), 2);
  first.join();
  setrlimit(RLIMIT_NOFILE, &before);
  for (const int stranger : strangers) close(stranger);
}

// c10d would write two lines to the log for each of its waits that ends without the key.
TEST(StoreWorld, SaysNothingWhileItWaits) {
  const auto store = launchers_store();
  c10d::TCPStoreOptions options;
  options.port = store->getPort();
  const auto other = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
  ::testing::internal::CaptureStderr();
  std::thread first([&] { EXPECT_EQ(join(store, 0, 2)->size(), 2); });
  std::this_thread::sleep_for(milliseconds(1200));  // twice as long as one looks at a time
  EXPECT_EQ(join(other, 1, 2)->size(), 2);
  first.join();
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "");
}

TEST(StoreWorld, UsesTheNetworkInterfaceNamed) {
  const Variables none(Pairs{{"SMP_SOCKET_IFNAME", "nosuch0"}});
  const StorePtr store = c10::make_intrusive<c10d::HashStore>();
  EXPECT_THAT(error_of<CommError>([&] { join(store, 0, 1); }),
              HasSubstr("SMP_SOCKET_IFNAME: the network interface nosuch0 has no address."));
  setenv("SMP_SOCKET_IFNAME", "lo", 1);
  EXPECT_EQ(join(store, 0, 1)->size(), 1);
}

// One whose process ends after a while.
class LostStore final : public c10d::HashStore {
 public:
  int64_t add(const std::string& key, int64_t value) override {
    if (lost) {
      C10_THROW_ERROR(DistNetworkError, "connection reset");
    }
    return c10d::HashStore::add(key, value);
  }

  bool lost = false;
};

TEST(StoreWorld, GroupsNeedTheStore) {
  const auto store = c10::make_intrusive<LostStore>();
  const CommunicatorPtr world = join(store, 0, 1);
  store->lost = true;
  EXPECT_THAT(
      error_of<CommError>([&] { world->split({0}, "alone"); }),
      AllOf(HasSubstr("split of group 'world': the store does not answer: connection"),
            HasSubstr(". It ends with the process that opened it, mostly rank 0: look at the")));
}

TEST(StoreWorld, SeveralWorldsOfTheSameProcesses) {
  const StorePtr store = c10::make_intrusive<c10d::HashStore>();
  as_threads(2, [&](int rank) {
    const auto a = join(c10::make_intrusive<c10d::PrefixStore>("a", store), rank, 2);
    const auto b = join(c10::make_intrusive<c10d::PrefixStore>("b", store), rank, 2);
    const at::Tensor one = at::full({3}, rank + 1.0);
    const at::Tensor two = one * 10;
    const WorkPtr first = a->async().all_reduce(one, ReduceOp::kSum);
    b->all_reduce(two);
    first->wait();
    EXPECT_TRUE(same_bits(one, at::full({3}, 3.0)));
    EXPECT_TRUE(same_bits(two, at::full({3}, 30.0)));
    b->barrier();
  });
}

// torchrun's store outlives the process groups that a program makes and destroys.
TEST(StoreWorld, TheSameProcessesMayMeetAgain) {
  const StorePtr store = c10::make_intrusive<c10d::HashStore>();
  as_threads(3, [&](int rank) {
    for (int round = 0; round < 20; ++round) {
      const CommunicatorPtr world = join(store, rank, 3);
      const CommunicatorPtr half = world->split({0, 1, 2}, "again");
      const at::Tensor tensor = at::full({2}, rank + round, at::kInt);
      half->all_reduce(tensor);
      EXPECT_TRUE(same_bits(tensor, at::full({2}, 3 + 3 * round, at::kInt)));
    }
  });
}

TEST(StoreWorld, HasTheNameThatItIsGiven) {
  const StorePtr store = c10::make_intrusive<c10d::HashStore>();
  const CommunicatorPtr world = make_store_world(store, 0, 1, std::chrono::seconds(30), "rows[4]");
  EXPECT_THAT(error_of<UsageError>([&] { world->broadcast(at::ones({1}), 1); }),
              HasSubstr("broadcast on group 'rows[4]': expected root in 0 to 0, got 1."));
}

// Groups whose members differ get numbers at the same time.
TEST(StoreWorld, GroupsOfOneSplitAndOfSplitsOfSplits) {
  const StorePtr store = c10::make_intrusive<c10d::HashStore>();
  as_threads(4, [&](int rank) {
    const CommunicatorPtr world = join(store, rank, 4);
    const int side = rank % 2;
    const CommunicatorPtr half = world->split({side, side + 2}, "half");
    const CommunicatorPtr alone = half->split({half->rank()}, "alone");
    const CommunicatorPtr again = half->split({0, 1}, "again");
    for (const auto& [group, sum] :
         {std::pair{half, 2 * side + 2}, {alone, rank}, {again, 2 * side + 2}, {world, 6}}) {
      const at::Tensor tensor = at::full({5}, rank, at::kInt);
      group->all_reduce(tensor);
      EXPECT_TRUE(same_bits(tensor, at::full({5}, sum, at::kInt))) << group->name();
    }
    world->barrier();
  });
}

TEST(StoreWorld, AnAbortEndsTheWaitsOfAll) {
  const StorePtr store = c10::make_intrusive<c10d::HashStore>();
  as_threads(3, [&](int rank) {
    const CommunicatorPtr world = join(store, rank, 3);
    if (rank == 1) {
      std::this_thread::sleep_for(milliseconds(50));
      world->abort("disk full");
      return;
    }
    EXPECT_THAT(error_of<CommError>([&] { world->recv(at::zeros({2}), 2 - rank, 0); }),
                AllOf(HasSubstr("rank 1 failed: disk full"), HasSubstr("[noticed by irecv of 8 ")));
    EXPECT_THAT(error_of<CommError>([&] { world->barrier(); }), HasSubstr("disk full"));
  });
}

// It has copies of the connections, and none of the threads.
TEST(StoreWorld, AForkedProcessMayEndWithoutEndingTheWorld) {
  const StorePtr store = c10::make_intrusive<c10d::HashStore>();
  std::vector<CommunicatorPtr> worlds(2);
  as_threads(2, [&](int rank) { worlds[rank] = join(store, rank, 2); });
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);  // instead of a wait for a thread that is not here
    worlds.clear();
    _exit(0);
  }
  int status = -1;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  as_threads(2, [&](int rank) {
    const at::Tensor tensor = at::full({3}, rank + 1.0);
    worlds[rank]->all_reduce(tensor);
    EXPECT_TRUE(same_bits(tensor, at::full({3}, 3.0)));
  });
}

// A rank may fork processes that live on when it has died: the connection ends all the same.
TEST(StoreWorld, AForkedProcessKeepsNoConnectionOpen) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  const Socket listener = listen_on_free_port("127.0.0.1");
  std::optional<Socket> own(connect_to("127.0.0.1", port_of(listener), deadline));
  await_readable({listener.fd()}, deadline);
  const std::optional<Socket> peer = accept_from(listener);
  ASSERT_TRUE(peer);
  const pid_t child = fork();
  if (child == 0) {
    alarm(120);
    for (;;) pause();
  }
  own.reset();
  await_readable({peer->fd()}, deadline);
  char byte = 0;
  EXPECT_EQ(read(peer->fd(), &byte, 1), 0) << "the end, and not nothing yet";
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
}

// A rank that ends in order harms only those that still expect something of it.
TEST(StoreWorld, ARankThatHasEndedIsNamedToWhoWaitsForIt) {
  const StorePtr store = c10::make_intrusive<c10d::HashStore>();
  as_threads(3, [&](int rank) {
    CommunicatorPtr world = join(store, rank, 3);
    world->barrier();
    const at::Tensor tensor = at::full({2}, rank, at::kInt);
    if (rank == 2) {
      world->send(tensor, 0, 7);
      return;
    }
    if (rank == 0) {
      std::this_thread::sleep_for(milliseconds(100));
      world->recv(tensor, 2, 7);  // sent before
      EXPECT_TRUE(same_bits(tensor, at::full({2}, 2, at::kInt)));
      const std::string departed = "rank 2 of the world has ended its part of the job";
      EXPECT_THAT(error_of<CommError>([&] { world->recv(tensor, 2, 7); }), HasSubstr(departed));
      EXPECT_THAT(error_of<CommError>([&] { world->send(tensor, 2, 7); }), HasSubstr(departed));
      world->send(tensor, 1, 8);
    } else {
      world->recv(tensor, 0, 8);
    }
  });
}

TEST(StoreWorld, LongMessagesBothWaysBeforeAnyReceive) {
  const StorePtr store = c10::make_intrusive<c10d::HashStore>();
  constexpr int64_t kElements = 4 << 20;
  as_threads(2, [&](int rank) {
    const CommunicatorPtr world = join(store, rank, 2);
    const at::Tensor mine = values_of(rank, kElements, at::kFloat);
    world->send(mine, 1 - rank, 0);
    const at::Tensor theirs = at::empty_like(mine);
    world->recv(theirs, 1 - rank, 0);
    EXPECT_TRUE(same_bits(theirs, values_of(1 - rank, kElements, at::kFloat)));
    world->barrier();
  });
}

// The variables by which torchrun tells a rank its world.
Pairs torchrun_pairs(int rank, int size, int port) {
  return {{"RANK", std::to_string(rank)},
          {"WORLD_SIZE", std::to_string(size)},
          {"MASTER_ADDR", "127.0.0.1"},
          {"MASTER_PORT", std::to_string(port)}};
}

TEST(Torchrun, NeedsAllVariables) {
  const Variables some({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "127.0.0.1"}});
  EXPECT_TRUE(under_torchrun());
  EXPECT_THAT(error_of<ConfigError>([] { meeting_place(); }),
              HasSubstr("RANK and WORLD_SIZE are set, but MASTER_PORT is not: expected the"));
}

TEST(Torchrun, RefusesNumbersThatAreNone) {
  const Variables all(
      {{"RANK", "2"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", "http"}});
  EXPECT_THAT(error_of<ConfigError>([] { meeting_place(); }),
              HasSubstr("the environment variable RANK: expected a number in 0 to 1, got 2."));
  setenv("RANK", "1", 1);
  EXPECT_THAT(error_of<ConfigError>([] { meeting_place(); }),
              HasSubstr("the environment variable MASTER_PORT: expected a number in 1 to 65535"));
}

TEST(Torchrun, SaysWhyThereIsNoStore) {
  const auto other = launchers_store();
  const Variables all(torchrun_pairs(0, 2, other->getPort()));
  EXPECT_THAT(error_of<CommError>([] { make_torchrun_world(milliseconds(60'000)); }),
              AllOf(HasSubstr("rank 0 cannot open the store at 127.0.0.1 port"),
                    HasSubstr("Choose another MASTER_PORT if it is in use.")));
  setenv("RANK", "1", 1);
  setenv("MASTER_PORT", "1", 1);
  // On a busy machine c10d may say only after that time that no process listens.
  EXPECT_THAT(
      error_of<CommError>([] { make_torchrun_world(milliseconds(500)); }),
      ::testing::AnyOf(AllOf(HasSubstr("rank 1 cannot reach the store at 127.0.0.1 port 1"),
                             HasSubstr("Check that rank 0 has started, is not")),
                       HasSubstr("rank 1 has had no answer from the store at 127.0.0.1 port 1 ")));
  EXPECT_THAT(error_of<UsageError>([] { torchrun_hosts(); }),
              HasSubstr("needs the world of torchrun's variables"));
}

// The port is given by "ddp_port": neither MASTER_PORT nor the launcher's store counts then.
TEST(Torchrun, MeetsAtAnotherPort) {
  const Variables all({{"RANK", "0"},
                       {"WORLD_SIZE", "2"},
                       {"MASTER_ADDR", "127.0.0.1"},
                       {"TORCHELASTIC_USE_AGENT_STORE", "True"}});
  const uint16_t port = launchers_store()->getPort();  // free again
  EXPECT_EQ(meeting_place(port).port, port);
  const auto served = open_torchrun_store(milliseconds(60'000), port);
  setenv("RANK", "1", 1);
  const auto reached = open_torchrun_store(milliseconds(60'000), port);
  served->set("key", "value");
  EXPECT_EQ(reached->get_to_str("key"), "value");
  setenv("RANK", "0", 1);
  EXPECT_THAT(error_of<CommError>([&] { open_torchrun_store(milliseconds(60'000), port); }),
              AllOf(HasSubstr("(MASTER_ADDR, \"ddp_port\")"),
                    HasSubstr("Choose another \"ddp_port\" if it is in use.")));
}

// A rank 0 that is stopped while it opens the store looks like this: the kernel takes connections
// to it.
TEST(Torchrun, AStoreThatNeverOpensIsNotWaitedForLonger) {
  const int silent = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  ASSERT_EQ(bind(silent, reinterpret_cast<const sockaddr*>(&address), length), 0);
  ASSERT_EQ(listen(silent, 5), 0);
  ASSERT_EQ(getsockname(silent, reinterpret_cast<sockaddr*>(&address), &length), 0);
  const Variables all(torchrun_pairs(1, 2, ntohs(address.sin_port)));
  EXPECT_THAT(
      error_of<CommError>([] { make_torchrun_world(milliseconds(300)); }),
      ::testing::AnyOf(HasSubstr("rank 1 has had no answer from the store at 127.0.0.1 port"),
                       HasSubstr("rank 1 cannot reach the store at 127.0.0.1 port")));
  close(silent);
}

// The error of a rank of a new process, in which no other test closes a descriptor meanwhile. The
// store keeps every connection; the last descriptor may be the rank's or the store's.
[[noreturn]] void meet_at_a_full_store() {
  const auto full = launchers_store();
  const Variables all(torchrun_pairs(1, 2, full->getPort()));
  const int last = dup(0);
  close(last);
  rlimit before{};
  getrlimit(RLIMIT_NOFILE, &before);
  const std::string no_port = "no port can be opened: Too many open files";
  std::string text = no_port;
  for (int left = 1; left <= 3 && text.find(no_port) != std::string::npos; ++left) {
    const rlimit few{static_cast<rlim_t>(last + left), before.rlim_max};
    setrlimit(RLIMIT_NOFILE, &few);
    text = error_of<CommError>([] { make_torchrun_world(milliseconds(300)); });
    setrlimit(RLIMIT_NOFILE, &before);
    if (text.find("(ulimit -n)") == std::string::npos) _exit(1);
  }
  std::cerr << text << std::endl;
  _exit(0);
}

TEST(Torchrun, AStoreThatStrangersHaveFilledIsNamed) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");  // in a process that starts anew
  EXPECT_EXIT(meet_at_a_full_store(), ::testing::ExitedWithCode(0),
              " the store at 127.0.0.1 port [0-9]+ \\(MASTER_ADDR.*has descriptors left for "
              "strangers that connect to its port \\(ulimit -n\\)");
}

// A world of its own process, which has then met all it ever will.
void meet_once() {
  const auto launcher = launchers_store();
  const Variables all(torchrun_pairs(0, 1, launcher->getPort()));
  const Variables own(Pairs{{"TORCHELASTIC_USE_AGENT_STORE", "True"}});
  EXPECT_EQ(make_torchrun_world()->size(), 1);
  EXPECT_EQ(torchrun_hosts().local_size, 1);
  finalize_torchrun_world();
  EXPECT_THAT(error_of<UsageError>([] { make_torchrun_world(); }),
              HasSubstr("make_torchrun_world after finalize_torchrun_world: the processes meet"));
}

TEST(Torchrun, MeetsOnce) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");  // in a process that starts anew
  const auto alone = [] {
    meet_once();
    _exit(::testing::Test::HasFailure() ? 1 : 0);
  };
  EXPECT_EXIT(alone(), ::testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace smp::comm
