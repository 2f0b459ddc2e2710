// SPDX-License-Identifier: Apache-2.0
// Copies in memory, and the copy from which each start goes on; jobs that smprun starts again are
// in //tests/failure:restart_test.

#include <gmock/gmock.h>

#include <cstdlib>
#include <map>
#include <mutex>
#include <set>
#include <tuple>

#include "checkpoint/reader.h"
#include "checkpoint/writer.h"
#include "core/config_file.h"
#include "core/restart.h"
#include "runtime/save/copy_pace.h"
#include "tests/checkpoint/content.h"
#include "tests/smp/oracle.h"
#include "tests/smp/recovery_in_memory.h"
#include "tests/smp/saved_run.h"

namespace smp::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class KeptCopy : public SavedRunTest {
 protected:
  KeptCopy() {
    setenv(core::kRecoveryDirVariable, path().c_str(), 1);
    configure(R"({"recovery": "restart", "recovery_interval": 1})");
  }
  ~KeptCopy() override {
    for (const char* name :
         {core::kRecoveryDirVariable, core::kParametersVariable, "TORCHELASTIC_RESTART_COUNT"}) {
      unsetenv(name);
    }
  }

  static void configure(const char* parameters) {
    setenv(core::kParametersVariable, parameters, 1);
  }
  /// The next run is one that torchrun's agent has started again.
  static void start_again() { setenv("TORCHELASTIC_RESTART_COUNT", "1", 1); }

  int64_t kept_step() const { return checkpoint::Reader(kept_copy()).index().run.step; }
};

TEST_F(KeptCopy, AStartGoesOnFromIt) {
  std::vector<double> losses;
  run(1, 1, [&](SavedRun& run) {
    for (int i = 0; i < 2; ++i) run.train(i);
    losses.push_back(run.train(2).item<double>());
  });
  run(2, 1, [&](SavedRun& run) {
    EXPECT_FALSE(resume_after_restart(run.model, run.optimizer)) << "the first start";
    for (int i = 0; i < 2; ++i) {
      run.train(i);
      keep_copy(run.model, run.optimizer, std::to_string(10 * i));
    }
    run.train(2);  // is lost
  });
  start_again();
  ::testing::internal::CaptureStderr();
  run(
      1, 1,
      [&](SavedRun& run) {
        const auto resumed = resume_after_restart(run.model, run.optimizer);
        ASSERT_TRUE(resumed);
        EXPECT_EQ(resumed->step, 2);
        EXPECT_EQ(resumed->user_content, "10");
        losses.push_back(run.train(2).item<double>());
      },
      /*seed=*/9);
  EXPECT_THAT(::testing::internal::GetCapturedStderr(),
              HasSubstr("restart 1: goes on from step 2; 1 step is trained again\n"));
  ASSERT_EQ(losses.size(), 2);
  EXPECT_EQ(losses[1], losses[0]);
}

/// A start that has not trained yet has all that it has loaded.
TEST_F(KeptCopy, BeforeTheFirstStepItHoldsWhatWasLoaded) {
  for (const auto& [stages, replicas] : {std::pair(1, 1), std::pair(2, 1), std::pair(2, 2)}) {
    SCOPED_TRACE(c10::str(stages, " x ", replicas));
    unsetenv("TORCHELASTIC_RESTART_COUNT");
    run(stages, replicas, [&](SavedRun& run) {
      for (int i = 0; i < 2; ++i) run.train(i);
      keep_copy(run.model, run.optimizer);
    });
    auto expected = content_of(kept_copy());
    EXPECT_FALSE(expected["optimizer"]["tensors"].empty());
    start_again();
    run(
        stages, replicas,
        [&](SavedRun& run) {
          EXPECT_TRUE(resume_after_restart(run.model, run.optimizer));
          keep_copy(run.model, run.optimizer, R"({"again": true})");
        },
        /*seed=*/9);
    expected["user_content"]["again"] = true;
    EXPECT_EQ(content_of(kept_copy()), expected);
  }
}

/// Each replica writes some of them.
TEST_F(KeptCopy, HoldsAverages) {
  Named expected;
  std::mutex mutex;
  run(2, 2, [&](SavedRun& run) {
    const Ema ema(run.model, EmaOptions().decay(0.5));
    for (int i = 0; i < 3; ++i) {
      run.train(i);
      ema.update();
      keep_copy(run.model, run.optimizer);
    }
    const auto averaged = ema.averaged();
    const Named state = to_map(run.model->state_dict());
    const std::lock_guard lock(mutex);
    expected = state;
  });
  start_again();
  run(
      1, 1,
      [&](SavedRun& run) {
        const Ema ema(run.model, EmaOptions().decay(0.5));
        ASSERT_TRUE(resume_after_restart(run.model, run.optimizer));
        EXPECT_EQ(ema.updates(), 3);
        run.train(3);
        const auto averaged = ema.averaged();
        expect_equal(to_map(run.model->state_dict()), expected, "average");
      },
      /*seed=*/9);
}

TEST_F(KeptCopy, OfSomeCallsOneKeepsIt) {
  configure(R"({"recovery": "restart", "recovery_interval": 3})");
  for (const int calls : {1, 2, 3, 4, 6, 7}) {
    run(2, 1, [&](SavedRun& run) {
      for (int i = 0; i < calls; ++i) {
        run.train(0);
        keep_copy(run.model, run.optimizer);
      }
    });
    EXPECT_EQ(kept_step(), (calls - 1) / 3 * 3 + 1) << calls;
  }
}

/// Training goes on, and the copy before stays.
TEST_F(KeptCopy, WhatIsInTheWayOfIsAWarning) {
  ::testing::internal::CaptureStderr();
  run(2, 1, [&](SavedRun& run) {
    run.train(0);
    keep_copy(run.model, run.optimizer);
    save(path("saved"), run.model, run.optimizer);  // waits for the copy
    if (rank() == 0) {
      const std::string folder = checkpoint::temporary_folder(kept_copy());
      std::filesystem::create_directories(folder);
      std::ofstream(folder + "/notes") << "of somebody else";
    }
    barrier();
    for (int i = 1; i < 4; ++i) {
      run.train(i);
      keep_copy(run.model, run.optimizer);
    }
  });
  const std::string text = ::testing::internal::GetCapturedStderr();
  const std::string warning = "[smp rank 0 pp 0/2] warning: smp::keep_copy: ";
  EXPECT_THAT(text, AllOf(HasSubstr(warning), HasSubstr("notes"),
                          HasSubstr(". Training goes on, and the copy before stays")));
  EXPECT_EQ(text.find("warning: ", text.find(warning) + warning.size()), std::string::npos)
      << "it is said once: " << text;
  EXPECT_EQ(kept_step(), 1);
}

/// Which they are depends on time, but all ranks keep the same.
TEST_F(KeptCopy, AsManyAsTheTimeAllows) {
  configure(R"({"recovery": "restart"})");
  run(2, 2, [&](SavedRun& run) {
    for (int i = 0; i < 20; ++i) {
      run.train(0);
      keep_copy(run.model, run.optimizer);
    }
  });
  EXPECT_GE(kept_step(), 2) << "what the first took is known after the second";
}

TEST(CopyPace, CopiesThemselvesTakeTwoPercentOfTheTimeAtMost) {
  EXPECT_EQ(runtime::next_interval(1, 0.02, 1), 1);
  EXPECT_EQ(runtime::next_interval(1, 0.021, 1), 2);
  EXPECT_EQ(runtime::next_interval(2, 0.024, 0.364), 4) << "the GPT of bench:kept_copy";
  EXPECT_EQ(runtime::next_interval(8, 0.024, 0.364), 4);
  EXPECT_EQ(runtime::next_interval(1, 10, 0), 2) << "one odd moment";
  EXPECT_EQ(runtime::next_interval(4, 10, 0), 8) << "a program that only keeps copies";
}

/// The number of files that hold the `entries`.
size_t count_files(const std::map<std::string, checkpoint::TensorEntry>& entries) {
  std::set<std::string> files;
  for (const auto& [name, entry] : entries) files.insert(entry.file);
  return files.size();
}

/// Each replica writes a part of the common tensors.
TEST_F(KeptCopy, InMemoryItHasWhatASaveHas) {
  const RecoveryInMemory memory;
  for (const auto& [stages, replicas, sharded] :
       {std::tuple(2, 1, false), std::tuple(1, 2, false), std::tuple(2, 2, false),
        std::tuple(1, 4, false), std::tuple(2, 2, true)}) {
    SCOPED_TRACE(c10::str(stages, " x ", replicas, sharded ? ", sharded" : ""));
    run(
        stages, replicas,
        [&](SavedRun& run) {
          for (int i = 0; i < 3; ++i) {
            run.train(i);
            keep_copy(run.model, run.optimizer);
          }
          save(path("saved"), run.model, run.optimizer);
        },
        /*seed=*/5, sharded);
    EXPECT_EQ(content_of(kept_copy()), content_of(path("saved")));
    if (sharded) continue;  // which replica puts which states together depends on buckets
    const auto kept = checkpoint::Reader(kept_copy()).index();
    EXPECT_EQ(count_files(kept.model), stages * replicas);
    EXPECT_EQ(count_files(kept.optimizer_tensors), stages * replicas);
  }
}

TEST_F(KeptCopy, WithoutRecoveryThereIsNone) {
  configure(R"({"recovery": "off"})");
  run(2, 1, [&](SavedRun& run) {
    run.train(0);
    keep_copy(run.model, run.optimizer);
  });
  EXPECT_FALSE(std::filesystem::exists(kept_copy()));
}

TEST_F(KeptCopy, TheNewestIsTakenOfCopiesAndCheckpoints) {
  configure(R"({"recovery": "restart", "recovery_interval": 100})");
  const std::string saved = path("saved");
  const auto resumed_step = [&](bool saves_after) {
    unsetenv("TORCHELASTIC_RESTART_COUNT");
    run(2, 1, [&](SavedRun& run) {
      run.train(0);
      if (!saves_after) save(saved, run.model, run.optimizer);
      if (!saves_after) run.train(1);
      keep_copy(run.model, run.optimizer);
      if (saves_after) run.train(1);
      if (saves_after) run.train(2);
      if (saves_after) save(saved, run.model, run.optimizer);
    });
    start_again();
    int64_t step = 0;
    run(1, 1, [&](SavedRun& run) { step = resume_after_restart(run.model, run.optimizer)->step; });
    return step;
  };
  EXPECT_EQ(resumed_step(false), 2) << "the copy";
  EXPECT_EQ(resumed_step(true), 3) << "the checkpoint";
}

TEST_F(KeptCopy, AProgramThatDoesNotAskForItIsWarned) {
  run(1, 1, [&](SavedRun& run) {
    run.train(0);
    keep_copy(run.model, run.optimizer);
  });
  start_again();
  ::testing::internal::CaptureStderr();
  run(1, 1, [&](SavedRun& run) { run.train(0); });
  EXPECT_THAT(
      ::testing::internal::GetCapturedStderr(),
      HasSubstr("warning: restart 1: goes on from step 0; 1 step is trained again, though there "
                "is a copy in memory. Call smp::resume_after_restart before the first step\n"));
}

TEST_F(KeptCopy, NeedsAFolder) {
  unsetenv(core::kRecoveryDirVariable);
  std::string error;
  try {
    run(2, 1, [](SavedRun&) {});
  } catch (const ConfigError& e) {
    error = e.what();
  }
  EXPECT_THAT(error, HasSubstr("config key \"recovery\": \"restart\" needs a launcher that starts "
                               "the job again, and SMP_RECOVERY_DIR, the folder for what it goes "
                               "on from, is not set (on rank 0). Start the program by smprun, or "
                               "by torchrun with that variable (docs/recovery.md)"));
}

}  // namespace
}  // namespace smp::testing
