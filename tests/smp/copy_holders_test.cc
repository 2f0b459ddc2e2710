// SPDX-License-Identifier: Apache-2.0
// Copies in memory where hosts share no folder: the keeper of each file, how files travel, and jobs
// that lose hosts. The hosts are folders of one, which ranks as threads take for their own; real
// ones are pretended by //tests/failure:lost_host_test.

#include "runtime/save/copy_holders.h"

#include <gmock/gmock.h>

#include <cstdlib>
#include <map>
#include <mutex>
#include <random>
#include <set>

#include "checkpoint/index.h"
#include "checkpoint/writer.h"
#include "comm/threads/run_ranks.h"
#include "core/config_file.h"
#include "core/restart.h"
#include "runtime/runtime.h"
#include "runtime/save/background_save.h"
#include "runtime/save/copy_transfer.h"
#include "tests/smp/saved_run.h"

namespace smp::testing {
namespace {

namespace fs = std::filesystem;
using checkpoint::Medium;
using runtime::CopyHolders;
using runtime::FileTransfer;
using ::testing::HasSubstr;

/// Host of each rank.
using Hosts = std::vector<int>;

/// Which ranks see each rank's folder, where folders are the hosts'.
std::vector<std::string> seen_on(const Hosts& hosts) {
  std::vector<std::string> seen;
  for (const int mine : hosts) {
    std::string all;
    for (const int other : hosts) all += mine == other ? '+' : '-';
    seen.push_back(all);
  }
  return seen;
}

TEST(CopyHolders, AreTheRanksThatSeeOneFolder) {
  const CopyHolders holders("/m", 4, seen_on({7, 3, 7, 3, 3, 9}), Medium::kMemory);
  ASSERT_EQ(holders.count(), 3);
  EXPECT_EQ(holders.ranks(0), (std::vector<int>{0, 2}));
  EXPECT_EQ(holders.ranks(1), (std::vector<int>{1, 3, 4}));
  EXPECT_EQ(holders.ranks(2), (std::vector<int>{5}));
  EXPECT_EQ(holders.mine(), 1);
  EXPECT_EQ(holders.number(), 2);
  EXPECT_FALSE(holders.is_first());
  EXPECT_EQ(holders.first(1), 1);
  EXPECT_EQ(holders.before(0), 2);
  EXPECT_EQ(holders.before(2), 1);
  std::vector<int> keepers;
  for (int rank = 0; rank < 6; ++rank) keepers.push_back(holders.keeper_of(rank));
  EXPECT_EQ(keepers, (std::vector<int>{1, 5, 3, 5, 5, 0}));
  EXPECT_EQ(holders.copy(), "/m/copy");
  EXPECT_EQ(CopyHolders("/m", 1, seen_on({0, 0}), Medium::kMemory).count(), 1);
}

TEST(CopyHolders, RanksThatSeeOthersByHalvesAreAnError) {
  const auto text_of = [](const std::vector<std::string>& seen) {
    Texts texts;
    texts.of<ConfigError>([&] { CopyHolders("/m", 0, seen, Medium::kMemory); });
    return texts.the_same_from(1);
  };
  EXPECT_EQ(
      text_of({"++", "-+"}),
      "config key \"recovery\": rank 0 sees files of rank 1 in the folder for copies, but not "
      "those of all ranks that rank 1 sees there. Set SMP_RECOVERY_DIR to a folder that "
      "either all ranks see, or those of one host");
  EXPECT_THAT(text_of({"++-", "+++", "-++"}), HasSubstr("rank 0 sees files of rank 1 in"));
  EXPECT_THAT(text_of({"-"}), HasSubstr("rank 0 sees files of rank 0 in"));
}

class SpreadCopies : public SavedRunTest {
 protected:
  SpreadCopies() {
    setenv(core::kRecoveryDirVariable, path("notes").c_str(), 1);
    setenv(core::kParametersVariable, R"({"recovery": "restart", "recovery_interval": 1})", 1);
  }
  ~SpreadCopies() override {
    for (const char* name :
         {core::kRecoveryDirVariable, core::kParametersVariable, "TORCHELASTIC_RESTART_COUNT"}) {
      unsetenv(name);
    }
  }
  static void start_again() { setenv("TORCHELASTIC_RESTART_COUNT", "1", 1); }

  std::string folder_of(int host) const { return path("host" + std::to_string(host)); }

  /// From here on the ranks of a run are on these hosts.
  void spread(const Hosts& hosts) const {
    auto& runtime = runtime::Runtime::get();
    const std::string folder = folder_of(hosts[static_cast<size_t>(rank())]);
    runtime.checkpoint_context->holders =
        std::make_shared<CopyHolders>(CopyHolders::find(folder, *runtime.world()));
  }

  /// Trains `steps` steps on these hosts, with a copy after each, from an empty memory, and perhaps
  /// with a checkpoint after the first.
  void train(int stages, int replicas, const Hosts& hosts, int steps,
             bool saves_first = false) const {
    unsetenv("TORCHELASTIC_RESTART_COUNT");
    for (const int host : hosts) fs::remove_all(folder_of(host));
    run(stages, replicas, [&](SavedRun& run) {
      spread(hosts);
      for (int i = 0; i < steps; ++i) {
        run.train(i);
        if (saves_first && i == 0) save(path("saved"), run.model, run.optimizer);
        keep_copy(run.model, run.optimizer);
      }
    });
  }

  /// The step from which a start in that layout goes on, and its next loss; nothing: -1 and 0.
  std::pair<int64_t, double> go_on(int stages, int replicas, const Hosts& hosts) const {
    std::pair<int64_t, double> result{-1, 0};
    start_again();
    run(
        stages, replicas,
        [&](SavedRun& run) {
          spread(hosts);
          const auto resumed = resume_after_restart(run.model, run.optimizer);
          if (!resumed) return;
          const double loss = run.train(static_cast<int>(resumed->step)).item<double>();
          if (rank() == 0) result = {resumed->step, loss};
        },
        /*seed=*/9);
    return result;
  }

  /// The losses of a job that nothing disturbs.
  std::vector<double> undisturbed(int replicas) const {
    std::vector<double> losses;
    run(1, replicas, [&](SavedRun& run) {
      for (int i = 0; i < kBatches; ++i) {
        const double loss = run.train(i).item<double>();
        if (rank() == 0) losses.push_back(loss);
      }
    });
    return losses;
  }

  std::set<std::string> files_in(const std::string& folder) const {
    std::set<std::string> names;
    for (const auto& entry : fs::directory_iterator(folder)) {
      names.insert(entry.path().filename().string());
    }
    return names;
  }
};

TEST_F(SpreadCopies, FoldersAreMadeAndFoundOut) {
  comm::run_ranks(4, [&](const comm::CommunicatorPtr& world) {
    const auto holders = CopyHolders::find(folder_of(world->rank() / 2) + "/deep", *world);
    EXPECT_EQ(holders.count(), 2);
    EXPECT_EQ(holders.mine(), world->rank() / 2);
  });
  EXPECT_TRUE(fs::is_empty(folder_of(1) + "/deep"));
  std::ofstream(path("file")) << "no folder";
  Texts texts;
  texts.of<ConfigError>([&] {
    comm::run_ranks(2, [&](const comm::CommunicatorPtr& world) {
      CopyHolders::find(world->rank() == 0 ? folder_of(0) : path("file"), *world);
    });
  });
  EXPECT_THAT(texts.the_same_from(1),
              HasSubstr("config key \"recovery\": rank 1 cannot write to " + path("file") +
                        ": Not a directory. Set SMP_RECOVERY_DIR to a folder that the ranks of "
                        "each host can write to"));
}

/// Any ranks to any others, at once, in pieces and less.
TEST_F(SpreadCopies, FilesTravel) {
  constexpr int kRanks = 4;
  std::mt19937 random(3);
  std::vector<FileTransfer> transfers;
  std::map<std::string, std::string> contents;
  for (int i = 0; i < 12; ++i) {
    const uint64_t size = i % 3 == 0 ? (4 << 20) * (i % 2 + 1) + i % 4 : 1 + random() % 1000;
    const int from = static_cast<int>(random() % kRanks);
    const int to = (from + 1 + static_cast<int>(random() % (kRanks - 1))) % kRanks;
    transfers.push_back({"file" + std::to_string(i), size, from, to});
    std::string& bytes = contents[transfers.back().file];
    for (uint64_t b = 0; b < size; ++b) bytes += static_cast<char>(random());
    fs::create_directories(folder_of(from));
    std::ofstream(folder_of(from) + "/" + transfers.back().file, std::ios::binary) << bytes;
  }
  for (const Medium medium : {Medium::kMemory, Medium::kDisk}) {
    comm::run_ranks(kRanks, [&](const comm::CommunicatorPtr& world) {
      fs::create_directories(folder_of(world->rank()));
      world->barrier();
      runtime::transfer_files(*world, transfers, folder_of(world->rank()), medium);
    });
    for (const FileTransfer& transfer : transfers) {
      const std::string got = folder_of(transfer.to) + "/" + transfer.file;
      EXPECT_EQ(checkpoint::read_file(got), contents[transfer.file]) << transfer.file;
      fs::remove(got);
    }
  }
}

/// The rank that has it fails; the one that waits for it does not, and gets the rest.
TEST_F(SpreadCopies, AFileThatCannotBeReadKeepsNobodyWaiting) {
  for (const int host : {0, 1}) fs::create_directories(folder_of(host));
  std::ofstream(folder_of(1) + "/there") << "bytes";
  const std::vector<FileTransfer> transfers{{"gone", 9, 0, 1}, {"there", 5, 1, 0}};
  comm::run_ranks(2, [&](const comm::CommunicatorPtr& world) {
    Texts texts;
    texts.of([&] {
      runtime::transfer_files(*world, transfers, folder_of(world->rank()), Medium::kMemory);
    });
    if (world->rank() == 0) {
      EXPECT_THAT(texts.the_same_from(1), HasSubstr("cannot open \"" + folder_of(0) + "/gone\""));
    }
  });
}

/// Each holder has its own files and those of the one before it, the index names all.
TEST_F(SpreadCopies, EachHolderKeepsThoseOfTheOneBefore) {
  for (const Hosts& hosts : {Hosts{0, 0, 1, 1}, Hosts{0, 1, 2, 3}, Hosts{0, 0, 0, 1}}) {
    train(2, 2, hosts, 4);
    const auto index = checkpoint::Index::from_text(
        checkpoint::read_file(folder_of(0) + "/copy/index.json"), "index");
    EXPECT_EQ(index.run.step, 4);
    std::set<std::string> all;
    for (const auto& [name, size] : index.files) all.insert(name);
    const int count = hosts.back() + 1;
    std::map<std::string, int> holders_of;
    for (int host = 0; host < count; ++host) {
      const std::string copy = folder_of(host) + "/copy";
      EXPECT_EQ(checkpoint::read_file(copy + "/index.json"),
                checkpoint::read_file(folder_of(0) + "/copy/index.json"));
      for (const std::string& name : files_in(copy)) {
        if (name == "index.json") continue;
        EXPECT_EQ(fs::file_size(copy + "/" + name), index.files.at(name));
        ++holders_of[name];
      }
    }
    EXPECT_EQ(holders_of.size(), all.size());
    for (const auto& [name, number] : holders_of) EXPECT_EQ(number, 2) << name;
  }
}

/// Any one host is lost, and comes back empty or as another one; the layout may change.
TEST_F(SpreadCopies, OneHostMayBeLost) {
  const auto losses = undisturbed(1);
  for (const auto& [stages, replicas, hosts] :
       {std::tuple(2, 1, Hosts{0, 1}), std::tuple(3, 1, Hosts{0, 1, 2}),
        std::tuple(4, 1, Hosts{0, 0, 1, 1})}) {
    for (int lost = 0; lost <= hosts.back(); ++lost) {
      SCOPED_TRACE(c10::str(stages, " x ", replicas, ", lost host ", lost));
      train(stages, replicas, hosts, 3);
      fs::remove_all(folder_of(lost));
      EXPECT_EQ(go_on(stages, replicas, hosts), std::pair(int64_t{3}, losses[3]));
      // All have all now, so all others may be lost.
      for (int other = 0; other <= hosts.back(); ++other) {
        if (other != lost) fs::remove_all(folder_of(other));
      }
      EXPECT_EQ(go_on(1, 1, Hosts{lost}), std::pair(int64_t{3}, losses[3]));
    }
  }
}

TEST_F(SpreadCopies, OfReplicasToo) {
  const auto losses = undisturbed(2);
  train(2, 2, Hosts{0, 1, 0, 1}, 3);
  fs::remove_all(folder_of(0));
  EXPECT_EQ(go_on(1, 2, Hosts{0, 1}), std::pair(int64_t{3}, losses[3]));
}

/// Files that a host was sent for the restart are not kept for ever.
TEST_F(SpreadCopies, AfterARestartEachKeepsItsOwnAgain) {
  const Hosts hosts{0, 1, 2};
  train(3, 1, hosts, 2);
  const auto before = files_in(folder_of(1) + "/copy");
  fs::remove_all(folder_of(0));
  start_again();
  run(3, 1, [&](SavedRun& run) {
    spread(hosts);
    ASSERT_EQ(resume_after_restart(run.model, run.optimizer)->step, 2);
    for (int i = 2; i < 5; ++i) {
      run.train(i);
      keep_copy(run.model, run.optimizer);
    }
  });
  for (const char* copy : {"/copy", "/copy.replaced"}) {
    EXPECT_EQ(files_in(folder_of(1) + copy), before) << copy;
  }
  EXPECT_EQ(before.size(), 5) << "model and optimizer of two ranks, and the index";
}

/// A job is killed while its holders end a copy: some have it, and others only the one before.
TEST_F(SpreadCopies, ACopyThatNotAllHaveEnded) {
  const auto losses = undisturbed(1);
  const Hosts hosts{0, 1, 2, 3};
  for (const auto& [behind, step] : {std::pair(std::vector<int>{1}, int64_t{3}),
                                     std::pair(std::vector<int>{1, 2}, int64_t{2})}) {
    train(4, 1, hosts, 3);
    for (const int host : behind) {
      const std::string copy = checkpoint::replaced_folder(folder_of(host) + "/copy");
      fs::rename(folder_of(host) + "/copy", folder_of(host) + "/copy.tmp");
      fs::remove(folder_of(host) + "/copy.tmp/index.json");
      fs::rename(copy, folder_of(host) + "/copy");
    }
    EXPECT_EQ(go_on(4, 1, hosts), std::pair(step, losses[static_cast<size_t>(step)]));
  }
}

/// Two neighbours are more than is kept twice: the checkpoint on the disk is the last resort.
TEST_F(SpreadCopies, TwoNeighboursLostAreNamed) {
  const auto losses = undisturbed(1);
  const Hosts hosts{0, 1, 2, 3};
  train(4, 1, hosts, 3, /*saves_first=*/true);
  for (const int host : {1, 2}) fs::remove_all(folder_of(host));
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(go_on(4, 1, hosts), std::pair(int64_t{1}, losses[1]));
  EXPECT_THAT(::testing::internal::GetCapturedStderr(),
              HasSubstr("the copy in memory of step 3 is lost: no host has "
                        "model-00002-of-00004.safetensors and 1 more of its 8 files"));
}

/// It went back to an earlier checkpoint, and its copies are of fewer steps than those before.
TEST_F(SpreadCopies, TheNewestIsTheLastThatWasKept) {
  const Hosts hosts{0, 1};
  train(2, 1, hosts, 3);
  run(2, 1, [&](SavedRun& run) {
    spread(hosts);
    run.train(7);
    keep_copy(run.model, run.optimizer);
  });
  fs::remove_all(folder_of(1));
  EXPECT_EQ(go_on(2, 1, hosts).first, 1);
}

/// One host has a part only of the last copy, and all of the one before: it was sent that.
TEST_F(SpreadCopies, OneHostThatIsLeftGoesOnFromWhatItHasWhole) {
  const auto losses = undisturbed(1);
  const Hosts hosts{0, 1, 2};
  train(3, 1, hosts, 2);
  fs::remove_all(folder_of(2));
  start_again();
  run(3, 1, [&](SavedRun& run) {
    spread(hosts);
    ASSERT_EQ(resume_after_restart(run.model, run.optimizer)->step, 2);
    run.train(2);
    keep_copy(run.model, run.optimizer);
  });
  EXPECT_EQ(go_on(1, 1, Hosts{1}), std::pair(int64_t{2}, losses[2]));
}

/// A restart was ended while hosts sent each other missing files.
TEST_F(SpreadCopies, WhatAnEndedRestartHasLeftHarmsNobody) {
  const auto losses = undisturbed(1);
  const Hosts hosts{0, 1};
  train(2, 1, hosts, 3);
  fs::remove_all(folder_of(1));
  fs::create_directories(folder_of(1) + "/copy.tmp");
  std::ofstream(folder_of(1) + "/copy.tmp/model-00001-of-00002.safetensors") << "half of it";
  EXPECT_EQ(go_on(2, 1, hosts), std::pair(int64_t{3}, losses[3]));
  EXPECT_FALSE(fs::exists(folder_of(1) + "/copy.tmp"));
}

/// The memory of a host may not have room for all.
TEST_F(SpreadCopies, ACopyThatCannotBeSentLeavesTheCheckpoint) {
  const auto losses = undisturbed(1);
  const Hosts hosts{0, 1};
  train(2, 1, hosts, 3, /*saves_first=*/true);
  fs::remove_all(folder_of(1));
  fs::create_directories(folder_of(1));
  std::ofstream(folder_of(1) + "/copy") << "no folder";
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(go_on(2, 1, hosts), std::pair(int64_t{1}, losses[1]));
  EXPECT_THAT(::testing::internal::GetCapturedStderr(),
              HasSubstr("warning: cannot restore the copy in memory: "));
}

/// A host that is new to the job has no notes; another one may be lost next.
TEST_F(SpreadCopies, WhatOthersKnowIsNotedAgain) {
  const core::Restart told{1, {3, {{"a", 1}, {"b", 3}}, {}}};
  setenv(core::kRestartVariable, told.to_text().c_str(), 1);
  run(2, 1, [&](SavedRun& run) { run.train(0); });
  unsetenv(core::kRestartVariable);
  EXPECT_EQ(core::read_progress(path("notes"))->checkpoints, told.before.checkpoints);
}

/// Bytes that changed in one host's memory are found before any tensor changes.
TEST_F(SpreadCopies, DamageInOneHolderIsFound) {
  const Hosts hosts{0, 1};
  train(2, 1, hosts, 3);
  for (const int host : {0, 1}) {
    fs::remove_all(checkpoint::replaced_folder(folder_of(host) + "/copy"));
  }
  const std::string file = folder_of(1) + "/copy/model-00001-of-00002.safetensors";
  std::fstream bytes(file, std::ios::in | std::ios::out | std::ios::binary);
  bytes.seekg(-1, std::ios::end);
  const char last = static_cast<char>(bytes.get() ^ 1);
  bytes.seekp(-1, std::ios::end);
  bytes.put(last);
  bytes.close();
  Texts texts;
  texts.of([&] { go_on(2, 1, hosts); });
  EXPECT_THAT(texts.the_same_from(1), HasSubstr("is damaged:\n  model-00001-of-00002"));
}

}  // namespace
}  // namespace smp::testing
