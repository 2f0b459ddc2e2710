// SPDX-License-Identifier: Apache-2.0
// Loading another program's safetensors into a model on several ranks.

#include <gmock/gmock.h>

#include "checkpoint/safetensors.h"
#include "tests/smp/saved_run.h"

namespace smp::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

class Pretrained : public SavedRunTest {
 protected:
  Pretrained() {
    torch::manual_seed(21);
    TinyGpt other(/*tied=*/true, /*layers=*/2);
    std::vector<std::pair<std::string, torch::Tensor>> tensors;
    for (const auto& item : other->named_parameters()) {
      expected_[item.key()] = item.value().detach();
      if (item.key() != "head") tensors.emplace_back("gpt." + item.key(), item.value());
    }
    checkpoint::write_safetensors(path("model.safetensors"), tensors);
  }

  static PretrainedOptions options() {
    return PretrainedOptions().names(NameMap().rename("gpt.{rest*}", "{rest*}"));
  }

  std::map<std::string, torch::Tensor> expected_;
};

TEST_F(Pretrained, EachRankReadsWhatItHolds) {
  for (const auto& [stages, replicas] : {std::pair{1, 1}, {2, 2}, {3, 1}}) {
    for (const bool after_a_step : {false, true}) {
      run(stages, replicas, [&](SavedRun& run) {
        if (after_a_step) run.train(0);
        const auto report = load_pretrained(path(), run.model, options());
        EXPECT_EQ(report.used.size(), expected_.size() - 1);
        EXPECT_THAT(report.unused, IsEmpty());
        EXPECT_THAT(report.missing, IsEmpty());
        const auto state = run.model->state_dict();
        for (const auto& [name, tensor] : expected_) {
          EXPECT_TRUE(torch::equal(state[name], tensor)) << name;
        }
        run.train(1);
      });
    }
  }
}

TEST_F(Pretrained, WhatIsWrittenIsWhatWasRead) {
  for (const auto& [stages, replicas] : {std::pair{1, 1}, {2, 2}, {3, 1}}) {
    for (const bool after_a_step : {false, true}) {
      const std::string out = path() + "/out";
      run(stages, replicas, [&](SavedRun& run) {
        if (after_a_step) run.train(0);
        load_pretrained(path(), run.model, options());
        save_pretrained(out, run.model, options().names());
        run.train(1);
      });
      const checkpoint::SafetensorsReader written(out + "/model.safetensors");
      EXPECT_EQ(written.entries().size(), expected_.size() - 1);
      for (const auto& [name, tensor] : expected_) {
        if (name == "tokens.weight") continue;  // tied: stored once, as "head"
        EXPECT_TRUE(torch::equal(written.read("gpt." + name), tensor)) << name;
      }
    }
  }
}

TEST_F(Pretrained, WhatCannotBeWrittenIsOneErrorOnAllRanks) {
  Texts texts;
  run(2, 1, [&](SavedRun& run) {
    texts.of([&] { save_pretrained(path("model.safetensors"), run.model, options().names()); });
    run.train(0);
    save_pretrained(path() + "/out", run.model);
  });
  EXPECT_THAT(texts.the_same_from(2), HasSubstr("cannot write pretrained files to "));
}

TEST_F(Pretrained, WhatDoesNotFitIsOneErrorOnAllRanks) {
  Texts texts;
  run(2, 1, [&](SavedRun& run) {
    const auto before = held_by_rank(run);
    texts.of([&] { load_pretrained(path(), run.model); });
    expect_same(held_by_rank(run), before);
    const auto report = load_pretrained(path(), run.model, PretrainedOptions().strict(false));
    EXPECT_THAT(report.used, IsEmpty());
    EXPECT_EQ(report.unused.size(), expected_.size() - 1);
  });
  EXPECT_THAT(texts.the_same_from(2), HasSubstr("gpt.tokens.weight: stored, but the model has no"));
}

TEST_F(Pretrained, IsNotForTheStepFunction) {
  Texts texts;
  run_as_threads(1, Config(), [&] {
    TinyGpt net(/*tied=*/true);
    SavedModel model(net);
    texts.of<UsageError>([&] {
      step([&](torch::Tensor x) {
        load_pretrained(path(), model, options());
        return x;
      })(torch::ones({1}));
    });
  });
  EXPECT_THAT(texts.the_same_from(1), HasSubstr("smp::load_pretrained was called inside a step "
                                                "function; call it before or after the step"));
}

}  // namespace
}  // namespace smp::testing
