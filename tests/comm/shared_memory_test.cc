// SPDX-License-Identifier: Apache-2.0
// Memory that processes share, and the view of an end of a channel when the process at the other
// end dies. The other process is forked here.

#include "comm/shm/shared_memory.h"

#include <ATen/Parallel.h>
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "comm/shm/shared_channel.h"
#include "comm/shm/slot_queue.h"
#include "core/check.h"
#include "tests/comm/quiet_transport.h"
#include "tests/error_of.h"
#include "tests/process_entries.h"
#include "tests/temp_folder.h"

namespace smp::comm {
namespace {

using smp::testing::error_of;
using smp::testing::open_descriptors;
using std::chrono::milliseconds;
using ::testing::HasSubstr;

class OneIntraOpThread : public ::testing::Environment {
 public:
  void SetUp() override { at::set_num_threads(1); }
};
const auto* const kOneIntraOpThread = ::testing::AddGlobalTestEnvironment(new OneIntraOpThread);

// A process that runs `body` and ends with the status that it returns.
class Child {
 public:
  explicit Child(const std::function<int()>& body) : pid_(fork()) {
    if (pid_ == 0) {
      _exit(body());
    }
  }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;
  ~Child() {
    if (pid_ > 0) {
      kill();
      wait();
    }
  }

  ProcessId id() const { return {pid_, this_process().pid_namespace}; }
  void kill() const { ::kill(pid_, SIGKILL); }

  // The exit status, -1 when it was killed.
  int wait() {
    int status = 0;
    waitpid(pid_, &status, 0);
    pid_ = 0;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }

 private:
  pid_t pid_;
};

// Posts like post_fd, but to the mailbox of any user; 0 if it goes.
int post_to_anybody(uint64_t id, int fd) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const std::string name = "smp-" + std::to_string(id);
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  const int connection = socket(AF_UNIX, SOCK_SEQPACKET, 0);
  if (connect(connection, reinterpret_cast<const sockaddr*>(&address), length) != 0) return 1;
  char byte = 0;
  iovec part{&byte, 1};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof fd)] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  cmsghdr* const header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof fd);
  std::memcpy(CMSG_DATA(header), &fd, sizeof fd);
  return sendmsg(connection, &message, 0) == 1 ? 0 : 1;
}

int forever() {
  while (true) pause();
}

TEST(SlotQueue, GivesBackInOrderWhatWasPushed) {
  const auto memory = SharedMemory::create(4096);
  SlotQueue in(memory->data() + SharedMemory::kReserved, 3);
  SlotQueue out(memory->data() + SharedMemory::kReserved, 3);
  EXPECT_EQ(out.try_pop(), std::nullopt);
  for (uint32_t i = 0; i < 100; ++i) {
    in.push(i);
    in.push(1000 + i);
    EXPECT_EQ(out.try_pop(), i);
    EXPECT_EQ(out.try_pop(), 1000 + i);
    EXPECT_EQ(out.try_pop(), std::nullopt);
  }
}

// Every push may meet the other end before, in or after its sleep; a sleep that lasts has lost its
// wake.
TEST(SlotQueue, LosesNoWake) {
  constexpr uint32_t kRounds = 20'000, kLost = 0xffff'ffff;
  constexpr std::chrono::seconds kPatience(30);
  const auto memory = SharedMemory::create(4096);
  std::byte* const there = memory->data() + SharedMemory::kReserved;
  std::byte* const back = there + SlotQueue::bytes(1);
  const auto wait = [&](SlotQueue& queue) {
    while (true) {
      if (const auto slot = queue.try_pop()) return *slot;
      const auto start = std::chrono::steady_clock::now();
      queue.sleep(kPatience);
      if (std::chrono::steady_clock::now() - start >= kPatience) return kLost;
    }
  };
  std::thread echo([&] {
    SlotQueue in(there, 1), out(back, 1);
    for (uint32_t i = 0; i < kRounds; ++i) out.push(wait(in) + 1);
  });
  SlotQueue out(there, 1), in(back, 1);
  for (uint32_t i = 0; i < kRounds; ++i) {
    out.push(i);
    ASSERT_EQ(wait(in), i + 1);
  }
  echo.join();
}

TEST(SharedMemory, IsZeroAndSaysWhoseItIs) {
  const auto memory = SharedMemory::create(100'000);
  EXPECT_TRUE(std::all_of(memory->data() + SharedMemory::kReserved, memory->data() + 100'000,
                          [](std::byte byte) { return byte == std::byte{0}; }));
  EXPECT_EQ(SharedMemory::find(memory->id()), memory);
  EXPECT_EQ(SharedMemory::find(memory->id() + 1), nullptr);
  const auto open = [&] { return open_fd_of(this_process(), memory->fd(), memory->id()); };
  EXPECT_EQ(SharedMemory::map(open(), 100'000, memory->id() + 1), nullptr);
  EXPECT_EQ(SharedMemory::map(open(), 99'999, memory->id()), nullptr);
  EXPECT_EQ(ftruncate(memory->fd(), 10), -1);  // sealed
  const auto other = SharedMemory::map(open(), 100'000, memory->id());
  ASSERT_NE(other, nullptr);
  memory->data()[99'999] = std::byte{7};
  EXPECT_EQ(other->data()[99'999], std::byte{7});
}

TEST(SharedMemory, LeavesNothingOpen) {
  const int64_t before = open_descriptors();
  {
    const auto memory = SharedMemory::create(10'000);
    const auto other = SharedMemory::map(open_fd_of(this_process(), memory->fd(), memory->id()),
                                         10'000, memory->id());
    EXPECT_EQ(other->fd(), -1);
    EXPECT_EQ(open_descriptors(), before + 1);
    memory->close_fd();
    EXPECT_EQ(open_descriptors(), before);
  }
  EXPECT_EQ(open_descriptors(), before);
}

TEST(SharedMemory, TooMuchIsAnErrorThatSaysHowMuchThereIs) {
  const int64_t before = open_descriptors();
  std::string text;
  try {
    SharedMemory::create(size_t{1} << 46);
  } catch (const CommError& error) {
    text = error.what();
  }
  EXPECT_THAT(text, HasSubstr("shared memory of 67108864 MiB for messages between ranks of this "
                              "host: only "));
  EXPECT_THAT(text, HasSubstr(" MiB are available. Use smaller or fewer microbatches"));
  EXPECT_EQ(open_descriptors(), before);
}

// The kernel ends a process that a limit of its container leaves no memory.
TEST(AvailableMemory, IsWhatTheLimitsOfAllCgroupsLeave) {
  const smp::testing::TempFolder mount;
  const auto write = [&](const std::string& folder, const std::string& name,
                         const std::string& text) {
    std::filesystem::create_directories(mount.file(folder));
    mount.write(folder + "/" + name, text);
  };
  const auto left = [&](const std::string& cgroups) {
    return left_in_cgroups(mount.path(), cgroups);
  };
  EXPECT_EQ(left("0::/a/b\n4:memory:/c/d\n"), std::nullopt);
  EXPECT_EQ(left("no cgroup\n:\n"), std::nullopt);
  // Version 2: the limit of the one around it is the lower one.
  write("a/b", "memory.max", "max\n");
  write("a/b", "memory.current", "100\n");
  EXPECT_EQ(left("0::/a/b\n"), std::nullopt);
  write("a", "memory.max", "1000\n");
  write("a", "memory.current", "300\n");
  write("a", "memory.stat", "anon 1\ninactive_file 20\nactive_file 3\n");
  EXPECT_EQ(left("0::/a/b\n"), 723u);
  // Version 1; more than the limit may be used for a moment.
  write("memory/c/d", "memory.limit_in_bytes", "9223372036854771712\n");
  write("memory/c/d", "memory.usage_in_bytes", "500\n");
  write("memory/c", "memory.limit_in_bytes", "400\n");
  write("memory/c", "memory.usage_in_bytes", "500\n");
  write("memory/c", "memory.stat",
        "inactive_file 1\ntotal_inactive_file 20\ntotal_active_file 3\n");
  EXPECT_EQ(left("5:cpu:/a\n4:memory:/c/d\n"), 23u);
  EXPECT_EQ(left("0::/a/b\n4:memory:/c/d\n"), 23u);
  // A container sees its own cgroup as the root, and the path of the host.
  write("memory", "memory.limit_in_bytes", "70\n");
  write("memory", "memory.usage_in_bytes", "60\n");
  EXPECT_EQ(left("4:memory:/docker/1234\n"), 10u);
}

TEST(SharedMemory, AnotherProcessOpensItThroughProc) {
  const auto memory = SharedMemory::create(8192);
  const ProcessId owner = this_process();
  Child child([&] {
    const auto theirs =
        SharedMemory::map(open_fd_of(owner, memory->fd(), memory->id()), 8192, memory->id());
    if (!theirs || theirs->data() == memory->data()) return 1;
    theirs->data()[8000] = std::byte{42};
    return 0;
  });
  EXPECT_EQ(child.wait(), 0);
  EXPECT_EQ(memory->data()[8000], std::byte{42});
}

TEST(SharedMemory, NothingElseIsOpenedThroughProc) {
  const auto memory = SharedMemory::create(8192);
  ProcessId self = this_process();
  EXPECT_EQ(open_fd_of(self, memory->fd(), memory->id() + 1), -1);
  EXPECT_EQ(open_fd_of(self, STDIN_FILENO, memory->id()), -1);
  EXPECT_EQ(open_fd_of(self, 9999, memory->id()), -1);
  ++self.pid_namespace;
  EXPECT_EQ(open_fd_of(self, memory->fd(), memory->id()), -1);
}

TEST(SharedMemory, AnotherProcessIsSentItsDescriptor) {
  const auto memory = SharedMemory::create(8192);
  EXPECT_FALSE(post_fd(memory->id(), memory->fd()));  // no such mailbox exists
  const FdMailbox mailbox(memory->id());
  EXPECT_EQ(mailbox.take(), -1);
  Child child([&] {
    memory->data()[8000] = std::byte{43};
    return post_fd(memory->id(), memory->fd()) ? 0 : 1;
  });
  EXPECT_EQ(child.wait(), 0);
  const auto mine = SharedMemory::map(mailbox.take(), 8192, memory->id());
  ASSERT_NE(mine, nullptr);
  EXPECT_EQ(mine->data()[8000], std::byte{43});
}

// A process that keeps the descriptor could cut it off.
TEST(SharedMemory, IsNotMappedUnlessItsSizeIsSealed) {
  const uint64_t id = 4711;
  for (const bool sealed : {false, true}) {
    const int fd = memfd_create("made elsewhere", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    ASSERT_EQ(ftruncate(fd, 8192), 0);
    ASSERT_EQ(pwrite(fd, &id, sizeof id, 0), sizeof id);
    if (sealed) fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
    EXPECT_EQ(SharedMemory::map(fd, 8192, id) != nullptr, sealed);
  }
}

// The user who may know the names of mailboxes.
class OtherUser : public ::testing::Test {
 protected:
  static constexpr uid_t kOther = 65534;

  void SetUp() override {
    if (geteuid() != 0) GTEST_SKIP() << "only root can be another user";
  }

  // The result of a process of the other user.
  static int run(const std::function<int()>& body) {
    Child child([&] { return setuid(kOther) == 0 ? body() : -1; });
    return child.wait();
  }

  const std::shared_ptr<SharedMemory> memory_ = SharedMemory::create(8192);
};

TEST_F(OtherUser, PostsNothing) {
  const FdMailbox mailbox(memory_->id());
  EXPECT_EQ(run([&] { return post_to_anybody(memory_->id(), STDIN_FILENO); }), 0);
  EXPECT_EQ(mailbox.take(), -1);
  EXPECT_EQ(run([&] { return post_to_anybody(memory_->id(), STDIN_FILENO); }), 0);
  EXPECT_TRUE(post_fd(memory_->id(), memory_->fd()));
  EXPECT_NE(SharedMemory::map(mailbox.take(), 8192, memory_->id()), nullptr);
}

TEST_F(OtherUser, IsSentNothing) {
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  const Child child([&] {
    if (setuid(kOther) != 0) return 1;
    const FdMailbox mailbox(memory_->id());
    return write(ends[1], "", 1) == 1 ? forever() : 1;
  });
  char byte = 0;
  ASSERT_EQ(read(ends[0], &byte, 1), 1);
  EXPECT_FALSE(post_fd(memory_->id(), memory_->fd()));
  close(ends[0]);
  close(ends[1]);
}

TEST_F(OtherUser, HasMadeNothingThatIsMapped) {
  const int fd = open_fd_of(this_process(), memory_->fd(), memory_->id());
  ASSERT_EQ(fchown(fd, kOther, static_cast<gid_t>(-1)), 0);
  EXPECT_EQ(SharedMemory::map(fd, 8192, memory_->id()), nullptr);
}

TEST(ProcessWatch, AllOfOneProcessShareADescriptor) {
  const Child child(forever);
  const int64_t before = open_descriptors();
  {
    const std::vector<ProcessWatch> watches(10, ProcessWatch(child.id()));
    const ProcessWatch another(child.id());
    EXPECT_EQ(open_descriptors(), before + 1);
    EXPECT_FALSE(another.ended());
  }
  EXPECT_EQ(open_descriptors(), before);
}

TEST(ProcessWatch, SeesTheEndOfAProcessThatNobodyHasWaitedFor) {
  const Child child(forever);
  const ProcessWatch watch(child.id());
  EXPECT_FALSE(watch.ended());
  child.kill();
  for (int i = 0; i < 30'000 && !watch.ended(); ++i) std::this_thread::sleep_for(milliseconds(1));
  EXPECT_TRUE(watch.ended());
  EXPECT_FALSE(ProcessWatch(this_process()).ended());
  EXPECT_FALSE(ProcessWatch({1, 0}).ended());  // a process of a namespace that is not known
}

// A profiler's timer, which counts the time that this process computes.
TEST(SharedMemory, IsMadeWhileSignalsCome) {
  static volatile sig_atomic_t signals = 0;
  struct sigaction action {};
  action.sa_handler = [](int) { signals = signals + 1; };
  struct sigaction before {};
  sigaction(SIGPROF, &action, &before);
  const itimerval timer{{0, 5000}, {0, 5000}};
  setitimer(ITIMER_PROF, &timer, nullptr);
  while (signals < 5) {
    EXPECT_EQ(SharedMemory::create(64 << 20)->size(), 64 << 20);
  }
  const itimerval off{};
  setitimer(ITIMER_PROF, &off, nullptr);
  sigaction(SIGPROF, &before, nullptr);
}

class ChannelToAProcess : public ::testing::Test {
 protected:
  ChannelToAProcess() : memory_(SharedMemory::create(SharedLayout(kSpec).total())) {
    group_->name = "pair";
    group_->rank = 0;
    group_->size = 2;
    group_->world_ranks = {2, 5};
    group_->world_rank = 2;
  }

  PeerWait wait(const char* verb, const ProcessId& peer) const {
    return PeerWait(transport_, group_, verb, kSpec, ProcessWatch(peer));
  }
  std::unique_ptr<Sender> sender(const ProcessId& peer) const {
    return make_shared_sender(memory_, kSpec, wait("channel send", peer));
  }
  std::unique_ptr<Receiver> receiver(const ProcessId& peer) const {
    return make_shared_receiver(memory_, kSpec, wait("channel receive", peer));
  }

  inline static const ChannelSpec kSpec{1, 5, 1000, 1, 1};
  const std::shared_ptr<QuietTransport> transport_ =
      std::make_shared<QuietTransport>(/*has_core_for_each_rank=*/false);
  const std::shared_ptr<GroupState> group_ = std::make_shared<GroupState>();
  const std::shared_ptr<SharedMemory> memory_;
};

TEST_F(ChannelToAProcess, AKilledSenderEndsTheWaitAfterWhatItHasSent) {
  const ProcessId self = this_process();
  Child child([&] {
    const auto out = sender(self);
    std::memset(out->prepare().mutable_data_ptr(), 9, 1000);
    out->send();
    std::memset(out->prepare().mutable_data_ptr(), 10, 500);  // dies before it has sent this
    raise(SIGKILL);
    return 0;
  });
  const auto in = receiver(child.id());
  EXPECT_TRUE(in->receive().eq(9).all().item<bool>());
  EXPECT_THAT(error_of<CommError>([&] { in->receive(); }),
              HasSubstr("channel receive of 1000 bytes from rank 5 with tag 5 on group 'pair' "
                        "(here rank 2) failed: the process of rank 5 has ended"));
}

TEST_F(ChannelToAProcess, AKilledReceiverEndsTheWaitForASlot) {
  const Child child(forever);
  const auto out = sender(child.id());
  for (int i = 0; i < 2; ++i) {
    out->prepare();
    out->send();
  }
  std::thread killer([&] {
    std::this_thread::sleep_for(milliseconds(200));
    child.kill();
  });
  EXPECT_THAT(error_of<CommError>([&] { out->prepare(); }),
              HasSubstr("channel send of 1000 bytes to rank 5 with tag 5 on group 'pair' (here "
                        "rank 2) failed: the process of rank 5 has ended"));
  killer.join();
}

TEST_F(ChannelToAProcess, AnAbortEndsWaitsNowAndLater) {
  const Child child(forever);
  const auto in = receiver(child.id());
  std::thread aborter([&] {
    std::this_thread::sleep_for(milliseconds(200));
    transport_->abort(1, "rank 1 failed: disk full");
  });
  const auto expected =
      HasSubstr("rank 1 failed: disk full [noticed by channel receive of 1000 bytes from rank 5");
  EXPECT_THAT(error_of<CommError>([&] { in->receive(); }), expected);
  EXPECT_THAT(error_of<CommError>([&] { in->receive(); }), expected);
  aborter.join();
}

TEST_F(ChannelToAProcess, MessagesCrossInBothOrdersOfArrival) {
  const ProcessId self = this_process();
  constexpr int kMessages = 5000;
  Child child([&] {
    const auto out = sender(self);
    for (int i = 0; i < kMessages; ++i) {
      std::memset(out->prepare().mutable_data_ptr(), i % 251, 1000);
      out->send();
    }
    return 0;
  });
  const auto in = receiver(child.id());
  for (int i = 0; i < kMessages; ++i) {
    const at::Tensor message = in->receive();
    const auto* bytes = static_cast<const unsigned char*>(message.const_data_ptr());
    ASSERT_TRUE(std::all_of(bytes, bytes + 1000, [&](unsigned b) { return b == i % 251u; })) << i;
  }
  EXPECT_EQ(child.wait(), 0);
}

}  // namespace
}  // namespace smp::comm
