// SPDX-License-Identifier: Apache-2.0
// Saves that go wrong: killed at each file call, on a full disk, on a disk that stores other bits.

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <torch/nn/modules/linear.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <cstdlib>
#include <mutex>
#include <random>
#include <set>

#include "checkpoint/reader.h"
#include "checkpoint/writer.h"
#include "smp/smp.h"
#include "tests/checkpoint/file_calls.h"
#include "tests/checkpoint/kill_saves.h"
#include "tests/checkpoint/test_util.h"

namespace smp::checkpoint {
namespace {

namespace fs = std::filesystem;
using smp::testing::before_reads;
using smp::testing::calls_so_far;
using smp::testing::Fault;
using smp::testing::inject;
using smp::testing::limit_space;
using ::testing::AllOf;
using ::testing::HasSubstr;

/// Two ranks' files, filled with `value`.
void save(const std::string& path, double value, int64_t size = 6, Medium medium = Medium::kDisk) {
  const Writer writer(path, std::make_shared<SaveLock>(lock_of_writer(path)), medium);
  writer.begin();
  std::vector<std::string> parts;
  for (int64_t i = 0; i < 2; ++i) {
    Shard shard;
    shard.model = {{"weight" + std::to_string(i), at::full({size}, value), {}}};
    shard.optimizer_tensors["weight" + std::to_string(i) + "/exp_avg"] = at::full({size}, value);
    parts.push_back(writer.write_shard(i, 2, shard));
  }
  writer.commit(parts, {});
}

/// The value that everything in a checkpoint has.
double value_of(const std::string& path) {
  Reader reader(path);
  check_undamaged(path, reader.find_damage(Reader::Section::kAll));
  const double value = reader.read_model("weight0")[0].item<double>();
  for (const auto& [name, entry] : reader.index().model) {
    EXPECT_TRUE((reader.read_model(name) == value).all().item<bool>()) << name;
  }
  for (const auto& [name, entry] : reader.index().optimizer_tensors) {
    EXPECT_TRUE((reader.read_optimizer(name) == value).all().item<bool>()) << name;
  }
  return value;
}

class SavesTest : public FolderTest {
 protected:
  using FolderTest::FolderTest;

  void SetUp() override { at::set_num_threads(1); }
  void TearDown() override { inject("", Fault::kNone, 0); }

  void save_there(double value) { save(path("c"), value, 6, medium_); }

  /// The number of file calls of a save over an earlier one.
  int64_t count_calls() {
    save_there(1);
    inject(path(""), Fault::kNone, 0);
    save_there(2);
    const int64_t calls = calls_so_far();
    inject("", Fault::kNone, 0);
    return calls;
  }

  /// One save after another is killed, each a call later.
  void kill_at_any_call() {
    const int64_t calls = count_calls();
    EXPECT_GT(calls, 20);
    int old = 0;
    for (int64_t call = 0; call < calls; ++call) {
      SCOPED_TRACE(call);
      save_there(1);
      const pid_t child = fork();
      ASSERT_GE(child, 0);
      if (child == 0) {
        inject(path(""), Fault::kKill, call);
        save_there(2);
        _exit(0);
      }
      int status = 0;
      ASSERT_EQ(waitpid(child, &status, 0), child);
      ASSERT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
      const double left = value_of(path("c"));
      EXPECT_TRUE(left == 1 || left == 2) << left;
      old += left == 1;
      save_there(3);
      EXPECT_EQ(value_of(path("c")), 3);
      EXPECT_FALSE(fs::exists(path("c.tmp")));
      EXPECT_EQ(fs::exists(path("c.replaced")), medium_ == Medium::kMemory);
    }
    EXPECT_GT(old, calls / 2);
    // In memory the last call is the rename that makes it the new one.
    EXPECT_EQ(old == calls, medium_ == Medium::kMemory) << old;
  }

  /// The error of `save` over a checkpoint of 1 when a fault happens at a call; or empty.
  std::string error_with(Fault fault, int64_t call) {
    save_there(1);
    inject(path(""), fault, call);
    std::string text;
    try {
      save_there(2);
    } catch (const CheckpointError& error) {
      text = error.what();
    }
    inject("", Fault::kNone, 0);
    return text;
  }

  void fill_disk_at_any_call() {
    const int64_t calls = count_calls();
    int failed = 0;
    for (int64_t call = 0; call < calls; ++call) {
      SCOPED_TRACE(call);
      const std::string error = error_with(Fault::kNoSpace, call);
      failed += !error.empty();
      if (!error.empty()) {
        EXPECT_THAT(error,
                    AllOf(HasSubstr("No space left on device"),
                          HasSubstr("The disk is full: free some space or save elsewhere. "
                                    "Checkpoints that were saved before are as they were.")));
      }
      const double left = value_of(path("c"));
      EXPECT_TRUE(left == 2 || (left == 1 && !error.empty())) << left;
    }
    EXPECT_GT(failed, calls / 2);
  }

  Medium medium_ = Medium::kDisk;
};

TEST_F(SavesTest, KilledAtAnyFileCallLeavesTheOldOrTheNewCheckpoint) { kill_at_any_call(); }

/// Folders in memory list their files in another order, and so lose them in another.
class SavesInMemory : public SavesTest {
 protected:
  SavesInMemory() : SavesTest("/dev/shm/smp-test-" + std::to_string(getpid())) {}
  ~SavesInMemory() override { fs::remove_all(fs::path(path("")).parent_path().parent_path()); }
};

TEST_F(SavesInMemory, KilledAtAnyFileCallLeavesTheOldOrTheNewCheckpoint) { kill_at_any_call(); }

/// Saves that are written over the files that the one before has replaced.
class SavesOverMemory : public SavesInMemory {
 protected:
  SavesOverMemory() { medium_ = medium_of("/dev/shm"); }

  /// Inodes of the files of the checkpoint.
  std::set<ino_t> inodes() const {
    std::set<ino_t> found;
    for (const auto& entry : fs::directory_iterator(path("c"))) {
      struct stat status = {};
      EXPECT_EQ(::stat(entry.path().c_str(), &status), 0);
      if (entry.path().extension() == ".safetensors") found.insert(status.st_ino);
    }
    return found;
  }
};

TEST_F(SavesOverMemory, KilledAtAnyFileCallLeavesTheOldOrTheNewCheckpoint) { kill_at_any_call(); }

TEST_F(SavesOverMemory, FullAtAnyFileCallLosesNothing) { fill_disk_at_any_call(); }

TEST_F(SavesOverMemory, TheMemoryOfTheOneBeforeTheLastIsUsedAgain) {
  ASSERT_EQ(medium_, Medium::kMemory);
  save(path("c"), 1, 5000, medium_);
  const auto first = inodes();
  EXPECT_EQ(first.size(), 4u);
  save(path("c"), 2, 5000, medium_);
  const auto second = inodes();
  EXPECT_NE(first, second);
  save(path("c"), 3, 6, medium_);  // shorter
  EXPECT_EQ(inodes(), first);
  EXPECT_EQ(value_of(path("c")), 3);
  save(path("c"), 4, 6, medium_);
  EXPECT_EQ(inodes(), second);
  EXPECT_EQ(value_of(path("c")), 4);
}

TEST_F(SavesOverMemory, NothingOfAnotherLayoutStays) {
  save(path("c"), 1, 6, medium_);
  save(path("c"), 2, 6, medium_);
  const Writer alone(path("c"), std::make_shared<SaveLock>(lock_of_writer(path("c"))), medium_);
  alone.begin();
  alone.commit({alone.write_shard(0, 1, {{{"weight0", at::full({6}, 3.0), {}}}, {}, {}})}, {});
  EXPECT_EQ(value_of(path("c")), 3);
  EXPECT_EQ(inodes().size(), 1u);
}

TEST_F(SavesTest, FullDiskAtAnyFileCallLosesNothing) { fill_disk_at_any_call(); }

TEST_F(SavesTest, DiskThatStoresOtherBitsIsFoundOut) {
  const int64_t calls = count_calls();
  int found = 0;
  for (int64_t call = 0; call < calls; ++call) {
    SCOPED_TRACE(call);
    const std::string error = error_with(Fault::kFlipBit, call);
    if (error.empty()) {
      EXPECT_EQ(value_of(path("c")), 2);  // nothing was written any more
      continue;
    }
    ++found;
    EXPECT_THAT(error, AllOf(HasSubstr(path("c.tmp/")),
                             HasSubstr("was not stored as it was written: expected"),
                             HasSubstr("at fault: save to another one.")));
    EXPECT_EQ(value_of(path("c")), 1);
  }
  EXPECT_GT(found, calls / 2);
}

/// The exit status of a process that saves again and again; 0 unless something but the lock of
/// another one was in the way.
int save_often(const std::string& path, int saves) {
  for (int i = 0; i < saves; ++i) {
    try {
      save(path, i);
    } catch (const CheckpointError& error) {
      // Without a "since" where the other one has just taken it.
      if (std::string(error.what()).find(" saves there") != std::string::npos) {
        continue;
      }
      std::fprintf(stderr, "%s\n", error.what());
      return 1;
    }
  }
  return 0;
}

pid_t start_saving(const std::string& path, int saves) {
  const pid_t child = fork();
  if (child == 0) _exit(save_often(path, saves));
  return child;
}

/// SMP_KILLS says how many jobs are killed, by default 15.
TEST_F(SavesTest, TwoJobsThatSaveIntoOneFolderLoseNothing) {
  constexpr int kSavesOfAJob = 20;
  const char* kills = std::getenv("SMP_KILLS");
  const int rounds = kills == nullptr ? 15 : std::stoi(kills);
  ASSERT_GT(rounds, 0);
  save(path("c"), 1);
  std::mt19937 random(5);
  for (int round = 0; round < rounds; ++round) {
    SCOPED_TRACE(round);
    const std::array<pid_t, 2> jobs = {start_saving(path("c"), kSavesOfAJob),
                                       start_saving(path("c"), kSavesOfAJob)};
    usleep(random() % 30'000);
    const size_t victim = random() % 2;
    kill(jobs[victim], SIGKILL);
    for (size_t job = 0; job < jobs.size(); ++job) {
      int status = 0;
      ASSERT_EQ(waitpid(jobs[job], &status, 0), jobs[job]);
      if (job != victim) {
        EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
      }
    }
    value_of(path("c"));  // whole, and of one save
  }
  save(path("c"), 2);
  EXPECT_EQ(value_of(path("c")), 2);
  std::set<std::string> names;
  for (const auto& entry : fs::directory_iterator(path(""))) names.insert(entry.path().filename());
  EXPECT_EQ(names, std::set<std::string>{"c"});
}

/// A save replaces the checkpoint in two moves, each before a load opens another of its files.
TEST_F(SavesTest, LoadsBetweenTheMovesOfASaveAreOfOneMoment) {
  for (int first = 0, reads = 1; first < reads; ++first) {
    for (int second = first; second < reads || second == first; ++second) {
      SCOPED_TRACE(::testing::Message() << first << " " << second);
      save(path("c"), 1);
      save(path("next"), 2);
      reads = 0;
      before_reads(path("c"), [&] {
        if (reads == first) fs::rename(path("c"), path("c.replaced"));
        if (reads == second) {
          fs::rename(path("next"), path("c"));
          fs::remove_all(path("c.replaced"));
        }
        ++reads;
      });
      const double value = value_of(path("c"));
      EXPECT_TRUE(value == 1 || value == 2) << value;
      inject("", Fault::kNone, 0);
      fs::remove_all(path("next"));
    }
  }
}

TEST_F(SavesTest, LoadsWhileAnotherJobSavesAreOfOneMoment) {
  save(path("c"), 1);
  const pid_t child = start_saving(path("c"), 150);
  int status = 0, loads = 0;
  while (waitpid(child, &status, WNOHANG) == 0) {
    value_of(path("c"));
    ++loads;
  }
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  EXPECT_GT(loads, 0);
}

constexpr uint64_t kSmallDisk = 256 << 10;

/// Saves on a small disk, first one that fits and then one that does not.
std::string fill_small_disk(const std::string& folder) {
  save(folder + "/c", 1);
  const std::string error = checkpoint_error([&] { save(folder + "/c", 2, 40'000); });
  if (error.find("The disk is full") == std::string::npos) return "expected a full disk: " + error;
  Writer(folder + "/c").abandon();
  if (value_of(folder + "/c") != 1) return "the previous checkpoint is gone";
  save(folder + "/c", 3);
  return value_of(folder + "/c") == 3 ? "" : "the disk stays full";
}

/// Data that fit are written before the disk is full, as the kernel does it, and removing makes
/// room.
TEST_F(SavesTest, SmallDiskIsCleared) {
  fs::create_directories(path("disk"));
  limit_space(path("disk"), kSmallDisk);
  EXPECT_EQ(fill_small_disk(path("disk")), "");
}

/// Gives this process a small disk of its own at `folder`; false where that is not allowed.
bool mount_small_disk(const std::string& folder) {
  const uid_t user = getuid();
  if (unshare(CLONE_NEWNS) != 0) {
    if (unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0) return false;
    spill("/proc/self/uid_map", "0 " + std::to_string(user) + " 1");
  }
  mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr);
  const std::string size = "size=" + std::to_string(kSmallDisk);
  return mount("none", folder.c_str(), "tmpfs", 0, size.c_str()) == 0;
}

TEST_F(SavesTest, SmallDiskKeepsThePreviousCheckpoint) {
  constexpr int kNotAllowed = 77;
  fs::create_directories(path("disk"));
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    if (!mount_small_disk(path("disk"))) _exit(kNotAllowed);
    std::string problem;
    try {
      problem = fill_small_disk(path("disk"));
    } catch (const std::exception& error) {
      problem = error.what();
    }
    std::fprintf(stderr, "%s\n", problem.c_str());
    _exit(problem.empty() ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status));
  if (WEXITSTATUS(status) == kNotAllowed) {
    GTEST_SKIP() << "this machine lets the test mount no file system; SmallDiskIsCleared and "
                    "FullDiskAtAnyFileCallLosesNothing have the kernel's answers faked";
  }
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

// A few of those that `bazel run //tests/checkpoint:kill_saves` makes.
TEST_F(SavesTest, KilledWhileTwoRanksSave) {
  constexpr int kKills = 12;
  const auto count = smp::testing::kill_saves(path("run"), kKills, /*seed=*/7);
  EXPECT_TRUE(count.problems.empty()) << count.problems.front();
  EXPECT_EQ(count.at_calls + count.at_times, kKills);
  EXPECT_EQ(count.next + count.previous, kKills);
  EXPECT_LT(count.finished, kKills / 2);
  EXPECT_GT(count.calls, 60);
}

/// Two stages x two replicas that save on a disk which is full from some call on: each rank's error
/// after its prefix.
std::set<std::string> errors_of_ranks(const std::string& folder, bool asynchronous) {
  std::set<std::string> texts;
  std::mutex mutex;
  torch::manual_seed(1);
  run_as_threads(4, Config().partitions(2).microbatches(2).ddp(true), [&] {
    torch::nn::Linear net(6, 3);
    DistributedModel<torch::nn::Linear> model(net);
    auto train = step([&](torch::Tensor x) {
      auto loss = model(x).square().mean();
      model->backward(loss);
      return loss;
    });
    train(at::ones({4, 6}));
    const auto options = SaveCheckpointOptions().asynchronous(asynchronous);
    save_checkpoint(folder, "a", model, options).wait();
    if (rank() == 0) inject(folder, Fault::kNoSpace, 3);
    barrier();
    try {
      save_checkpoint(folder, "a", model, options).wait();
      ADD_FAILURE() << "saved on a full disk";
    } catch (const CheckpointError& error) {
      const std::lock_guard lock(mutex);
      texts.insert(error.what() + core::error_prefix().size());
    }
    barrier();
    if (rank() == 0) {
      EXPECT_FALSE(fs::exists(folder + "/a_partial.tmp"));
      inject("", Fault::kNone, 0);
    }
    barrier();
    // The world is as it was.
    train(at::ones({4, 6}));
    resume_from_checkpoint(folder, "a", model);
    save_checkpoint(folder, "b", model, options).wait();
    resume_from_checkpoint(folder, "b", model);
  });
  return texts;
}

/// A failed save without a wait: the next one tells of it.
TEST_F(SavesTest, UnseenErrorOfABackgroundSaveComesFromTheNext) {
  std::set<std::string> texts;
  std::mutex mutex;
  run_as_threads(2, Config().partitions(2), [&] {
    torch::nn::Linear net(6, 3);
    DistributedModel<torch::nn::Linear> model(net);
    smp::save(path("a"), model);
    if (rank() == 0) inject(path(""), Fault::kNoSpace, 3);
    barrier();
    const SaveHandle handle = save_async(path("a"), model);
    while (!handle.is_done()) usleep(1000);
    if (rank() == 0) {
      EXPECT_THAT(checkpoint_error([&] { handle.wait(); }), HasSubstr("No space left"));
    }
    barrier();
    if (rank() == 0) inject("", Fault::kNone, 0);
    barrier();
    const std::string text = checkpoint_error([&] { smp::save(path("b"), model); });
    smp::save(path("b"), model);  // which is none any more
    const std::lock_guard lock(mutex);
    texts.insert(text.substr(text.find("] ")));
  });
  ASSERT_EQ(texts.size(), 1u);  // from rank 1, which has not seen it, to both
  EXPECT_THAT(*texts.begin(), HasSubstr("the asynchronous save before has failed: cannot "));
  EXPECT_FALSE(fs::exists(path("a.tmp")));
  EXPECT_NO_THROW(Reader(path("a")));
}

TEST_F(SavesTest, FullDiskIsOneErrorOnAllRanksWhichGoOn) {
  for (const bool asynchronous : {false, true}) {
    const auto texts = errors_of_ranks(path("run"), asynchronous);
    ASSERT_EQ(texts.size(), 1u);
    EXPECT_THAT(*texts.begin(), HasSubstr("No space left on device. The disk is full"));
  }
}

}  // namespace
}  // namespace smp::checkpoint
