// SPDX-License-Identifier: Apache-2.0
// Whatever is wrong with a checkpoint's files, all ranks say so and nothing changes on any.

#include <gmock/gmock.h>

#include <cstdlib>

#include "checkpoint/apply.h"
#include "checkpoint/writer.h"
#include "core/restart.h"
#include "tests/smp/saved_run.h"

namespace smp::testing {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

struct Damage {
  const char* name;
  std::function<void(const std::string& folder)> apply;
  std::string expected;  ///< part of the error
};

void flip_last_bit(const std::string& file) {
  std::fstream stream(file, std::ios::in | std::ios::out | std::ios::binary);
  const auto last = static_cast<std::streamoff>(fs::file_size(file)) - 1;
  stream.seekg(last);
  const char byte = static_cast<char>(stream.get() ^ 1);
  stream.seekp(last);
  stream.put(byte);
}

void exchange(const std::string& a, const std::string& b) {
  fs::rename(a, a + ".other");
  fs::rename(b, a);
  fs::rename(a + ".other", b);
}

constexpr const char* kModel = "/model-00002-of-00002.safetensors";
constexpr const char* kOptimizer = "/optimizer-00001-of-00002.safetensors";

const std::vector<Damage>& damages() {
  static const std::vector<Damage> all{
      {"flipped model", [](const auto& c) { flip_last_bit(c + kModel); },
       "is damaged:\n  model-00002-of-00002.safetensors: tensor \""},
      {"flipped optimizer", [](const auto& c) { flip_last_bit(c + kOptimizer); },
       "is damaged:\n  optimizer-00001-of-00002.safetensors: tensor \""},
      {"truncated optimizer",
       [](const auto& c) { fs::resize_file(c + kOptimizer, fs::file_size(c + kOptimizer) - 9); },
       "is incomplete:\n  optimizer-00001-of-00002.safetensors: expected "},
      {"missing model", [](const auto& c) { fs::remove(c + kModel); },
       "is incomplete:\n  model-00002-of-00002.safetensors: expected "},
      {"model and optimizer exchanged", [](const auto& c) { exchange(c + kModel, c + kOptimizer); },
       "is incomplete:\n  model-00002-of-00002.safetensors: expected "},
      {"missing index", [](const auto& c) { fs::remove(c + "/index.json"); },
       "expected a folder with index.json, got no such file in it"},
      {"edited index",
       [](const auto& c) {
         std::ifstream in(c + "/index.json");
         std::stringstream text;
         text << in.rdbuf();
         std::string edited = text.str();
         edited.replace(edited.find("\"step\": 1"), 9, "\"step\": 7");
         std::ofstream(c + "/index.json") << edited;
       },
       "index.json\" is damaged or was edited: expected checksum "},
      {"index of another step",
       [](const auto& c) {
         fs::copy_file(c + "/../later/index.json", c + "/index.json",
                       fs::copy_options::overwrite_existing);
       },
       "is damaged:\n  model-00001-of-00002.safetensors: tensor \""},
      {"model of another step",
       [](const auto& c) {
         fs::copy_file(c + "/../later" + kModel, c + kModel, fs::copy_options::overwrite_existing);
       },
       "is damaged:\n  model-00002-of-00002.safetensors: tensor \""},
  };
  return all;
}

class CheckpointDamage : public SavedRunTest {
 protected:
  void SetUp() override {
    run(2, 1, [&](SavedRun& run) {
      run.train(0);
      save(path("whole"), run.model, run.optimizer);
      run.train(1);
      save(path("later"), run.model, run.optimizer);
    });
  }

  /// Loads damaged checkpoints on 2 stages x 2 replicas, with other weights.
  void expect_found(bool after_a_step) {
    for (const Damage& damage : damages()) {
      SCOPED_TRACE(damage.name);
      fs::remove_all(path("damaged"));
      fs::copy(path("whole"), path("damaged"));
      damage.apply(path("damaged"));
      Texts texts;
      run(
          2, 2,
          [&](SavedRun& run) {
            if (after_a_step) run.train(2);
            const auto before = held_by_rank(run);
            texts.of([&] { load(path("damaged"), run.model, run.optimizer); });
            expect_same(held_by_rank(run), before);
            run.train(3);  // the ranks are still together
          },
          /*seed=*/9);
      EXPECT_THAT(texts.the_same_from(4), HasSubstr(damage.expected));
    }
  }
};

TEST_F(CheckpointDamage, IsFoundByAllRanksBeforeTheFirstStep) { expect_found(false); }

TEST_F(CheckpointDamage, IsFoundByAllRanksAfterAStep) { expect_found(true); }

TEST_F(CheckpointDamage, OfTheOptimizerDoesNotConcernWhoLoadsTheModel) {
  flip_last_bit(path("whole") + kOptimizer);
  run(1, 2, [&](SavedRun& run) { EXPECT_EQ(load(path("whole"), run.model).step, 1); });
}

TEST_F(CheckpointDamage, ChecksThatAllRanksLoadTheSame) {
  Texts texts;
  run(2, 1, [&](SavedRun& run) {
    texts.of([&] { load(path(rank() == 0 ? "whole" : "later"), run.model); });
  });
  EXPECT_THAT(texts.the_same_from(2),
              ::testing::MatchesRegex("ranks load different checkpoints: rank 0 that of checksum "
                                      "................ at .*/whole, rank 1 that of "
                                      "................ at .*/later. All ranks must load .*"));
}

TEST_F(CheckpointDamage, AMissingFolderOnOneRankIsAnErrorOnAll) {
  Texts texts;
  run(2, 1, [&](SavedRun& run) {
    texts.of([&] { load(path(rank() == 0 ? "whole" : "nothing"), run.model); });
  });
  EXPECT_THAT(texts.the_same_from(2), HasSubstr("nothing\": expected a folder with index.json"));
}

TEST_F(CheckpointDamage, ATensorOfNoParameterIsAnErrorBeforeTheModelChanges) {
  Texts texts;
  run(1, 1, [&](SavedRun& run) {
    run.train(0);
    const checkpoint::Writer writer(path("odd"));
    writer.begin();
    checkpoint::Shard shard;
    shard.model = checkpoint::named_tensors(checkpoint::state_dict(*run.model.get_module()));
    shard.optimizer = optim::to_json(run.optimizer.impl().local_state());
    shard.optimizer["state"] = nlohmann::json::object();
    shard.optimizer_tensors["head/exp_avg"] = torch::ones({17, 16});
    checkpoint::RunState state;
    state.random.step_calls["step 0"] = 1;
    writer.commit({writer.write_shard(0, 1, shard)}, state);
    run.train(1);
    const auto before = run.model->state_dict();
    texts.of([&] { load(path("odd"), run.model, run.optimizer); });
    for (const auto& item : run.model->state_dict()) {
      EXPECT_TRUE(torch::equal(item.value(), before[item.key()])) << item.key();
    }
  });
  EXPECT_THAT(texts.the_same_from(1),
              HasSubstr("has optimizer tensor \"head/exp_avg\" of a parameter without state. Use"));
}

/// A load must not leave it to the next update to find that.
TEST_F(CheckpointDamage, AFieldOfAnotherShapeIsFoundBeforeAnythingChanges) {
  for (const int stages : {1, 2}) {
    for (const bool after_a_step : {false, true}) {
      Texts texts;
      run(1, 1, [&](SavedRun& run) {
        run.train(0);
        const auto state = run.optimizer.impl().local_state();
        checkpoint::Shard shard;
        shard.model = checkpoint::named_tensors(checkpoint::state_dict(*run.model.get_module()));
        shard.optimizer = optim::to_json(state);
        shard.optimizer_tensors = optim::tensors_of(state);
        shard.optimizer_tensors.at("head/exp_avg") = torch::ones({16, 17});
        const checkpoint::Writer writer(path("odd"));
        writer.begin();
        checkpoint::RunState progress;
        progress.random.step_calls["step 0"] = 1;
        writer.commit({writer.write_shard(0, 1, shard)}, progress);
      });
      run(stages, 1, [&](SavedRun& run) {
        if (after_a_step) run.train(1);
        const auto before = held_by_rank(run);
        texts.of([&] { load(path("odd"), run.model, run.optimizer); });
        expect_same(held_by_rank(run), before);
      });
      EXPECT_THAT(texts.the_same_from(stages),
                  HasSubstr("has optimizer state that does not fit its parameters:\n  "
                            "head/exp_avg: expected shape [17, 16], got [16, 17]\nNothing"));
      fs::remove_all(path("odd"));
    }
  }
}

/// Checks an index with a valid checksum and a wrong entry about an optimizer. Nothing may have
/// changed after it.
void expect_no_change(SavedRun& run, const std::string& file, const std::string& from,
                      const std::string& to, const std::string& expected) {
  SCOPED_TRACE(to);
  std::ifstream in(file + "/index.json");
  std::stringstream text;
  text << in.rdbuf();
  const std::string whole = text.str();
  std::string edited = whole;
  ASSERT_NE(edited.find(from), std::string::npos);
  edited.replace(edited.find(from), from.size(), to);
  std::ofstream(file + "/index.json") << checkpoint::with_checksum(edited);
  const auto model = run.model->state_dict();
  const auto state = run.optimizer.impl().local_state();
  Texts texts;
  texts.of([&] { load(file, run.model, run.optimizer); });
  EXPECT_THAT(texts.the_same_from(1), HasSubstr(expected));
  for (const auto& item : run.model->state_dict()) {
    EXPECT_TRUE(torch::equal(item.value(), model[item.key()])) << item.key();
  }
  const auto after = run.optimizer.impl().local_state();
  EXPECT_EQ(optim::to_json(after), optim::to_json(state));
  const auto tensors = optim::tensors_of(state);
  EXPECT_GT(tensors.size(), 0u);
  for (const auto& [name, tensor] : optim::tensors_of(after)) {
    EXPECT_TRUE(torch::equal(tensor, tensors.at(name))) << name;
  }
  std::ofstream(file + "/index.json") << whole;
}

TEST_F(CheckpointDamage, ARefusedOptimizerLeavesThatOfTheProgram) {
  run(1, 1, [&](SavedRun& run) {
    run.train(0);
    save(path("c"), run.model, run.optimizer);
    run.train(1);
    const std::string file = path("c");
    expect_no_change(run, file, "\"state\": {",
                     "\"state\": {\"stranger\": {\"shape\": [1], \"scalars\": {\"step\": 1}}, ",
                     "has optimizer state of what is no parameter of the program:\n  stranger\n");
    expect_no_change(run, file, "\"scalars\": {\"step\": 1}", "\"scalars\": {\"step\": 1e300}",
                     "the saved optimizer state is malformed: state of parameter \"");
    expect_no_change(run, file, "\"scalars\": {\"step\": 1}", "\"scalars\": {\"stop\": 1}",
                     "the saved optimizer state is malformed: state of parameter \"");
    load(file, run.model, run.optimizer);
  });
}

TEST_F(CheckpointDamage, AnOptimizerOfAnotherFormIsFoundBeforeTheModelChanges) {
  Texts texts;
  torch::manual_seed(8);
  std::vector<TinyGpt> nets;
  for (int i = 0; i < 2; ++i) nets.emplace_back(true, 2);
  run_as_threads(2, Config().partitions(2), [&] {
    SavedModel model(nets[rank()]);
    DistributedOptimizer<torch::optim::SGD> optimizer(model->parameters(), 0.1);
    const auto before = model->state_dict();
    texts.of([&] { load(path("whole"), model, optimizer); });
    const auto after = model->state_dict();
    for (const auto& item : before) {
      EXPECT_TRUE(torch::equal(item.value(), after[item.key()])) << item.key();
    }
  });
  EXPECT_THAT(texts.the_same_from(2), HasSubstr("does not fit this optimizer"));
}

/// A job that smprun has started again.
class Restarted {
 public:
  /// The n-th of `paths` was saved after n steps.
  explicit Restarted(const std::vector<std::string>& paths) {
    core::Restart restart{1, {4, {}}};
    for (const std::string& path : paths) {
      const auto steps = static_cast<int64_t>(restart.before.checkpoints.size() + 1);
      restart.before.checkpoints.push_back({path, steps});
    }
    setenv(core::kRestartVariable, restart.to_text().c_str(), 1);
  }
  ~Restarted() { unsetenv(core::kRestartVariable); }
};

TEST_F(CheckpointDamage, ARestartTakesTheNewestThatIsWhole) {
  fs::remove_all(path("newest"));
  fs::copy(path("later"), path("newest"));
  flip_last_bit(path("newest") + kModel);
  const Restarted restarted({path("whole"), path("later"), path("newest")});
  ::testing::internal::CaptureStderr();
  run(
      2, 1,
      [&](SavedRun& run) {
        const auto resumed = resume_after_restart(run.model, run.optimizer);
        ASSERT_TRUE(resumed);
        EXPECT_EQ(resumed->step, 2);
        run.train(2);
      },
      /*seed=*/9);
  const std::string log = ::testing::internal::GetCapturedStderr();
  EXPECT_THAT(log, HasSubstr("model-00002-of-00002.safetensors: tensor \""));
  EXPECT_THAT(log, HasSubstr("\nGoing on from \"" + path("later") + "\" instead\n"));
  EXPECT_THAT(log, HasSubstr("restart 1: goes on from step 2; 2 steps are trained again\n"));
}

TEST_F(CheckpointDamage, ARestartWithoutAWholeCheckpointIsAnError) {
  const Restarted restarted({path("missing")});
  Texts texts;
  run(2, 1,
      [&](SavedRun& run) { texts.of([&] { resume_after_restart(run.model, run.optimizer); }); });
  EXPECT_THAT(texts.the_same_from(2), HasSubstr("cannot load checkpoint \"" + path("missing")));
}

/// Repeated training is not so unnoticed.
TEST_F(CheckpointDamage, ARestartThatBeginsAnewIsWarnedOf) {
  EXPECT_FALSE(core::this_restart());
  const Restarted restarted({path("later")});
  ::testing::internal::CaptureStderr();
  run(2, 1, [&](SavedRun& run) { run.train(0); });
  EXPECT_THAT(
      ::testing::internal::GetCapturedStderr(),
      HasSubstr("warning: restart 1: goes on from step 0; 4 steps are trained again, though "
                "there is checkpoint \"" +
                path("later") + "\". Call smp::resume_after_restart before the first step\n"));
}

TEST_F(CheckpointDamage, AFirstStartResumesNothing) {
  run(2, 1, [&](SavedRun& run) {
    EXPECT_FALSE(resume_after_restart(run.model, run.optimizer));
    EXPECT_EQ(runtime::Runtime::get().progress.training_steps, 0);
  });
}

}  // namespace
}  // namespace smp::testing
