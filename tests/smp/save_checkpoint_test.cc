// SPDX-License-Identifier: Apache-2.0
// smp::save_checkpoint and smp::resume_from_checkpoint.

#include <gmock/gmock.h>
#include <unistd.h>

#include <atomic>
#include <nlohmann/json.hpp>
#include <optional>
#include <thread>

#include "checkpoint/catalog.h"
#include "checkpoint/reader.h"
#include "checkpoint/safetensors.h"
#include "core/host.h"
#include "tests/smp/saved_run.h"

namespace smp::testing {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::UnorderedElementsAre;

std::set<std::string> names_in(const std::string& folder) {
  std::set<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder)) names.insert(entry.path().filename());
  return names;
}

class SaveCheckpoint : public SavedRunTest {
 protected:
  /// The losses of steps [first, last) in one process that goes on from `tag`, or begins.
  std::vector<torch::Tensor> losses(int stages, int replicas, int first, int last,
                                    const std::function<void(SavedRun&)>& begin) {
    std::vector<torch::Tensor> result(last - first);
    std::mutex mutex;
    run(
        stages, replicas,
        [&](SavedRun& run) {
          begin(run);
          for (int i = first; i < last; ++i) {
            const auto loss = run.train(i);
            const std::lock_guard lock(mutex);
            if (rank() == 0) result[i - first] = loss;
          }
        },
        first > 0 ? 77 : 5);
    return result;
  }
};

void expect_equal_losses(const std::vector<torch::Tensor>& got,
                         const std::vector<torch::Tensor>& expected) {
  ASSERT_EQ(got.size(), expected.size());
  for (size_t i = 0; i < got.size(); ++i) {
    EXPECT_TRUE(torch::equal(got[i], expected[i])) << "step " << i;
  }
}

TEST_F(SaveCheckpoint, LaysOutTheFolderAsDocumented) {
  run(2, 1, [&](SavedRun& run) {
    run.train(0);
    save_checkpoint(path(), "one", run.model, run.optimizer);
    save_checkpoint(path(), "one", run.model, run.optimizer,
                    SaveCheckpointOptions().partial(false));
  });
  EXPECT_THAT(names_in(path()), UnorderedElementsAre("one", "one_partial", "newest"));
  EXPECT_EQ(checkpoint::read_newest(path()), "one");
  EXPECT_THAT(names_in(path("one")), UnorderedElementsAre("index.json", "model.safetensors"));
  EXPECT_THAT(names_in(path("one_partial")),
              UnorderedElementsAre("index.json", "model-00001-of-00002.safetensors",
                                   "model-00002-of-00002.safetensors",
                                   "optimizer-00001-of-00002.safetensors",
                                   "optimizer-00002-of-00002.safetensors"));
}

TEST_F(SaveCheckpoint, APartialOneContinuesBitForBitInAnotherLayout) {
  const auto nothing = [](SavedRun&) {};
  const auto whole = losses(1, 1, 0, 6, nothing);
  run(2, 1, [&](SavedRun& run) {
    for (int i = 0; i < 3; ++i) run.train(i);
    save_checkpoint(path(), "three", run.model, run.optimizer,
                    SaveCheckpointOptions().user_content(R"({"epoch":4})"));
  });
  for (const int stages : {1, 3}) {
    const auto resume = [&](SavedRun& run) {
      const LoadedRun loaded =
          resume_from_checkpoint(path(), std::nullopt, run.model, run.optimizer);
      EXPECT_EQ(loaded.step, 3);
      EXPECT_EQ(loaded.user_content, R"({"epoch":4})");
    };
    expect_equal_losses(losses(stages, 1, 3, 6, resume), {whole.begin() + 3, whole.end()});
  }
}

/// A program need not look whether there is one.
TEST_F(SaveCheckpoint, ResumesFromOneOrBeginsAnew) {
  run(2, 1, [&](SavedRun& run) {
    const auto resume = [&](const std::optional<std::string>& tag = std::nullopt) {
      return resume_from_checkpoint(path("runs"), tag, run.model, run.optimizer,
                                    LoadOptions().begin_anew(true));
    };
    const LoadedRun first = resume();
    EXPECT_FALSE(first.found);
    EXPECT_EQ(first.step, 0);
    EXPECT_EQ(first.user_content, "{}");
    EXPECT_FALSE(resume("a").found);
    run.train(0);
    save_checkpoint(path("runs"), "a", run.model, run.optimizer);
    EXPECT_FALSE(resume("b").found);
    const LoadedRun second = resume();
    EXPECT_TRUE(second.found);
    EXPECT_EQ(second.step, 1);
    EXPECT_TRUE(resume("a").found);
    barrier();
    if (rank() == 0) fs::remove(path("runs/newest"));
    barrier();
    // Training from nothing would replace the old one.
    EXPECT_THROW(resume(), CheckpointError);
    barrier();
    if (rank() == 0) std::ofstream(path("runs/a_partial/index.json")) << "damaged";
    barrier();
    EXPECT_THROW(resume("a"), CheckpointError);
  });
}

/// The same tensors under the same names as the files of all ranks, in one file.
TEST_F(SaveCheckpoint, AFullOneIsOneFileThatPlainModulesLoad) {
  for (const auto& [stages, replicas] : {std::pair{1, 1}, {2, 2}, {3, 1}}) {
    for (const bool after_a_step : {false, true}) {
      run(stages, replicas, [&](SavedRun& run) {
        if (after_a_step) run.train(0);
        save_checkpoint(path(), "a", run.model, run.optimizer);
        save_checkpoint(path(), "a", run.model, run.optimizer,
                        SaveCheckpointOptions().partial(false));
      });
      checkpoint::Reader partial(path("a_partial")), full(path("a"));
      ASSERT_EQ(full.index().model.size(), partial.index().model.size());
      EXPECT_EQ(full.index().aliases, partial.index().aliases);
      EXPECT_EQ(full.index().run.step, after_a_step ? 1 : 0);
      EXPECT_TRUE(full.index().optimizer_tensors.empty());
      const checkpoint::SafetensorsReader file(path("a/model.safetensors"));
      for (const auto& [name, entry] : partial.index().model) {
        EXPECT_TRUE(torch::equal(file.read(name), partial.read_model(name))) << name;
      }
      TinyGpt plain(/*tied=*/true, /*layers=*/2);
      load_into_module(path("a"), *plain);
      EXPECT_TRUE(torch::equal(plain->head, partial.read_model("head")));
    }
  }
}

TEST_F(SaveCheckpoint, AFullOneHoldsParametersThatShardsDivide) {
  torch::manual_seed(5);
  std::vector<TinyGpt> nets;
  for (int i = 0; i < 4; ++i) nets.emplace_back(true, 2);
  const auto batch = TinyGptImpl::batch(4);
  const auto config = Config()
                          .microbatches(2)
                          .ddp(true)
                          .sharded_data_parallel_degree(2)
                          .sdp_param_persistence_threshold(100);
  run_as_threads(4, config, [&] {
    SavedModel model(nets[rank()]);
    auto net = model.get_module();
    step([&](torch::Tensor x, torch::Tensor y) {
      auto loss = net->loss(x, y);
      model->backward(loss);
      return loss;
    })(batch[0], batch[1]);
    for (const bool asynchronous : {false, true}) {
      save_checkpoint(path(), "a", model,
                      SaveCheckpointOptions().partial(false).asynchronous(asynchronous))
          .wait();
      const auto expected = model->state_dict();
      if (rank() > 0) continue;
      checkpoint::Reader reader(path("a"));
      for (const auto& item : expected) {
        EXPECT_TRUE(torch::equal(reader.read_model(item.key()), item.value())) << item.key();
      }
    }
  });
}

TEST_F(SaveCheckpoint, ResumesTheModelOfAFullOne) {
  run(2, 1, [&](SavedRun& run) {
    run.train(0);
    save_checkpoint(path(), "one", run.model, run.optimizer,
                    SaveCheckpointOptions().partial(false));
  });
  run(
      1, 2,
      [&](SavedRun& run) {
        resume_from_checkpoint(path(), "one", run.model, run.optimizer,
                               LoadOptions().partial(false));
        const auto state = run.model->state_dict();
        checkpoint::Reader reader(path("one"));
        for (const auto& item : state) {
          EXPECT_TRUE(torch::equal(item.value(), reader.read_model(item.key()))) << item.key();
        }
      },
      9);
}

TEST_F(SaveCheckpoint, KeepsTheNewestPartialOnes) {
  run(2, 1, [&](SavedRun& run) {
    const auto options = SaveCheckpointOptions().num_kept_partial_checkpoints(2);
    int step = 0;
    for (const char* tag : {"1", "2", "3", "2", "4"}) {
      run.train(step++);
      save_checkpoint(path(), tag, run.model, run.optimizer, options);
      save_checkpoint(path(), tag, run.model, SaveCheckpointOptions(options).partial(false));
    }
  });
  EXPECT_THAT(names_in(path()),
              UnorderedElementsAre("1", "2", "3", "4", "2_partial", "4_partial", "newest"));
}

TEST_F(SaveCheckpoint, AFailedSaveRemovesNoOther) {
  run(1, 1, [&](SavedRun& run) {
    const auto options = SaveCheckpointOptions().num_kept_partial_checkpoints(1);
    save_checkpoint(path(), "1", run.model, run.optimizer, options);
    fs::create_directories(path("2_partial"));
    std::ofstream(path("2_partial/thesis.txt")) << "years of work";
    EXPECT_THROW(save_checkpoint(path(), "2", run.model, run.optimizer, options), CheckpointError);
    EXPECT_EQ(resume_from_checkpoint(path(), std::nullopt, run.model, run.optimizer).step, 0);
  });
}

/// Not only while it writes: else two jobs would replace each other's checkpoints in turn.
TEST_F(SaveCheckpoint, AJobKeepsOthersFromWhereItSaves) {
  const auto other_job = [&](const std::function<void(SavedRun&)>& saves) {
    Texts texts;
    std::thread([&] {
      run(1, 1, [&](SavedRun& other) { texts.of([&] { saves(other); }); });
    }).join();
    return texts.one_with("");
  };
  const std::string here =
      "process " + std::to_string(getpid()) + " on " + core::host_name() + " saves there, since ";
  run(1, 1, [&](SavedRun& job) {
    save(path("plain"), job.model, job.optimizer);
    save_checkpoint(path("tags"), "a", job.model, job.optimizer);
    EXPECT_THAT(other_job([&](SavedRun& other) { save(path("plain"), other.model); }),
                AllOf(HasSubstr("cannot save checkpoint \"" + path("plain") + "\": " + here),
                      HasSubstr("(\"" + path("plain.lock") + "\" is locked). Give each job a")));
    EXPECT_THAT(
        other_job([&](SavedRun& other) { save_checkpoint(path("tags"), "b", other.model); }),
        AllOf(HasSubstr("cannot save checkpoint \"" + path("tags/b_partial") + "\": " + here),
              HasSubstr("(\"" + path("tags/.lock") + "\" is locked).")));
    EXPECT_EQ(other_job([&](SavedRun& other) {
                save(path("elsewhere"), other.model);
                load(path("plain"), other.model);
              }),
              "");
    save(path("plain"), job.model, job.optimizer);
    save_checkpoint(path("tags"), "a", job.model, job.optimizer);
  });
  EXPECT_EQ(other_job([&](SavedRun& other) {
              save(path("plain"), other.model);
              save_checkpoint(path("tags"), "b", other.model);
            }),
            "");
  EXPECT_THAT(names_in(path()), UnorderedElementsAre("plain", "tags", "elsewhere"));
  EXPECT_THAT(names_in(path("tags")), UnorderedElementsAre("a_partial", "b_partial", "newest"));
}

TEST_F(SaveCheckpoint, LocksOnlyThePlacesThatItSavedToLast) {
  run(1, 1, [&](SavedRun& job) {
    for (int i = 0; i < 20; ++i) save(path(std::to_string(i)), job.model);
    std::set<std::string> locks;
    for (const std::string& name : names_in(path())) {
      if (fs::path(name).extension() == ".lock") locks.insert(name);
    }
    EXPECT_EQ(locks.size(), 16);
    EXPECT_EQ(locks.count("19.lock"), 1);
    EXPECT_EQ(locks.count("3.lock"), 0);
  });
}

TEST_F(SaveCheckpoint, LoadsTheModelAloneOnRequest) {
  run(2, 1, [&](SavedRun& run) {
    run.train(0);
    save_checkpoint(path(), "one", run.model, run.optimizer);
  });
  run(2, 1, [&](SavedRun& run) {
    run.optimizer.param_groups()[0].options().set_lr(0.5);
    resume_from_checkpoint(path(), "one", run.model, run.optimizer,
                           LoadOptions().load_optimizer(false));
    EXPECT_EQ(run.optimizer.param_groups()[0].options().get_lr(), 0.5);
    run.train(1);
    // Without its state, but with the options.
    resume_from_checkpoint(path(), "one", run.model, run.optimizer,
                           LoadOptions().load_sharded_optimizer_state(false));
    EXPECT_EQ(run.optimizer.param_groups()[0].options().get_lr(), 1e-2);
    EXPECT_TRUE(optim::tensors_of(run.optimizer.impl().local_state()).empty());
  });
}

TEST_F(SaveCheckpoint, WithoutStrictLoadsWhatIsThere) {
  run(1, 1, [&](SavedRun& run) { save_checkpoint(path(), "a", run.model); });
  run_as_threads(1, Config(), [&] {
    TinyGpt larger(/*tied=*/true, /*layers=*/3);
    SavedModel model(larger);
    Texts texts;
    texts.of([&] { resume_from_checkpoint(path(), "a", model); });
    EXPECT_THAT(texts.the_same_from(1), HasSubstr("up2.weight: missing"));
    resume_from_checkpoint(path(), "a", model, LoadOptions().strict(false));
    checkpoint::Reader reader(path("a_partial"));
    EXPECT_TRUE(torch::equal(larger->head, reader.read_model("head")));
  });
}

TEST_F(SaveCheckpoint, HoldsStateOfTheProgramsOwn) {
  int epochs = 3;
  std::atomic<int> loaded{0};
  run(2, 1, [&](SavedRun& run) {
    if (rank() == 0) {
      register_checkpoint_state("data",
                                [&] {
                                  return nlohmann::json{{"epochs", epochs}}.dump();
                                },
                                {});
    }
    auto gone = register_checkpoint_state("gone", [] { return "1"; }, {});
    gone.remove();
    save_checkpoint(path(), "a", run.model, run.optimizer).wait();
  });
  run(2, 1, [&](SavedRun& run) {
    register_checkpoint_state(
        "data", [] { return "null"; },
        [&](const std::string& state) {
          loaded += nlohmann::json::parse(state).at("epochs").get<int>();
        });
    register_checkpoint_state(
        "new", [] { return "null"; },
        [](const std::string&) { FAIL() << "there is no such state"; });
    const LoadedRun run_state = resume_from_checkpoint(path(), "a", run.model, run.optimizer);
    EXPECT_EQ(run_state.extra, (std::map<std::string, std::string>{{"data", R"({"epochs":3})"}}));
  });
  EXPECT_EQ(loaded, 2 * 3);
  Texts texts;
  run(1, 1, [&](SavedRun&) {
    const auto nothing = [] { return "null"; };
    register_checkpoint_state("data", nothing, {});
    texts.of<UsageError>([&] { register_checkpoint_state("data", nothing, {}); });
  });
  EXPECT_THAT(
      texts.the_same_from(1),
      HasSubstr("register_checkpoint_state was called twice for \"data\": give each state a "
                "name of its own"));
}

TEST_F(SaveCheckpoint, AnErrorOfTheProgramsStateIsOneOnAllRanks) {
  Texts texts;
  run(2, 1, [&](SavedRun& run) {
    register_checkpoint_state(
        "bad", []() -> std::string { throw std::runtime_error("no idea where the data is"); }, {});
    texts.of([&] { save_checkpoint(path(), "a", run.model); });
  });
  EXPECT_EQ(texts.the_same_from(2), "no idea where the data is");
}

TEST_F(SaveCheckpoint, TheProgramsTextsMustBeJson) {
  Texts contents, states;
  run(2, 1, [&](SavedRun& run) {
    contents.of<UsageError>([&] { save(path(), run.model, "epoch 3"); });
    register_checkpoint_state("data", [] { return "{"; }, {});
    states.of<UsageError>([&] { save(path(), run.model); });
  });
  EXPECT_THAT(
      contents.the_same_from(2),
      HasSubstr("the user_content of a checkpoint must be text of JSON, got: epoch 3. Quote "
                "a plain text"));
  EXPECT_THAT(states.the_same_from(2),
              HasSubstr("the state \"data\" of a checkpoint must be text of JSON, got: {."));
}

TEST_F(SaveCheckpoint, RanksGiveTheSameArguments) {
  Texts texts;
  run(2, 1, [&](SavedRun& run) {
    texts.of<UsageError>(
        [&] { save_checkpoint(path(), "rank" + std::to_string(rank()), run.model); });
    texts.of<UsageError>([&] {
      save_checkpoint(path(), "a", run.model,
                      SaveCheckpointOptions().num_kept_partial_checkpoints(0));
    });
  });
  const std::string text = texts.one_with("ranks save different checkpoints: rank 0 calls ");
  EXPECT_THAT(
      text,
      HasSubstr("rank1_partial, 1 models, 0 optimizers. Give the same arguments on every rank"));
  EXPECT_THAT(texts.one_with("expected num_kept_partial_checkpoints of at least 1, got 0"),
              HasSubstr("Leave it out to keep all"));
}

TEST_F(SaveCheckpoint, ConvertsWhenAsked) {
  run(2, 1, [&](SavedRun& run) {
    run.train(0);
    save_checkpoint(path(), "a", run.model, run.optimizer);
  });
  run_as_threads(2, Config().partitions(2), [&] {
    TinyGpt net(/*tied=*/true, /*layers=*/2);
    net->to(torch::kBFloat16);
    SavedModel model(net);
    Texts texts;
    texts.of([&] { resume_from_checkpoint(path(), "a", model); });
    EXPECT_THAT(texts.the_same_from(1), HasSubstr("head: expected BF16 [17, 16], got F32"));
    resume_from_checkpoint(path(), "a", model, LoadOptions().convert(true));
    checkpoint::Reader reader(path("a_partial"));
    EXPECT_TRUE(torch::equal(net->head, reader.read_model("head").to(torch::kBFloat16)));
  });
}

}  // namespace
}  // namespace smp::testing
