// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <mutex>

#include "smp/smp.h"
#include "tests/smp/models.h"
#include "tests/temp_folder.h"

namespace smp::testing {
namespace {

using Tensors = std::vector<torch::Tensor>;

constexpr int kGlobalMicrobatches = 4;
constexpr int64_t kBatch = 8;
constexpr int kResumeSteps = 6;
constexpr int kSavedAt = 3;

struct ResumeLayout {
  int stages;
  int replicas;
};

/// Global microbatch losses by step.
using Losses = std::vector<Tensors>;

class Resume : public ::testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    torch::set_num_threads(1);
    torch::manual_seed(3);
    for (int i = 0; i < kResumeSteps; ++i) batches_.push_back(TinyGptImpl::batch(kBatch));
  }

  std::string path() const { return folder_.file("step_3"); }

  /// Trains steps [first, last) and returns their losses; loads before and saves after if asked.
  Losses train(const ResumeLayout& layout, int first, int last, bool load, bool save,
               bool after_a_step = false) {
    Losses losses(kResumeSteps, Tensors(kGlobalMicrobatches));
    std::mutex mutex;
    const int microbatches = kGlobalMicrobatches / layout.replicas;
    auto config = Config()
                      .partitions(layout.stages)
                      .microbatches(microbatches)
                      .ddp(layout.replicas > 1)
                      .timeout_seconds(60);
    const int ranks = layout.stages * layout.replicas;
    torch::manual_seed(load ? 77 : 5);  // a resumed run must not depend on its own seed
    std::vector<TinyGpt> nets;
    for (int i = 0; i < ranks; ++i) nets.emplace_back(GetParam());
    run_as_threads(ranks, config, [&] {
      DistributedModel<TinyGpt> model(nets[rank()]);
      DistributedOptimizer<torch::optim::AdamW> optimizer(
          model->parameters(), torch::optim::AdamWOptions(load ? 0.5 : 1e-2));
      auto net = model.get_module();
      auto train = step([&](torch::Tensor x, torch::Tensor y) {
        auto loss = net->loss(x, y);
        model->backward(loss);
        return loss;
      });
      const auto one = [&](int i) {
        const int64_t size = kBatch / layout.replicas;
        optimizer.zero_grad();
        const auto result = train(batches_[i][0].narrow(0, dp_rank() * size, size),
                                  batches_[i][1].narrow(0, dp_rank() * size, size));
        optimizer.step();
        optimizer.param_groups()[0].options().set_lr(lr(i + 1));
        return result;
      };
      if (after_a_step) one(0);
      if (load) {
        const LoadedRun run = smp::load(path(), model, optimizer);
        EXPECT_EQ(run.step, kSavedAt);
        EXPECT_EQ(run.user_content, R"({"note":"three"})");
        // Options are those of the saved run at once, and may be changed before the first step.
        EXPECT_NE(optimizer.param_groups()[0].options().get_lr(), 0.5);
        EXPECT_EQ(optimizer.param_groups()[0].options().get_lr(), 1e-2);
        optimizer.param_groups()[0].options().set_lr(lr(first));
      }
      for (int i = first; i < last; ++i) {
        const auto result = one(i);
        const std::lock_guard<std::mutex> lock(mutex);
        for (int m = 0; m < microbatches; ++m) {
          losses[i][dp_rank() * microbatches + m] = result.outputs()[m];
        }
      }
      if (save) {
        optimizer.param_groups()[0].options().set_lr(1e-2);
        smp::save(path(), model, optimizer, R"({"note":"three"})");
      }
    });
    return losses;
  }

  /// A schedule of the program's own.
  static double lr(int step) { return 1e-2 / (1 + step); }

  static void expect_equal(const Losses& got, const Losses& expected, int first, int last) {
    for (int i = first; i < last; ++i) {
      for (int m = 0; m < kGlobalMicrobatches; ++m) {
        EXPECT_TRUE(torch::equal(got[i][m], expected[i][m]))
            << "step " << i << " microbatch " << m << ": " << got[i][m].item<double>()
            << " against " << expected[i][m].item<double>();
      }
    }
  }

  const TempFolder folder_;
  std::vector<Tensors> batches_;
};

TEST_P(Resume, ContinuesBitForBitInOtherLayouts) {
  const Losses whole = train({2, 2}, 0, kResumeSteps, false, false);
  const Losses begun = train({2, 2}, 0, kSavedAt, false, true);
  expect_equal(begun, whole, 0, kSavedAt);
  for (const ResumeLayout& layout :
       {ResumeLayout{2, 2}, ResumeLayout{4, 1}, ResumeLayout{1, 1}, ResumeLayout{1, 2}}) {
    SCOPED_TRACE(c10::str(layout.stages, " stages x ", layout.replicas, " replicas"));
    expect_equal(train(layout, kSavedAt, kResumeSteps, true, false), whole, kSavedAt, kResumeSteps);
  }
  // Into a model that is partitioned already.
  expect_equal(train({3, 1}, kSavedAt, kResumeSteps, true, false, true), whole, kSavedAt,
               kResumeSteps);
}

TEST_P(Resume, LoadsIntoThePlainModule) {
  torch::manual_seed(5);
  train({3, 1}, 0, kSavedAt, false, true);
  torch::manual_seed(9);
  TinyGpt plain(GetParam());
  load_into_module(path(), *plain);
  plain->eval();
  torch::NoGradGuard no_grad;
  const auto loss = plain->loss(batches_[0][0], batches_[0][1]);
  // The same from the distributed model.
  std::vector<TinyGpt> nets;
  for (int i = 0; i < 2; ++i) nets.emplace_back(GetParam());
  run_as_threads(2, Config().partitions(2).microbatches(1), [&] {
    DistributedModel<TinyGpt> model(nets[rank()]);
    smp::load(path(), model);
    model->eval();
    auto net = model.get_module();
    auto evaluate = step([&](torch::Tensor x, torch::Tensor y) { return net->loss(x, y); });
    EXPECT_TRUE(torch::equal(evaluate(batches_[0][0], batches_[0][1]).outputs()[0], loss));
  });
}

std::string load_error(const std::string& path, bool tied, int layers) {
  try {
    run_as_threads(1, Config(), [&] {
      TinyGpt net(tied, layers);
      DistributedModel<TinyGpt> model(net);
      smp::load(path, model);
    });
  } catch (const CheckpointError& error) {
    return error.what();
  }
  return "";
}

TEST_P(Resume, SaysEverythingThatDoesNotFit) {
  train({2, 1}, 0, 1, false, true);
  const std::string text = load_error(path(), GetParam(), 4);
  EXPECT_NE(text.find("norm3.weight"), std::string::npos) << text;
  EXPECT_NE(text.find("down3.bias"), std::string::npos) << text;
  EXPECT_NE(load_error(folder_.file("nothing"), GetParam(), 3).find("nothing"), std::string::npos);
}

TEST_P(Resume, NamesATruncatedFile) {
  train({2, 1}, 0, 1, false, true);
  for (const auto& entry : std::filesystem::directory_iterator(path())) {
    const std::string file = entry.path().filename();
    if (file.rfind("model-00002", 0) != 0) continue;
    std::filesystem::resize_file(entry.path(), entry.file_size() - 5);
    const std::string text = load_error(path(), GetParam(), 3);
    EXPECT_NE(text.find(file), std::string::npos) << text;
    return;
  }
  FAIL() << "no second model file was written";
}

INSTANTIATE_TEST_SUITE_P(TiedAndUntied, Resume, ::testing::Bool());

}  // namespace
}  // namespace smp::testing
