// SPDX-License-Identifier: Apache-2.0
// Saves that go on while the ranks train.

#include <gmock/gmock.h>

#include <chrono>
#include <thread>

#include "checkpoint/reader.h"
#include "comm/threads/run_ranks.h"
#include "runtime/together.h"
#include "tests/smp/saved_run.h"

namespace smp::testing {
namespace {

using ::testing::HasSubstr;

constexpr auto kAsync = [] { return SaveCheckpointOptions().asynchronous(true); };

class SaveAsync : public SavedRunTest {
 protected:
  /// All tensors of two checkpoints have the same bits, and all else is the same.
  static void expect_same_checkpoints(const std::string& a, const std::string& b) {
    checkpoint::Reader left(a), right(b);
    EXPECT_TRUE(left.find_damage(checkpoint::Reader::Section::kAll).empty());
    EXPECT_EQ(left.index().to_text(), right.index().to_text());  // hold all tensors' hashes
  }
};

TEST_F(SaveAsync, SavesWhatThereWasAtTheCall) {
  for (const auto& [stages, replicas, sharded] :
       {std::tuple{2, 1, false}, {2, 2, false}, {1, 2, true}}) {
    run(
        stages, replicas,
        [&](SavedRun& run) {
          run.train(0);
          save(path("expected"), run.model, run.optimizer, R"({"step":1})");
          std::string content = R"({"step":1})";
          const SaveHandle handle = save_async(path("got"), run.model, run.optimizer, content);
          content = R"({"step":2})";
          for (int i = 1; i < 4; ++i) run.train(i);  // other values everywhere, step by step
          handle.wait();
          EXPECT_TRUE(handle.is_done());
          handle.wait();
        },
        5, sharded);
    expect_same_checkpoints(path("got"), path("expected"));
  }
}

TEST_F(SaveAsync, FullOnesToo) {
  run(3, 1, [&](SavedRun& run) {
    run.train(0);
    save_checkpoint(path(), "expected", run.model, SaveCheckpointOptions().partial(false));
    const auto handle = save_checkpoint(path(), "got", run.model, kAsync().partial(false));
    for (int i = 1; i < 3; ++i) run.train(i);
    handle.wait();
  });
  expect_same_checkpoints(path("got"), path("expected"));
}

/// The bits of training are those without a save.
TEST_F(SaveAsync, DoesNotDisturbTraining) {
  std::map<std::string, torch::Tensor> states[2];
  for (const bool saves : {false, true}) {
    std::mutex mutex;
    run(2, 2, [&](SavedRun& run) {
      std::vector<SaveHandle> handles;
      for (int i = 0; i < 4; ++i) {
        run.train(i);
        if (saves) handles.push_back(save_async(path("a"), run.model, run.optimizer));
      }
      const auto state = run.model->state_dict();
      const std::lock_guard lock(mutex);
      for (const auto& item : state) states[saves][item.key()] = item.value();
    });
  }
  expect_same(states[1], states[0]);
}

TEST_F(SaveAsync, NextSaveWaitsAndLoadDoesToo) {
  run(2, 1, [&](SavedRun& run) {
    run.train(0);
    std::vector<SaveHandle> handles;
    for (int i = 0; i < 5; ++i) {
      handles.push_back(
          save_async(path("a"), run.model, run.optimizer, "{\"i\":" + std::to_string(i) + "}"));
    }
    EXPECT_EQ(load(path("a"), run.model, run.optimizer).user_content, R"({"i":4})");
    handles.push_back(save_async(path("b"), run.model, run.optimizer));
  });
  // The end of the ranks waits for the last.
  EXPECT_TRUE(checkpoint::Reader(path("b")).find_damage(checkpoint::Reader::Section::kAll).empty());
}

/// A rank at work is not taken for one that is stopped. The time-out is longer than a busy machine
/// may stop.
TEST_F(SaveAsync, RanksMayWriteForLongerThanTheTimeOut) {
  comm::run_ranks(2, [](const comm::CommunicatorPtr& world) {
    constexpr std::chrono::seconds kTimeout{12};
    world->set_timeout(kTimeout);
    const auto results = runtime::together_for_long(*world, [&] {
      if (world->rank() == 1) std::this_thread::sleep_for(kTimeout + std::chrono::seconds(1));
      return std::to_string(world->rank());
    });
    EXPECT_THAT(results, ::testing::ElementsAre("0", "1"));
  });
}

/// A save that cannot even begin is an error of the call.
TEST_F(SaveAsync, CannotBeginWhereThereIsAFile) {
  Texts texts;
  std::ofstream(path("file")) << "in the way";
  run(2, 1, [&](SavedRun& run) {
    texts.of([&] { save_async(path("file/a"), run.model, run.optimizer).wait(); });
    save_async(path("a"), run.model, run.optimizer).wait();
  });
  EXPECT_THAT(texts.the_same_from(2), HasSubstr("Not a directory"));
}

}  // namespace
}  // namespace smp::testing
